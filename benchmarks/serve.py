"""`headway serve` beside `transformers serve`, on one machine in turns: `python benchmarks/serve.py`.

Both servers serve the same folder on the CPU and answer the same chat completions, streamed and greedy. Both run all
the time, and each round of a workload is sent to one and then to the other, so that they see the same state of the
machine. An idle server uses no processor. Every round has new texts. Of each cell medians over its rounds are told:

* tokens of answers per second, by each server's own count of tokens,
* the time to the first piece of text, at the 50th and the 95th percentile of the requests of a round,
* processor time of the server and its children per token of an answer.

There are two workloads. `shared`: 90% of a prompt are a text with which all of a round begin. `distinct`: prompts share
nothing but what the template puts in front. `--share` serves with Headway alone and tells which part of the processor
time was spent outside the forwards of the model. A hook below `headway serve` then adds up the thread's time in them.

Rounds that were done are kept in --out and not run again. `--show` prints the table of what is there. `transformers
serve` needs `pip install accelerate`. Linux only: processor times are read from /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NoReturn

import httpx

ROOT = Path(__file__).resolve().parent.parent
WORDS = (ROOT / "README.md").read_text(encoding="utf-8").split()
CONCURRENCY, REQUESTS, ANSWER = (1, 8, 32), 32, 32
SHARED = 0.9
SIZE = 512
"""Tokens of a prompt, about."""


@dataclass(frozen=True)
class Round:
    """What one server did with one workload.

    Attributes:
        model: The model's name here.
        server: "headway" or "transformers".
        workload: "shared" or "distinct".
        concurrency: Requests in flight.
        number: Of the round.
        seconds: From the first request to the last answer.
        tokens: Of all answers.
        prompt_tokens: Of all prompts.
        processor: Seconds of processor time of the server.
        first: Seconds to the first text of each request.
        model_share: Share of the processor time inside the model's forwards; None where it was not measured.
    """

    model: str
    server: str
    workload: str
    concurrency: int
    number: int
    seconds: float
    tokens: int
    prompt_tokens: int
    processor: float
    first: list[float]
    model_share: float | None = None

    @property
    def cell(self) -> tuple[str, str, int, str]:
        """What it is a round of."""
        return self.model, self.workload, self.concurrency, self.server


class Server:
    """A server that runs."""

    def __init__(self, name: str, command: list[str], folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.name, self.log = name, folder / f"{name}.log"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port)], stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=folder
            )
        self.url = f"http://127.0.0.1:{self.port}"
        self._wait()

    def _wait(self) -> None:
        end = time.monotonic() + 600
        while time.monotonic() < end and self.process.poll() is None:
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.2)
        self.stop()
        raise RuntimeError(f"{self.name} does not serve: {self.log.read_text()[-2000:]}")

    def stop(self) -> None:
        """End it."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def processor(self) -> float:
        """Seconds of processor time so far, of the server and of the processes below it."""
        parents: dict[int, int] = {}
        used: dict[int, int] = {}
        for place in Path("/proc").glob("[0-9]*"):
            try:
                fields = (place / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(place.name)], used[int(place.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
        below = {self.process.pid}
        while more := {pid for pid, parent in parents.items() if parent in below and pid not in below}:
            below |= more
        return sum(used.get(pid, 0) for pid in below) / os.sysconf("SC_CLK_TCK")

    def in_model(self) -> float:
        """Seconds of processor time inside the model's forwards so far, of a server that `--share` started."""
        place = self.log.parent / "in_model"
        place.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR1)
        while not place.exists() or not place.read_text():
            time.sleep(0.01)
        return float(place.read_text())


def texts(workload: str, concurrency: int, number: int, per_token: float) -> list[str]:
    """The prompts of a round: 32, or 8 where one is in flight, which takes long.

    `per_token`: tokens per word.
    """
    rng = random.Random(f"{workload} {concurrency} {number}")
    words = int(SIZE / per_token)
    same = rng.choices(WORDS, k=int(words * SHARED)) if workload == "shared" else []
    count = REQUESTS if concurrency > 1 else REQUESTS // 4
    return [" ".join([*same, *rng.choices(WORDS, k=words - len(same))]) for _ in range(count)]


async def _ask(client: httpx.AsyncClient, text: str, model: str) -> tuple[float, int, int]:
    """Seconds to the first text, tokens of the answer, tokens of the prompt."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": ANSWER,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began, first = time.monotonic(), 0.0
    usage: dict[str, int] = {}
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {(await answer.aread()).decode()[:500]}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            piece = json.loads(line[6:])
            said = "".join(choice["delta"].get("content") or "" for choice in piece.get("choices", ()))
            if not first and said and text not in said:  # transformers may send the prompt before the answer
                first = time.monotonic() - began
            usage = piece.get("usage") or usage
    return first or time.monotonic() - began, usage["completion_tokens"], usage["prompt_tokens"]


async def _send(server: Server, prompts: list[str], concurrency: int, model: str) -> list[tuple[float, int, int]]:
    turn = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=1800, limits=limits) as client:

        async def one(text: str) -> tuple[float, int, int]:
            async with turn:
                return await _ask(client, text, model)

        return await asyncio.gather(*map(one, prompts))


def run(server: Server, name: str, model: str, workload: str, concurrency: int, number: int, per_token: float) -> Round:
    """Send a round of a workload to a server."""
    prompts = texts(workload, concurrency, number, per_token)
    hooked = server.name == "hooked"
    inside, used, began = server.in_model() if hooked else 0.0, server.processor(), time.monotonic()
    answers = asyncio.run(_send(server, prompts, concurrency, model))
    seconds, used = time.monotonic() - began, server.processor() - used
    return Round(
        name,
        server.name,
        workload,
        concurrency,
        number,
        seconds,
        sum(tokens for _, tokens, _ in answers),
        sum(tokens for _, _, tokens in answers),
        used,
        [first for first, _, _ in answers],
        (server.in_model() - inside) / used if hooked else None,
    )


@contextmanager
def served(folder: Path, hooked: bool) -> Iterator[list[Server]]:
    """The servers of a model, running."""
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        headway = [sys.executable, "-m", "headway", "serve", str(folder)]
        theirs = Path(sys.executable).parent / "transformers"
        commands = {
            "headway": headway,
            "transformers": [str(theirs), "serve", str(folder), "--device", "cpu", "--dtype", "float32"],
        }
        if hooked:
            commands = {"hooked": [sys.executable, __file__, "--hooked", str(logs / "in_model"), *headway[3:]]}
        servers = []
        for name, command in commands.items():
            servers.append(Server(name, command, logs))
            stack.callback(servers[-1].stop)
        yield servers


def hooked(place: Path, arguments: list[str]) -> NoReturn:
    """`headway` with a hook that adds up the processor time of the model's forwards; SIGUSR1 writes it to `place`."""
    from headway.cli import main
    from headway.runtime.forward.runner import ModelRunner

    inside, began, make = [0.0], [0.0], ModelRunner.__init__
    hooked_models: list[Any] = []

    def start(*_: Any) -> None:
        began[0] = time.thread_time()

    def stop(*_: Any) -> None:
        inside[0] += time.thread_time() - began[0]

    def made(self: ModelRunner, *given: Any, **more: Any) -> None:
        make(self, *given, **more)
        if self.model not in hooked_models:  # a runner is made for the check at the start, too
            hooked_models.append(self.model)
            self.model.register_forward_pre_hook(start)
            self.model.register_forward_hook(stop)

    def tell(*_: Any) -> None:
        place.write_text(str(inside[0]))

    ModelRunner.__init__ = made  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR1, tell)
    main(arguments)


