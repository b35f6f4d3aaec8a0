"""What a server in the open must bear: `python benchmarks/hostile.py --requests 20000 --streams 700 --half-open 400`.

A server of its own, with short limits, is sent requests that schemathesis makes from its `/openapi.json`, and hand-made
ones: broken HTTP, broken JSON, good requests with one field gone wrong. Then many streams at once, clients that send or
take only a part, SIGTERM while streams run, and a killed rank. Somebody else asks all the time: the longest that they
waited is shown. Memory and descriptors of the server are read after each stage.

The exit status is 1 if there was a 5xx that is not meant, a traceback, a hang, or something that grew. The table says
what was run; --requests and the others scale it.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

PATIENCE = 120.0
"""Seconds after which something hangs."""
CLIENT_TIMEOUT = 3.0
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance,negative_data_rejection,unsupported_method"
)
CANARY = "canary"
"""The id of requests that are not counted."""
GROWTH = 64
"""MiB that a server may grow after its first stage."""
_IN_THE_MIDDLE = 8
"""Streams that have got the beginning of their answer before a server or a rank is ended."""


class Served:
    """A server that was started, what it logs, and what it holds."""

    def __init__(self, *options: str, folder: str | None = None) -> None:
        command = [
            sys.executable,
            "-m",
            "headway",
            "serve",
            "--port",
            "0",
            "--memory",
            "64MiB",
            "--max-model-len",
            "64",
        ]
        command += ["--max-waiting", "4096", "--log-format", "json", "--client-timeout", str(CLIENT_TIMEOUT), *options]
        environment = os.environ | ({} if folder is None else {"TMPDIR": folder})
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.statuses: Counter[str] = Counter()
        self.troubles: list[str] = []
        self.url = ""
        self._up = threading.Event()
        atexit.register(self.process.kill)
        threading.Thread(target=self._read, daemon=True).start()
        assert self._up.wait(600), "the server does not start"
        assert self.url, self.troubles

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            try:
                said = json.loads(line)
            except ValueError:
                self.troubles.append(line.strip())
                continue
            message = said["message"]
            if said["logger"] == "uvicorn.access" and said["request_id"] != CANARY:
                self.statuses[message.rsplit(" ", 1)[-1]] += 1
            elif not self.url and "serving " in message:
                self.url = message.rsplit(" ", 1)[-1]
            elif "startup complete" in message:
                self._up.set()
            if "exc_info" in said:
                self.troubles.append(said["exc_info"].strip().splitlines()[-1])
        self._up.set()

    @property
    def port(self) -> int:
        return httpx.URL(self.url).port or 0

    def held(self) -> tuple[int, int]:
        """MiB of memory and descriptors of the server."""
        place = Path(f"/proc/{self.process.pid}")
        pages = int((place / "statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE") >> 20, len(list((place / "fd").iterdir()))

    def level(self, descriptors: int) -> bool:
        """Whether no more descriptors than so many are open, or are soon."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if self.held()[1] <= descriptors:
                return True
            time.sleep(0.2)
        return False

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)


class Canary:
    """Somebody who asks for the server's health and a short answer, over and over, and remembers the longest wait."""

    def __init__(self, served: Served) -> None:
        self.longest, self.asked, self.failed = 0.0, 0, Counter[int]()
        self._served, self._stop = served, threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)

    def _ask(self) -> None:
        named = {"X-Request-Id": CANARY}
        with httpx.Client(base_url=self._served.url, timeout=PATIENCE, headers=named) as client:
            while not self._stop.wait(0.2):
                started = time.monotonic()
                for response in (
                    client.get("/health"),
                    client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 1, "user": "canary"}),
                ):
                    self.failed[response.status_code] += response.status_code != 200
                self.longest = max(self.longest, time.monotonic() - started)
                self.asked += 1

    def __enter__(self) -> Canary:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(PATIENCE)


# -- requests that schemathesis makes ------------------------------------------------------------------------------


def schemathesis(served: Served, count: int, seed: int, say: Callable[[str], None]) -> list[str]:
    """Runs of schemathesis until so many requests were sent; what its checks found."""
    start = sum(served.statuses.values())

    def sent() -> int:
        return sum(served.statuses.values()) - start

    found: list[str] = []
    while sent() < count:
        command = [str(Path(sys.executable).parent / "schemathesis"), "run", f"{served.url}/openapi.json"]
        command += [
            "--checks",
            CHECKS,
            "--seed",
            str(seed),
            "-n",
            "500",
            "--no-shrink",
            "--warnings",
            "off",
            "--no-color",
        ]
        command += ["--phases", "fuzzing,coverage", "--generation-database", "none", "--continue-on-failure"]
        command += ["--request-timeout", str(PATIENCE), "--workers", "4"]
        with tempfile.TemporaryFile("w+") as told:
            running = subprocess.Popen(command, stdout=told, stderr=subprocess.STDOUT, cwd=tempfile.gettempdir())
            while running.poll() is None:
                say(f"schemathesis: {sent()} of {count}")
                time.sleep(0.5)
                if sent() >= count:
                    running.send_signal(signal.SIGINT)  # it tells what it has found
                    running.wait(PATIENCE)
            told.seek(0)
            text = told.read()
        if "= FAILURES =" in text or "= ERRORS =" in text or running.returncode not in (0, 1, 130, -signal.SIGINT):
            found.append(text)
        seed += 1
    return found


