"""The README's commands do what it shows: each is run here, or is named below with the reason why not.

`make serve` and `make test` are run as what they call, in the environment at hand, without an installation. Times and
sizes are masked, because they belong to the machine.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from tests.docs.pages import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S)
SPAN = re.compile(r"`((?:make|headway|pip|python3?|curl|\. \.venv)[ /][^`]+)`")
LIBRARIAN = "curl -s http://127.0.0.1:8000/v1/chat/completions"
MESSAGES = "curl -s http://127.0.0.1:8000/v1/messages"

RUN = {
    "make serve",
    'make serve ARGS="--tp 2 --dcp 2 --draft dspark"',
    'make test ARGS="tests/conformance -x"',
    LIBRARIAN,
    MESSAGES,
    "headway check tests/conformance",
    "headway replay",
    "headway --help",
}
NOT_RUN = {
    "make test": "this test is a part of it",
    "make docs": "`make lint` builds the site in the same way",
    'make serve ARGS="PATH_OR_HUB_ID"': "needs a model from outside",
    'make serve ARGS="--port 8001"': "the port may be taken; tests/server starts servers on free ports",
    'make serve ARGS="--dcp 2"': "tests/server/test_serve_ranks.py serves on two ranks",
    "python3 -m venv .venv": "makes an environment; packages come from outside",
    ". .venv/bin/activate": "the environment at hand is used",
    "pip install -c constraints.txt '.[serve,report]' ./packages/builtin-model": "packages come from outside",
    "pip install .": "packages come from outside",
    "headway serve": "`make serve` runs it",
    "headway serve --record FILE": "a form, not a command; tests/server/test_recorder.py records",
    "headway inspect MODEL": "needs a model from outside",
    "headway inspect": "a form, not a command; tests/runtime/test_loading.py inspects",
    "headway bench": "measures for minutes; tests/engine and `make bench` use it",
    "headway incident": "runs ranks for minutes; tests/incident runs it",
    "headway lint": "a form, not a command; tests/replay/ask/test_prompt_faults.py lints",
    "headway sweep": "a form, not a command; tests/replay/test_sweep.py sweeps",
    "headway advise": "a form, not a command; tests/replay/test_advice.py advises",
    "headway explain": "a form, not a command; tests/replay/test_explain.py explains",
    "headway explain TRACE --request N": "needs a trace from outside",
    "headway replay TRACE --model kimi-k3 --tp 8 --dcp 8 --memory 20GB": "needs a trace from outside",
    "headway replay conversation_trace.jsonl --limit 4000 --model kimi-k3 --tp 8 --memory 20GB --html report.html": (
        "needs a trace from outside"
    ),
    "headway advise conversation_trace.jsonl --limit 4000 --model kimi-k3 --tp 8 --memory 20GB": (
        "needs a trace from outside"
    ),
}


def fences(language: str) -> list[str]:
    return [match["text"] for match in FENCE.finditer(README) if match["language"] == language]


def commands() -> Iterator[str]:
    """Yield the README's commands: after a prompt, in a fence of bash, or in a line of text."""
    for text in fences("console"):
        yield from (line[2:] for line in text.splitlines() if line.startswith("$ "))
    for text in fences("bash"):
        whole = text.startswith("curl")
        yield from [text.partition(" -H")[0]] if whole else text.splitlines()
    yield from SPAN.findall(FENCE.sub("", README))


def test_every_command_is_run_or_has_a_reason() -> None:
    assert set(commands()) == RUN | set(NOT_RUN)


def shown(command: str) -> list[str]:
    """Return the lines that the README shows behind a command."""
    for text in fences("console"):
        first, _, rest = text.partition("\n")
        if first == f"$ {command}":
            return rest.splitlines()
    raise AssertionError(f"the README shows no output of {command}")


def masked(line: str) -> str:
    """Take out of a line what belongs to the machine (times, sizes of its memory, the width of the terminal) or grows
    with every change (the number of tests)."""
    if re.search(r"memory: |room for ", line):
        line = re.sub(r"\d[\d,.]*( [KMGT]iB)?", "N", line)
    line = re.sub(r"\d+(\.\d+)? ?s\b( \([\d:]+\))?", "N s", line)
    line = re.sub(r"\d+ passed", "N passed", line)
    return re.sub(r"=+", "=", line).rstrip()


