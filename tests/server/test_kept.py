"""What was computed serves whoever asks for it next: chats with the official client.

On the built-in model, on a random one with windows and on one of states alone, all with the built-in model's tokenizer;
and on the fake device, where steps can be held up. The right numbers are those of the tokens that two prompts share.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import transformers
from tests.engine.bench import WORLDS
from tests.runtime.tiny_configs import COMMON, MODELS
from tests.server import tiny
from tests.server.fakes import ALPHABET, CharTokenizer, listening, running
from tests.server.test_disconnect import Gate

from headway.engine import Engine, EngineConfig
from headway.engine.build import build_engine
from headway.runtime.sources import resolve_source
from headway.server import ServerOptions

Message = dict[str, Any]
LIBRARIAN: list[Message] = [
    {"role": "system", "content": "You are a patient librarian. Answer in one or two sentences."},
    {"role": "user", "content": "Who are you?"},
]
WINDOWED, RECURRENT = "Gemma3", "Mamba2"


@dataclass
class Chat:
    """Conversations with a server of the model `name`."""

    name: str
    client: openai.OpenAI
    engine: Engine

    def begin_anew(self) -> None:
        """Forget what is cached, and what was learned from the tests before."""
        self.engine.reset()
        self.engine.cache._index.usage.reuse._kinds.clear()

    def ask(self, messages: list[Message], salt: str = "", **options: Any) -> Any:
        """An answer, with its explanation."""
        more = {"headway": {"explain": True}, "cache_salt": salt}
        return self.client.chat.completions.create(
            model="kept", messages=messages, temperature=0, extra_body=more, **options
        )


def cached(answer: Any) -> int:
    return int(answer.usage.prompt_tokens_details.cached_tokens)


def says(role: str, tokens: int) -> Message:
    """A message whose content is so many tokens; each message has 4 tokens around it, and the first one more."""
    return {"role": role, "content": " ".join(["so"] * tokens)}


def go_on(messages: list[Message], said: str) -> list[Message]:
    """The next turn: what was said, as the client got it, and another question."""
    return [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]


def text(answer: Any) -> str:
    return str(answer.choices[0].message.content)


def save_model(path: Path, name: str) -> str:
    """Write a tiny model that has the tokenizer of the built-in one. Returns where."""
    words = transformers.AutoTokenizer.from_pretrained(resolve_source(None)[1])
    kind, arguments = MODELS[name]
    tiny.save_model(path, getattr(transformers, kind)(**(COMMON | arguments | {"vocab_size": len(words)})))
    words.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module", params=["built-in", WINDOWED, RECURRENT])
def chat(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chat]:
    name = request.param
    source = None if name == "built-in" else save_model(tmp_path_factory.mktemp("kept") / name, name)
    built = build_engine(source, EngineConfig(memory=64 << 20, check=True))
    assert built.engine.config.prefix_reuse
    with (
        listening(built.engine.start(), built.tokenizer, ServerOptions("kept", explain="all")) as (url, _),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield Chat(name, client, built.engine)


def test_an_answer_that_is_sent_back_is_the_one_that_was_given(chat: Chat):
    first = chat.ask(LIBRARIAN, max_tokens=24, logit_bias={"89": 100})
    assert (text(first), first.usage.prompt_tokens) == ("t" * 24, 30)
    second = chat.ask(go_on(LIBRARIAN, text(first)), max_tokens=4)
    assert (cached(second), second.headway["resumed_from"]) == (53, "answer_end")
    assert second.headway["own_answers"] == [{"start": 30, "stop": 54, "restored": True}]


def test_an_answer_that_a_stop_string_ends_is_reused_up_to_its_visible_text(chat: Chat):
    """Two tokens of the answer are the stop string: the second is never computed, and the first no part of the text."""
    whole = chat.ask(LIBRARIAN, salt="whole", max_tokens=16, logprobs=True)
    pieces = [entry.token for entry in whole.choices[0].logprobs.content]
    stops = [(i, "".join(pieces[i : i + 2])) for i in range(5, 15)]
    at, stop = next((i, stop) for i, stop in stops if "".join(pieces).find(stop) == len("".join(pieces[:i])))
    stopped = chat.ask(LIBRARIAN, max_tokens=16, stop=[stop])
    assert (text(stopped), stopped.usage.completion_tokens) == ("".join(pieces[:at]), at + 2)
    second = chat.ask(go_on(LIBRARIAN, text(stopped)), max_tokens=4)
    assert (cached(second), second.headway["resumed_from"]) == (30 + at, "answer_end")


def test_another_question_behind_the_same_examples_computes_itself_alone(chat: Chat):
    """RPT-14. A window's entries serve the two tokens of the next message's opening as well."""
    chat.begin_anew()
    ends = (89, 190, 278, 409, 465, 591, 692, 825, 879)
    roles = ("system", *("user", "assistant") * 4)
    talk = [says(role, end - start - 4) for role, start, end in zip(roles, (1, *ends), ends, strict=False)]
    first = chat.ask([*talk, says("user", 6)], max_tokens=2)
    assert first.headway["boundaries"] == [*ends, 889]
    second = chat.ask([*talk, {"role": "user", "content": "And now tell me about figs."}], max_tokens=2)
    assert second.headway["matched_tokens"] == 881
    resumed = (881, "prompt_end") if chat.name == WINDOWED else (879, "boundary:-2")
    assert (cached(second), second.headway["resumed_from"]) == resumed


def test_others_share_a_marked_part_whatever_follows_it(chat: Chat):
    """RPT-07, in the instructions and in a user's message."""
    marked = {"type": "text", "text": says("", 513)["content"], "cache_control": {"type": "ephemeral"}}
    more, question = {"type": "text", "text": ". And" + " on" * 44}, says("user", 1)
    for before, role, behind, place in (([], "system", [question], 516), ([says("system", 1)], "user", [], 521)):
        chat.begin_anew()
        contents = [marked], [marked, more]
        talks = [[*before, {"role": role, "content": content}, *behind] for content in contents]
        first, second = (chat.ask(talk, max_tokens=2) for talk in talks)
        assert (first.usage.prompt_tokens, second.usage.prompt_tokens) == (525, 572)
        assert first.headway["breakpoints"] == [place]
        assert (cached(second), second.headway["resumed_from"]) == (place, "breakpoint")
        assert second.headway["matched_tokens"] == place, "nothing more is common to both"