# -- requests that are made by hand --------------------------------------------------------------------------------

GOOD: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 2}),
    ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 2, "logprobs": 3, "stream": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "so"},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
            "max_output_tokens": 2,
        },
    ),
    (
        "/v1/messages",
        {
            "system": [{"type": "text", "text": "Be brief", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "so"}]},
            ],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "max_tokens": 2,
            "stream": True,
        },
    ),
    ("/tokenize", {"messages": [{"role": "user", "content": "Hello"}], "return_token_strs": True}),
    ("/detokenize", {"tokens": [1, 2, 300]}),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {
                    "role": "system",
                    "content": [{"type": "text", "text": "Be brief", "cache_control": {"type": "ephemeral"}}],
                },
                {"role": "user", "content": "Hi"},
            ],
            "max_completion_tokens": 2,
            "temperature": 0.5,
            "top_p": 0.9,
            "n": 2,
            "stop": ["x"],
            "logit_bias": {"7": -5},
            "headway": {"explain": True, "pin": 3},
        },
    ),
]
STRANGE: list[Any] = [
    None, True, -1, 0, 2**31, 2**63, 10**30, 1e308, -0.0, 0.5, "", "a" * 5000, "\u0000", "\U0001f600" * 50, "\u202e",
    "<|end|>", "{{7*7}}", [], [[]], [None], [-1], [10**9], {}, {"": ""}, {"type": "text"}, [{"role": "user"}],
    "Infinity",
]  # fmt: skip


def spoil(body: Any, rng: random.Random) -> Any:
    """`body` with one value, somewhere, replaced, removed or doubled."""
    if isinstance(body, dict) and body and rng.random() < 0.9:
        body, key = dict(body), rng.choice(list(body))
        what = rng.random()
        if what < 0.5:
            body[key] = spoil(body[key], rng)
        elif what < 0.7:
            del body[key]
        else:
            body[rng.choice([key, key + "_", "tools", "\ud7ff", "prompt", "messages", "seed"])] = rng.choice(STRANGE)
        return body
    if isinstance(body, list) and body and rng.random() < 0.8:
        at = rng.randrange(len(body))
        return [*body[:at], spoil(body[at], rng), *body[at + rng.randrange(2) :]]
    return rng.choice(STRANGE)