def table(rounds: list[Round]) -> str:
    """All cells: ours, and ours against theirs."""
    cells: dict[tuple[str, str, int, str], list[Round]] = defaultdict(list)
    for one in rounds:
        cells[one.cell].append(one)
    lines = [
        "| model | prompts | in flight | server | tokens/s | TTFT p50 | TTFT p95 | processor ms per token | rounds |",
        "| --- | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for (model, workload, concurrency, server), of in sorted(cells.items()):
        first = [quantiles(one.first, n=20, method="inclusive") for one in of]
        lines.append(
            f"| {model} | {workload} | {concurrency} | {server} | {median(o.tokens / o.seconds for o in of):.1f} "
            f"| {median(q[9] for q in first):.2f} s | {median(q[18] for q in first):.2f} s "
            f"| {1000 * median(o.processor / o.tokens for o in of):.2f} | {len(of)} |"
        )
        shares = [1 - one.model_share for one in of if one.model_share is not None]
        if shares:
            lines.append(f"| | | | of this outside the model | | | | {median(shares):.1%} | |")
    return "\n".join(lines)


def main() -> int:
    if sys.argv[1:2] == ["--hooked"]:
        hooked(Path(sys.argv[2]), sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="folders of models (the built-in one)")
    parser.add_argument("--workloads", nargs="*", default=["shared", "distinct"], choices=["shared", "distinct"])
    parser.add_argument("--concurrency", nargs="*", type=int, default=CONCURRENCY)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each cell (3)")
    parser.add_argument("--share", action="store_true", help="Headway alone: what is spent outside the model")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "serve.jsonl", help="rounds that were done")
    parser.add_argument("--show", action="store_true", help="run nothing")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    rounds = [Round(**json.loads(line)) for line in lines]
    for folder in [] if options.show else options.folders or [builtin()]:
        with served(folder.resolve(), options.share) as servers:
            for one in _rounds(folder.resolve(), servers, options, {(*r.cell, r.number) for r in rounds}):
                rounds.append(one)
                with options.out.open("a") as file:
                    print(json.dumps(asdict(one)), file=file)
                print(one.cell, one.number, f"{one.tokens / one.seconds:.1f} tokens/s", file=sys.stderr, flush=True)
    print(table(rounds))
    return 0


def _rounds(folder: Path, servers: list[Server], options: argparse.Namespace, done: set[Any]) -> Iterator[Round]:
    """The rounds that are missing. The first one of each server, which warms it, is not told."""
    model = {server.name: httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"] for server in servers}
    model["transformers"] = str(folder)
    per_token = 3.0
    warm = [run(server, folder.name, model[server.name], "distinct", 1, -1, per_token) for server in servers]
    per_token = warm[0].prompt_tokens / sum(len(text.split()) for text in texts("distinct", 1, -1, per_token))
    for number in range(options.rounds):
        for workload in options.workloads:
            for concurrency in options.concurrency:
                for server in servers if number % 2 else servers[::-1]:
                    if (folder.name, workload, concurrency, server.name, number) not in done:
                        yield run(server, folder.name, model[server.name], workload, concurrency, number, per_token)


def builtin() -> Path:
    """The folder of the built-in model."""
    spec = importlib.util.find_spec("headway_builtin_model")
    if spec is None or spec.origin is None:
        raise SystemExit("the built-in model is not installed: pip install packages/builtin-model")
    return Path(spec.origin).parent


if __name__ == "__main__":
    sys.exit(main())