def missing(expected: list[str], printed: str) -> list[str]:
    """Return the lines that are shown and not printed, in this order. `...` stands for any lines."""
    lines = iter(map(masked, printed.splitlines()))
    return [line for line in map(masked, expected) if line != "..." and line not in lines]


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, check=False, cwd=ROOT, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextmanager
def served(*options: str) -> Iterator[tuple[str, str]]:
    """Serve the built-in model on a free port: the address, and what was printed until it listened."""
    command = [sys.executable, "-m", "headway", "serve", "--port", "0", *options]
    environment = {**os.environ, "COLUMNS": "120"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    try:
        printed = ""
        assert process.stderr is not None
        for line in process.stderr:
            printed += line
            if "Application startup complete" in line:
                break
        found = re.search(r"http://127\.0\.0\.1:\d+", printed)
        assert found, printed
        yield found[0], printed
    finally:
        process.terminate()
        process.communicate(timeout=60)


def ask(address: str, command: str) -> dict[str, Any]:
    """Send a request of the README as curl would."""
    words = shlex.split(command)
    path = words[2].removeprefix("http://127.0.0.1:8000")
    name, _, value = words[words.index("-H") + 1].partition(": ")
    body = words[words.index("-d") + 1]
    answer: dict[str, Any] = httpx.post(address + path, content=body, headers={name: value}, timeout=120).json()
    return answer


def ask_twice(address: str) -> list[dict[str, Any]]:
    """Send the README's first request twice."""
    first, *_ = (text for text in fences("bash") if text.startswith(LIBRARIAN))
    return [ask(address, first) for _ in range(2)]


def claims() -> list[dict[str, Any]]:
    """Return the parts of answers that the README shows: of the first, of the second, of the second with drafts."""
    return [
        json.loads("{" + text + "}") for text in fences("json") if '"usage"' in text and '"stop_reason"' not in text
    ]


def differences(claim: Any, answer: Any, path: str = "") -> Iterator[str]:
    """Say where an answer differs from what is shown of it."""
    if isinstance(claim, dict) and isinstance(answer, dict):
        for key, value in claim.items():
            yield from differences(value, answer.get(key), f"{path}/{key}")
    elif isinstance(claim, list) and isinstance(answer, list) and len(claim) == len(answer):
        for number, (value, given) in enumerate(zip(claim, answer, strict=True)):
            yield from differences(value, given, f"{path}/{number}")
    elif claim != answer:
        yield f"{path}: {answer!r}, not {claim!r}"


def part(answer: dict[str, Any]) -> dict[str, Any]:
    return {**answer, "message": answer["choices"][0]["message"]}


def test_serve_prints_and_answers_what_is_shown() -> None:
    first, second, _ = claims()
    with served() as (address, printed):
        answers = [part(answer) for answer in ask_twice(address)]
        _, *others = (text for text in fences("bash") if text.startswith(LIBRARIAN))
        made = [ask(address, text)["choices"][0] for text in others]
        (marked,) = (text for text in fences("bash") if text.startswith(MESSAGES))
        made.append([ask(address, marked) for _ in range(2)][1])
    parts = [json.loads("{" + text + "}") for text in fences("json") if re.search('"(finish|stop)_reason"', text)]
    assert [list(differences(part, answer)) for part, answer in zip(parts, made, strict=True)] == [[], [], []]
    ours = [line for line in shown("make serve") if not line.startswith("headway: ")]
    assert missing(ours, printed) == []
    assert [*differences(first, answers[0]), *differences(second, answers[1])] == []
    assert answers[0]["message"] == answers[1]["message"]


def test_ranks_with_drafts_give_the_same_answers() -> None:
    first, _, drafted = claims()
    with served("--tp", "2", "--dcp", "2", "--draft", "dspark") as (address, _):
        answers = [part(answer) for answer in ask_twice(address)]
    drafts = answers[1]["usage"].pop("completion_tokens_details")
    shown_drafts = drafted["usage"].pop("completion_tokens_details")
    assert drafts.keys() == shown_drafts.keys()
    assert drafts["accepted_prediction_tokens"] > 0  # how many depends on what drafts cost on this machine
    assert list(differences({"message": first["message"]}, answers[0])) == []
    assert list(differences(drafted, answers[1])) == []
    assert answers[0]["message"] == answers[1]["message"]


def test_a_part_of_the_tests_passes_as_shown() -> None:
    printed = run("pytest", "-p", "no:cacheprovider", "-m", "not slow", "tests/conformance", "-x")
    assert missing(shown('make test ARGS="tests/conformance -x"'), printed) == []


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("headway check tests/conformance", "scenarios, all right"),
        ("headway replay", "tokens reused"),
        ("headway --help", "replay"),
    ],
)
def test_commands_without_a_model(command: str, words: str) -> None:
    assert words in run(*command.split())