def test_equal_prompts_at_once_are_computed_once(chat: Chat):
    """RPT-15: whoever comes while the first is computed waits for it."""
    chat.begin_anew()
    messages = [says("system", 789), says("user", 1728)]
    before, together = chat.engine.snapshot(60).counters.computed_tokens, threading.Barrier(4)

    def ask() -> Any:
        together.wait(60)
        return chat.ask(messages, max_tokens=1)

    with ThreadPoolExecutor(4) as pool:
        answers = [answer.result() for answer in [pool.submit(ask) for _ in range(4)]]
    assert [answer.usage.prompt_tokens for answer in answers] == [2528] * 4
    assert sorted(cached(answer) for answer in answers) == [0, 2527, 2527, 2527]
    assert chat.engine.snapshot(60).counters.computed_tokens - before == 2531


@pytest.mark.slow
@pytest.mark.parametrize("chat", ["built-in"], indirect=True)
def test_three_attempts_with_a_short_timeout_end_in_a_hit(chat: Chat):
    """RPT-01: 21,599 tokens, and a client that waits for 1.5 seconds. No token is computed twice but the last."""
    chat.begin_anew()
    before = chat.engine.snapshot(60).counters.computed_tokens
    messages = [says("system", 7), says("user", 21_581)]
    for _ in range(3):
        try:
            chat.ask(messages, max_tokens=1, timeout=1.5)
        except openai.APITimeoutError:
            continue
    last = chat.ask(messages, max_tokens=1)
    assert (last.usage.prompt_tokens, last.headway["boundaries"][0]) == (21_599, 12)
    assert cached(last) >= 2060
    assert chat.engine.snapshot(60).counters.computed_tokens - before <= 21_599 + 3


# On the fake device, for every kind of layer.


@pytest.mark.parametrize("world", ["hybrid", "window", "chunk", "state", "all"])
def test_whoever_gives_up_three_times_is_answered_in_the_end(world: str):
    """Every attempt computes three steps of 64 tokens before its client has gone; the next goes on from there."""
    config = EngineConfig(max_batched_tokens=64, max_running=8, max_model_len=600)
    with running(WORLDS[world], config=config) as server:
        gate, prompt = Gate(server), "abcdefgh " * 50
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            for _ in range(2):
                gate.step(2)
                with pytest.raises(openai.APITimeoutError):
                    client.completions.create(model="fake", prompt=prompt, max_tokens=4, timeout=1.0)
                with server.engine._wakeup:  # the abort has arrived, while the third step is held up
                    assert server.engine._wakeup.wait_for(lambda: server.engine._inbox, 60)
                gate.step()
                server.wait_for_open(lambda count: count == 0)
            gate.open()
            last = client.completions.create(model="fake", prompt=prompt, max_tokens=4, temperature=0)
        assert cached(last) == 6 * 64
        assert last.choices[0].text == server.expected(prompt, 4)


