"""A server of the built-in model under a known load, for what looks at servers: `check_prometheus`, `check_live_page`.

The load is that of a few applications. Each has a system prompt that all of its conversations share. Every conversation
begins with a text of its own and comes back a few times, after all others. Some requests stream, and some are refused.
"""

import contextlib
import json
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

__all__ = ["WatchedServer", "watched_server"]

_APPLICATIONS = [
    "You are a patient librarian. Answer in one or two sentences, and never invent the title of a book.",
    "You are the assistant of a small museum of ships. Say what you know about the exhibits, and be brief.",
    "You help people to repair old radios. Ask for the model first, then explain one step at a time.",
]
_QUESTIONS = [
    "Who are you?",
    "What is the oldest thing here?",
    "How do I begin?",
    "Tell me a story.",
    "Why is that so?",
]
_NOTE = "The catalogue lists it by shelf and year, with a note on its state, and on who has seen it last. "
_START_SECONDS = 300.0


class WatchedServer:
    """A running server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, accept: str = "*/*") -> str:
        """The body of what it answers."""
        request = urllib.request.Request(self.url + path, headers={"Accept": accept})
        with urllib.request.urlopen(request, timeout=60) as answer:
            text: str = answer.read().decode()
        return text

    def listens(self) -> bool:
        """Whether it can be reached."""
        try:
            return bool(self.get("/health"))
        except urllib.error.URLError:
            return False

    def post(self, path: str, **body: Any) -> dict[str, Any] | None:
        """The answer; None for a stream, which is read to its end, and for what is refused."""
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=300) as answer:
                text = answer.read()
        except urllib.error.HTTPError:
            return None
        return None if body.get("stream") else json.loads(text)

    def load(self, conversations: int, turns: int = 3) -> None:
        """Lead conversations, four at a time, and all of them turn by turn."""
        talks = [_beginning(number) for number in range(conversations)]
        with ThreadPoolExecutor(4) as pool:
            for turn in range(turns):
                list(pool.map(self.answer, talks))
                for number, messages in enumerate(talks):
                    messages.append({"role": "user", "content": _QUESTIONS[(number + turn) % len(_QUESTIONS)]})
        self.post("/v1/chat/completions", messages=talks[0], max_tokens=16, stream=True)
        self.post("/v1/completions", prompt="refused", max_tokens=0)

    def answer(self, messages: list[dict[str, Any]]) -> None:
        """Ask for the next message and append it."""
        answer = self.post("/v1/chat/completions", messages=messages, max_tokens=16, temperature=0)
        if answer is not None:
            messages.append(answer["choices"][0]["message"])


def _beginning(number: int) -> list[dict[str, Any]]:
    system = _APPLICATIONS[number % len(_APPLICATIONS)]
    text = f"Here is the record of object {number}. " + "".join(f"Note {i} on {number}. {_NOTE}" for i in range(8))
    return [{"role": "system", "content": system}, {"role": "user", "content": text + _QUESTIONS[number % 5]}]


@contextlib.contextmanager
def watched_server(*options: str) -> Iterator[WatchedServer]:
    """Serve the built-in model with a small memory on a free port."""
    command = [sys.executable, "-m", "headway", "serve", "--port", "0", "--memory", "4MiB", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    timer = threading.Timer(_START_SECONDS, process.kill)
    timer.start()
    try:
        assert process.stderr is not None
        said, url = [], ""
        for line in process.stderr:
            said.append(line)
            url = (re.findall(r"http://127\.0\.0\.1:\d+", line) or [url])[0]
            if "startup complete" in line:
                break
        else:
            raise SystemExit("the server did not start:\n" + "".join(said))
        drain = threading.Thread(target=lambda: list(process.stderr or ()), daemon=True)
        drain.start()  # so that its log never fills the pipe
        server = WatchedServer(url)
        while not server.listens() and process.poll() is None:  # a moment after it has said so
            time.sleep(0.05)
        timer.cancel()
        yield server
    finally:
        timer.cancel()
        process.terminate()
        process.wait(60)
