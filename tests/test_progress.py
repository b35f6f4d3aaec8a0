"""Long work shows that it goes on, also where nobody watches a terminal."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

from headway import progress


class Lines(io.StringIO):
    """A stream that is no terminal and says when something was written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def write(self, text: str) -> int:
        count = super().write(text)
        if "\n" in text:
            self.written.set()
        return count


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_SECONDS", 0.02)


def test_a_line_now_and_then_says_how_far_it_is() -> None:
    stream = Lines()
    with progress.counting("replaying", 4000, "requests", Console(file=stream, width=60)) as tell:
        tell(1000)
        stream.written.clear()
        assert stream.written.wait(30)
    line = stream.getvalue().splitlines()[-1]
    assert line.startswith("replaying: 1,000 of 4,000 requests (25%), about ")
    assert line.endswith(" s so far ...")
    count = len(stream.getvalue().splitlines())
    assert not threading.Event().wait(0.1)
    assert len(stream.getvalue().splitlines()) == count, "nothing more is said"


def test_work_without_an_end_in_sight_says_what_it_is() -> None:
    stream = Lines()
    with progress.lasting("reading trace.jsonl", stream):
        assert stream.written.wait(30)
    assert stream.getvalue().startswith("reading trace.jsonl, 0 s so far ...")


def test_stages_are_told_with_what_is_known_of_them() -> None:
    said, came = [], threading.Event()

    def say(line: str) -> None:
        said.append(line)
        came.set()

    with progress.Pulse(say, detail=lambda: "; 5 GiB in memory") as pulse:
        pulse.begin("loading the model")
        assert came.wait(30)
    assert said[0] == "loading the model, 0 s so far; 5 GiB in memory ..."


def test_a_terminal_gets_a_bar_and_no_lines() -> None:
    stream = Lines()
    console = Console(file=stream, force_terminal=True, width=60)
    with progress.counting("replaying", 4, "requests", console) as tell:
        tell(2)
    assert "so far" not in stream.getvalue()