@pytest.mark.parametrize("world", list(WORLDS))
def test_a_stopped_answer_goes_on_from_its_visible_text(world: str):
    with running(WORLDS[world]) as server:
        prompts = [f"Once upon a time {sign}" for sign in ALPHABET]
        prompt, whole = next((p, w) for p in prompts if len(w := server.expected(p, 16)) == 16 and w.find(w[9:12]) == 9)
        stopped = server.complete(prompt, max_tokens=16, stop=[whole[9:12]])
        assert stopped["choices"][0]["text"] == whole[:9]
        following = prompt + whole[:9] + "."
        again = server.complete(following, max_tokens=8)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) + 9
        assert again["choices"][0]["text"] == server.expected(following, 8)


class Reasoning(CharTokenizer):
    """A template that shows `???` where an answer begins, not before those it repeats, and drops their reasoning."""

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, answer: bool, options: Mapping[str, Any] | None = None
    ) -> str:
        shown = [dict(m, content=m["content"].rpartition("!")[2]) for m in messages]
        return super().render(shown, answer=answer) + ("???" if answer else "")


@pytest.mark.parametrize("world", ["hybrid", "window", "state", "all"])
def test_a_template_that_shows_something_before_answers_only_loses_no_more_than_that(world: str):
    with running(WORLDS[world], words=Reasoning()) as server:
        first = [{"role": "system", "content": "Be brief and kind to all"}, {"role": "user", "content": "Hello to you"}]
        talk, hits, ends = first, [], []
        for _ in range(3):
            reply = server.post("/v1/chat/completions", messages=talk, max_tokens=3, headway={"explain": True})
            hits.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
            ends.append(reply["headway"]["boundaries"][-1])
            talk = go_on(talk, "so I think that!It is a nice day here")
        more = len("<assistant>") if world == "window" else 0  # the opening of the answer; a window serves that as well
        assert hits[1:] == [end + more for end in ends[:-1]], "each turn resumes where the last message ended"


def test_an_answer_that_is_not_restored_is_named_as_the_cause():
    """The tokenizer writes the answer's spaces as other tokens than the model did."""

    class Spelling(CharTokenizer):
        def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
            return super().decode(tokens).lower()

    for restore in (True, False):
        with running(words=Spelling(), restore_answers=restore, explain="all") as server:
            prompt = next(
                p for p in ALPHABET if server.expected(p, 6) != (w := server.expected(p, 6).lower()) and len(w) == 6
            )
            first = server.complete(prompt, max_tokens=6)["choices"][0]["text"]
            again = server.complete(prompt + first + ".", max_tokens=1, headway={"explain": True})
            hit, report = again["usage"]["prompt_tokens_details"]["cached_tokens"], again["headway"]
            assert report["own_answers"] == [{"start": 1, "stop": 7, "restored": restore}]
            assert (hit == 6) == restore
            told = [loss["detail"] for loss in report["losses"] if "--no-restore-answers" in loss["detail"]]
            assert bool(told) != restore
            assert report["changed"] is None, "the client has sent the very text"
            server.post("/reset_prefix_cache")
            fresh = server.complete(prompt + first + ".", max_tokens=1, headway={"explain": True})
            assert fresh["headway"]["own_answers"] == [], "forgotten with the cache"


class Triples(CharTokenizer):
    """A capital letter and the two signs behind it are one character."""

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        signs, written = super().decode(tokens), ""
        while signs:
            size = 3 if signs[0].isupper() else 1
            written += signs[0] if len(signs) >= size else "\ufffd"
            signs = signs[size:]
        return written


@pytest.mark.parametrize("world", ["hybrid", "window", "state", "all"])
def test_an_answer_that_ends_inside_a_character_goes_on_before_it(world: str):
    with running(WORLDS[world], words=Triples()) as server:
        for prompt in (f"once upon a time {sign}" for sign in ALPHABET):
            signs = server.expected(prompt, 12)
            if (
                len(signs) == 12
                and Triples().decode(CharTokenizer().encode(signs[:10])).isascii()
                and signs[10].isupper()
            ):
                break
        cut = server.complete(prompt, max_tokens=12)["choices"][0]["text"]
        assert cut.endswith("\ufffd")
        again = server.complete(prompt + cut + ".", max_tokens=4)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) + 10