def raw_request(rng: random.Random) -> bytes:
    """A request as bytes: HTTP that is broken somewhere, or a body that is no JSON."""
    path, body = rng.choice(GOOD)
    content = bytearray(json.dumps(spoil(body, rng)).encode())
    for _ in range(rng.choice([0, 0, 1, 3])):
        content[rng.randrange(len(content))] = rng.randrange(256)
    content = content[: rng.choice([len(content), len(content), len(content) // 2])]
    length = rng.choice([len(content)] * 6 + [0, len(content) // 2, -1, "x", 10**12])
    head = [f"{rng.choice(['POST'] * 8 + ['GET', 'PUT', 'DELETE', 'FOO', 'post'])} {path} HTTP/1.1", "Host: x"]
    head += [f"Content-Length: {length}", "Connection: close"]
    extra = [
        "Transfer-Encoding: chunked",
        "Content-Type: text/plain",
        "Authorization: \xff",
        "X-Request-Id: " + "y" * 300,
    ]
    extra += ["Expect: 100-continue", "Upgrade: websocket", "Cookie: " + "z" * 70_000, "bad header", "A" * 9000 + ": b"]
    if rng.random() < 0.3:
        head.append(rng.choice(extra))
    return "\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + bytes(content)


def by_hand(served: Served, count: int, seed: int, say: Callable[[str], None]) -> list[str]:
    """Send broken bytes and spoilt requests by turns; what was answered and should not be."""
    found: list[str] = []
    done = 0

    def work(part: int) -> None:
        nonlocal done
        rng = random.Random(seed * 1000 + part)
        with httpx.Client(base_url=served.url, timeout=PATIENCE) as client:
            for turn in range(count // 4):
                try:
                    if turn % 3 == 0:
                        broken(served, raw_request(rng))
                    else:
                        path, body = rng.choice(GOOD)
                        response = client.post(path, json=spoil(body, rng))
                        if response.status_code >= 500:
                            found.append(f"{response.status_code} for {response.request.content[:300]!r}")
                except (OSError, httpx.HTTPError) as error:
                    found.append(f"{type(error).__name__}: {error}")
                done += 1

    threads = [threading.Thread(target=work, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        say(f"by hand: {done} of {count}")
        time.sleep(0.5)
    return found


def broken(served: Served, data: bytes) -> None:
    """Send bytes and read what comes until the server hangs up, which it must; a client that waits long says its end.

    Raises:
        TimeoutError: It does not.
    """
    with (
        socket.create_connection(("127.0.0.1", served.port), timeout=0.5) as connection,
        contextlib.suppress(ConnectionError),
    ):
        connection.sendall(data)
        with contextlib.suppress(TimeoutError):
            while connection.recv(65536):
                pass
        connection.settimeout(PATIENCE)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass


# -- many at once --------------------------------------------------------------------------------------------------


@dataclass
class Streams:
    """What became of streams: how many have got a piece of their answer, and how each of them ended."""

    begun: int = 0
    ended: Counter[str] = field(default_factory=Counter)

    @property
    def running(self) -> int:
        """Those that have begun and not ended, or less: some end before they begin."""
        return self.begun - self.ended.total()

    def found(self, *allowed: str) -> list[str]:
        """Ends that are not allowed."""
        return [f"{count} streams ended with {how}" for how, count in self.ended.items() if how not in allowed]


async def streams(url: str, count: int, tokens: int, seen: Streams) -> None:
    """So many streams at once."""

    async def one(client: httpx.AsyncClient, number: int) -> None:
        last, begun = "nothing", False
        body = {"prompt": f"Story {number}", "max_tokens": tokens, "stream": True, "ignore_eos": True}
        try:
            async with client.stream("POST", "/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    last = line if line else last
                    seen.begun += not begun and line.startswith("data: {")
                    begun = begun or bool(line)
                if response.status_code != 200:
                    last = f"status {response.status_code}"
        except httpx.HTTPError as error:
            last = type(error).__name__
        seen.ended["done" if last == "data: [DONE]" else "an error event" if '"error"' in last else last[:60]] += 1

    limits = httpx.Limits(max_connections=count)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=limits) as client:
        await asyncio.gather(*(one(client, number) for number in range(count)))


def half_open(served: Served, count: int) -> list[socket.socket]:
    """Connections whose clients say nothing, a part of a head or of a body, or take nothing of their answer."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: "
    echo = json.dumps({"prompt": "x " * 8, "max_tokens": 40, "n": 8, "stream": True, "ignore_eos": True}).encode()
    starts = [b"", head, head + b"100\r\n\r\n{", head + f"{len(echo)}\r\n\r\n".encode() + echo]
    opened = []
    for number in range(count):
        connection = socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE)
        connection.sendall(starts[number % len(starts)])
        opened.append(connection)
    return opened


@contextlib.contextmanager
def streaming(url: str, count: int, tokens: int) -> Iterator[Streams]:
    """Streams in a thread of their own: when this is entered some are in the middle, when it is left all have ended."""
    seen = Streams()
    thread = threading.Thread(target=lambda: asyncio.run(streams(url, count, tokens, seen)), daemon=True)
    thread.start()
    deadline = time.monotonic() + PATIENCE
    while seen.begun < _IN_THE_MIDDLE and thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        yield seen
    finally:
        thread.join(2 * PATIENCE)
    if thread.is_alive():
        seen.ended["hangs"] += 1


# -- the stages ----------------------------------------------------------------------------------------------------


class Report:
    """The final table, and what went wrong."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.table = Table("stage", "sent", "answered", "memory", "descriptors", "longest wait", "found")
        self.wrong: list[str] = []

    def add(
        self, stage: str, sent: str, answered: str, held: str, descriptors: str, wait: str, found: list[str]
    ) -> None:
        self.table.add_row(stage, sent, answered, held, descriptors, wait, str(len(found)))
        self.wrong += [f"{stage}: {text}" for text in found]
        self._console.log(stage, sent, answered, held, descriptors, wait, *found[:5], sep=" | ", markup=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000, help="hostile requests, half by schemathesis")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--half-open", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-ranks", action="store_true", help="leave out the stage that kills a rank")
    parser.add_argument("--only-ranks", action="store_true", help="leave out all other stages")
    options = parser.parse_args()
    console = Console()
    report = Report(console)
    print(f"seed {options.seed}", flush=True)
    said = [0.0]
    with console.status("starting a server") as status:

        def say(text: str) -> None:
            status.update(text)
            if not console.is_terminal and (":" not in text or time.monotonic() > said[0] + 30):
                said[0] = time.monotonic()
                print(f"{time.strftime('%X')} {text}", flush=True)

        if not options.only_ranks:
            run(options, report, say)
        if not options.no_ranks:
            killed_rank(report, say)
    console.print(report.table)
    for text in report.wrong[:20]:
        console.print(text, markup=False)
    sys.exit(bool(report.wrong))


def run(options: argparse.Namespace, report: Report, say: Callable[[str], None]) -> None:
    served = Served("--grace", "2")
    base: list[int] = []

    def stage(name: str, sent: int, work: Callable[[], list[str]]) -> None:
        say(name)
        before, troubles = Counter(served.statuses), len(served.troubles)
        with Canary(served) as canary:
            found = work()
        if not served.level(base[1] + 16 if base else 10**6):
            found.append(f"{served.held()[1]} descriptors are open")
        if not base:
            time.sleep(6.0)  # connections are kept for five seconds
        memory, descriptors = served.held()
        if base and memory > base[0] + GROWTH:
            found.append(f"memory grew from {base[0]} to {memory} MiB")
        base[:] = base or [memory, descriptors]
        found += served.troubles[troubles:]
        counted = served.statuses - before
        found += [f"{count} answers of {code}" for code, count in counted.items() if code[0] == "5" and code != "503"]
        found += [
            f"the canary got {count} times {code}" for code, count in canary.failed.items() if count and code != 429
        ]
        answered = ", ".join(f"{code}: {count}" for code, count in sorted(counted.items()))
        wait = f"{canary.longest:.1f} s of {canary.asked}"
        report.add(name, f"{sent:,}", answered, f"{memory} MiB", str(descriptors), wait, found)

    half = options.requests // 2
    warm = min(200, half)

    def many() -> list[str]:
        seen = Streams()
        asyncio.run(streams(served.url, options.streams, 24, seen))
        return seen.found("done")

    stage("warm-up", warm + options.streams, lambda: by_hand(served, warm, options.seed + 1, say) + many())
    stage("schemathesis", half, lambda: schemathesis(served, half, options.seed, say))
    stage("by hand", half, lambda: by_hand(served, half, options.seed, say))

    stage("streams at once", options.streams, many)

    def partly() -> list[str]:
        opened = half_open(served, options.half_open)
        time.sleep(2 * CLIENT_TIMEOUT)
        with contextlib.ExitStack() as stack:
            for connection in opened:
                stack.enter_context(connection)
            if not served.level(
                base[1] + 16 + len(opened) // 4
            ):  # those that take an answer have it in their own memory
                return [f"{served.held()[1]} descriptors are open"]
        return []

    stage("half open", options.half_open, partly)
    say("SIGTERM under load")
    with streaming(served.url, 256, 48) as seen:
        found = [] if seen.running > 0 else ["no stream was running when the signal came"]
        code = served.end(signal.SIGTERM)
    found += [f"exit status {code}"] if code else []
    found += seen.found("done", "an error event")
    report.add("SIGTERM under load", "256", repr(dict(seen.ended)), "", "", "", found + served.troubles)


def killed_rank(report: Report, say: Callable[[str], None]) -> None:
    """Kill a rank while streams run, ask again, and kill the driver: nothing of them may be left."""
    say("a killed rank under load")
    with tempfile.TemporaryDirectory() as folder:
        served = Served("--dcp", "2", "--max-model-len", "256", folder=folder)
        children = Path(f"/proc/{served.process.pid}/task/{served.process.pid}/children").read_text().split()
        with streaming(served.url, 96, 200) as seen:  # 64 run at once; the others are answered by the new ranks
            os.kill(int(children[-1]), signal.SIGKILL)
        found = seen.found("done", "an error event", "status 500")
        found += [] if seen.ended["an error event"] else ["the kill met no running stream"]
        started = time.monotonic()
        again = httpx.post(f"{served.url}/v1/completions", json={"prompt": "Hello", "max_tokens": 2}, timeout=PATIENCE)
        found += [] if again.status_code == 200 else [f"then a request got {again.status_code}"]
        wait = time.monotonic() - started
        ranks = Path(f"/proc/{served.process.pid}/task/{served.process.pid}/children").read_text().split()
        served.end(signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE
        while any(Path(f"/proc/{rank}").exists() for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.1)
        found += [f"rank {rank} is left" for rank in ranks if Path(f"/proc/{rank}").exists()]
        found += [f"the folder {left.name} is left" for left in Path(folder).glob("headway-*")]
        report.add("killed rank under load", "96", repr(dict(seen.ended)), "", "", f"{wait:.1f} s", found)


if __name__ == "__main__":
    main()
