"""What agents' traffic reuses through a server, against what exact sharing allows: at least 99%.

It is all of it, but where a model writes a call in other words than JSON is written in when the call is sent back, such
as a number with zeros at its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from tests.clients.sharing import allowed
from tests.server.fakes import listening

from headway.engine import Engine, EngineConfig, RequestResult
from headway.engine.build import build_engine
from headway.server import ServerOptions
from headway.server.recorder import Observers

RULES = "You are a patient librarian. " + "Look things up before you answer, and never invent a title. " * 8
QUESTIONS = (
    "Who wrote the oldest of these books, and where was it printed?",
    "Why is the sea salt? Tell it to a child of six.",
    "List what is on the north shelf.",
    'Translate: "Ça va très bien, merci" – and keep the accents.',
    "def f(x):\n    return x + 1\n\nWhat does it do?",
    "Thank you. And the price of it, in 1851?",
)


@dataclass
class Ended:
    """An observer that keeps how requests ended."""

    results: list[RequestResult] = field(default_factory=list)

    def request_finished(self, result: RequestResult) -> None:
        self.results.append(result)

    def step_done(self, seconds: float, tokens: int) -> None:
        pass

    def forgotten(self, salt: str | None) -> None:
        pass


@dataclass
class Served:
    http: httpx.Client
    engine: Engine
    ended: Ended

    def post(self, path: str, **body: Any) -> Any:
        answer = self.http.post(path, json={"model": "builtin"} | body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def rate(self, first: int = 1) -> float:
        """Of what exact sharing allowed, what was reused, from request number `first` on."""
        results = self.ended.results
        most = allowed([(result.request.tokens, result.tokens) for result in results])
        print([(result.cached_tokens, best, result.prompt_tokens) for result, best in zip(results, most, strict=True)])
        return sum(result.cached_tokens for result in results[first:]) / sum(most[first:])


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    built = build_engine(None, EngineConfig(memory=64 << 20, max_running=4))
    ended = Ended()
    with listening(built.engine.start(), built.tokenizer, ServerOptions("builtin")) as (url, _):
        built.engine.observer = Observers((built.engine.observer, ended))
        with httpx.Client(base_url=url, timeout=300) as http:
            yield Served(http, built.engine, ended)


@pytest.fixture
def served(server: Served) -> Served:
    server.post("/reset_prefix_cache")
    server.ended.results.clear()
    return server


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Do {name} on a shelf of the library",
            "parameters": {
                "type": "object",
                "properties": {
                    "words": {"type": "string", "maxLength": 24},
                    "share": {"type": "integer", "minimum": 0, "maximum": 9},
                    "shelves": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
                },
                "required": ["words", "share", "shelves"],
            },
        },
    }
    for name in ("look_up", "count", "read_aloud")
]


def test_a_loop_of_ten_tool_calls(served: Served) -> None:
    messages: list[Any] = [{"role": "system", "content": RULES}, {"role": "user", "content": QUESTIONS[0]}]
    for step in range(10):
        answer = served.post(
            "/v1/chat/completions",
            messages=messages,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            seed=step,
        )
        message = answer["choices"][0]["message"]
        (call,) = message["tool_calls"]
        result = f'{{"step": {step}, "found": "{QUESTIONS[step % 6][:20]}"}}'
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": result}]
    assert served.rate() >= 0.99


MARK = {"cache_control": {"type": "ephemeral"}}


def marked(messages: list[Any]) -> list[Any]:
    """The messages with a breakpoint at the end of the last one, as Claude's clients send them: it moves."""
    *earlier, last = messages
    *parts, end = [{"type": "text", "text": last["content"]}] if isinstance(last["content"], str) else last["content"]
    return [*earlier, last | {"content": [*parts, end | MARK]}]


def test_a_series_whose_breakpoint_moves(served: Served) -> None:
    system = {"role": "system", "content": [{"type": "text", "text": RULES} | MARK]}
    messages: list[Any] = []
    for turn, question in enumerate(QUESTIONS):
        messages.append({"role": "user", "content": question})
        answer = served.post(
            "/v1/chat/completions",
            messages=[system, *marked(messages)],
            tools=[*TOOLS[:-1], TOOLS[-1] | MARK],
            tool_choice="none",
            seed=turn,
            max_tokens=40,
        )
        messages.append(answer["choices"][0]["message"])
    assert served.rate() >= 0.99


def test_claudes_own_series_of_talk_and_tool_calls(served: Served) -> None:
    tools = [{"name": one["name"], "description": one["description"]} for one in (t["function"] for t in TOOLS)]
    tools = [one | {"input_schema": t["function"]["parameters"]} for one, t in zip(tools, TOOLS, strict=True)]
    messages: list[Any] = []
    for question in QUESTIONS[:3]:
        messages.append({"role": "user", "content": question})
        for kind in ("any", "none"):
            answer = served.post(
                "/v1/messages",
                system=[{"type": "text", "text": RULES} | MARK],
                messages=marked(messages),
                tools=[*tools[:-1], tools[-1] | MARK],
                tool_choice={"type": kind} | ({"disable_parallel_tool_use": True} if kind == "any" else {}),
                max_tokens=300 if kind == "any" else 40,
            )
            messages.append({"role": "assistant", "content": answer["content"]})
            results = [
                {"type": "tool_result", "tool_use_id": block["id"], "content": "3 books on the north shelf"}
                for block in answer["content"]
                if block["type"] == "tool_use"
            ]
            messages += [{"role": "user", "content": results}] if results else []
    assert served.rate() >= 0.99
