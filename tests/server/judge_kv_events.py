"""Judge KV events by a router's index that is not ours: Dynamo's, beside a server that answers requests.

    python -m tests.server.judge_kv_events --indexer PYTHON [--requests N] [--seed N]

PYTHON is one that has the package `ai-dynamo-runtime`, whose `dynamo.indexer` counts blocks on a CPU. `make
judge-kv-events` sets that up. It listens to the built-in model's server several times over: from the start, late, and
over a line that loses messages; and it is asked what it expects to be reused of many prompts, while requests run, when
they have ended, and after the server has started again. Each answer is compared with the cache's own lookup:

- *below*: it expects fewer whole blocks than the cache reuses. That must not be, but for the moments in which an event
  is on its way while requests run.
- *above*: it expects more. That is counted, and explained: the last token of a prompt is always computed, or the prompt
  leaves a known path between two checkpoints, as the field `checkpoints` says, by which a reader of ours finds the very
  position that the cache resumes at. What neither explains, by the cache's own tree, fails.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import zmq
from tests.server.fakes import listening
from tests.server.kv_reader import Reader, reading

from headway.cache import Prompt
from headway.engine import Engine, EngineConfig, RequestResult
from headway.engine.build import engine_of
from headway.runtime.loading import LoadedModel, load_model
from headway.server import ServerOptions
from headway.server.kv_events import KvEventsConfig
from headway.server.kv_publisher import KvEventPublisher, KvEventSockets

BLOCK = 16
CONFIG = EngineConfig(memory=4 << 20, max_running=8, max_batched_tokens=256)
READERS = {"1": "from the start", "2": "late", "3": "loses every third message"}


@dataclass
class Said:
    """Prompts and answers so far."""

    rng: random.Random
    known: list[tuple[str, list[int]]] = field(default_factory=list)

    def request_finished(self, result: RequestResult) -> None:
        if result.explanation is not None:
            self.known.append((result.request.salt, [*result.request.tokens.tolist(), *result.tokens]))

    def step_done(self, seconds: float, tokens: int) -> None: ...

    def forgotten(self, salt: str | None) -> None: ...

    def prompt(self, vocabulary: int, fresh: int) -> tuple[str, list[int]]:
        """A prompt that goes on from a known one, leaves one somewhere, or is new."""
        rng = self.rng
        salt, base = rng.choice(self.known[-60:]) if self.known and rng.random() < 0.9 else (rng.choice(["", "me"]), [])
        cut = len(base) if rng.random() < 0.5 else rng.randrange(len(base) + 1)
        if rng.random() < 0.1:
            salt = rng.choice(["", "me", "you"])
        return salt, [*base[:cut], *(rng.randrange(10, vocabulary) for _ in range(rng.randrange(1, fresh)))][:900]


@dataclass
class Judged:
    """What was found in one situation: how many prompts of each kind, and tokens."""

    name: str
    reader: str
    count: Counter[str] = field(default_factory=Counter)
    expected: int = 0
    excess: int = 0

    def line(self) -> str:
        c = self.count
        told = [
            self.name,
            self.reader,
            c["probes"],
            c["equal"] or "-",
            c["last token"],
            c["between"],
            c["below"],
            c["unexplained"],
        ]
        share = f"{100 * self.excess / self.expected:.0f}%" if self.expected else "-"
        return "| " + " | ".join(map(str, [*told, share])) + " |"


@dataclass
class Judge:
    """The index, the server that runs now, and a reader of ours."""

    http: httpx.Client
    index: httpx.Client
    engine: Engine
    reader: Reader
    said: Said
    vocabulary: int

    def load(self, requests: int) -> None:
        """Requests, four at a time."""
        prompts = [self.said.prompt(self.vocabulary, 60) for _ in range(requests)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(self._ask, prompts))

    def _ask(self, asked: tuple[str, list[int]]) -> None:
        salt, tokens = asked
        body = {"prompt": tokens, "max_tokens": 1 + len(tokens) % 24, "ignore_eos": True, "seed": 1}
        self.http.post("/v1/completions", json=body | ({"cache_salt": salt} if salt else {})).raise_for_status()

    def lookup(self, salt: str, tokens: Sequence[int]) -> int:
        cache = self.engine.cache
        text = np.array(tokens, np.int32)
        return self.engine._call(lambda: cache.lookup(Prompt(text, cache.namespace(salt=salt))).tokens, 60)

    def usable(self, salt: str, tokens: Sequence[int]) -> int:
        """Whole blocks that a prompt shares with the tokens before any checkpoint there is now."""
        cache, text = self.engine.cache, np.array(tokens, np.int32)

        def find() -> int:
            namespace, most = cache.namespace(salt=salt), 0
            for edge in cache._index.tree.edges():
                if edge.checkpoints and edge.root().namespace == namespace:
                    kept = edge.prefix(edge.checkpoints[-1].position, 0)
                    length = min(len(kept), len(text))
                    most = max(most, int(np.argmin(np.append(kept[:length] == text[:length], False))))
            return most

        return self.engine._call(find, 60) // BLOCK * BLOCK

    def expected(self, salt: str, tokens: Sequence[int]) -> dict[str, int]:
        """What the index expects, by listener."""
        body = {"token_ids": tokens, "model_name": "m"} | ({"cache_salt": salt} if salt else {})
        answer = self.index.post("/query", json=body).raise_for_status().json()["instances"]
        return {name: answer.get(name, {}).get("longest_matched", 0) for name in READERS}

    def probes(self, count: int) -> list[tuple[str, list[int]]]:
        """Known texts, parts of them and continuations, under their salt and another."""
        rng, found = self.said.rng, []
        for _ in range(count):
            salt, text = rng.choice(self.said.known)
            cut = rng.choice([len(text), rng.randrange(1, len(text) + 1)])
            more = [rng.randrange(10, self.vocabulary) for _ in range(rng.choice([0, 1, 20]))]
            found.append((rng.choice([salt, salt, salt, "nobody"]), [*text[:cut], *more]))
        return found

    def compare(self, name: str, readers: Sequence[str], probes: int = 150) -> list[Judged]:
        """When requests have ended and everything was told: what the index expects, and what the cache reuses."""
        ours = self.reader.catch_up()
        asked = self.probes(probes)
        answers = self._settled(asked)
        found = [Judged(name, READERS[reader]) for reader in readers]
        for (salt, tokens), answer in zip(asked, answers, strict=True):
            hit, behind = self.lookup(salt, tokens), self.lookup(salt, [*tokens, 9])
            told = self.usable(salt, tokens) if ours.resume(tokens, salt) == hit else -1
            for judged, reader in zip(found, readers, strict=True):
                _count(judged, answer[reader], hit, told, behind)
        return found

    def wait_for(self, readers: str) -> None:
        """Until listeners have found the server: a request becomes known to them."""
        asked = "", [self.said.rng.randrange(10, self.vocabulary) for _ in range(3 * BLOCK)]
        self._ask(asked)
        deadline = time.monotonic() + 60
        while not all(self.expected(*asked)[reader] for reader in readers):
            if time.monotonic() > deadline:
                raise SystemExit(f"listeners do not find the server: {self.expected(*asked)}")
            self.reader.catch_up()

    def _settled(self, asked: list[tuple[str, list[int]]]) -> list[dict[str, int]]:
        """The index's answers, when they change no more."""
        before: list[dict[str, int]] = []
        for _ in range(40):
            answers = [self.expected(*one) for one in asked]
            if answers == before:
                return answers
            before = answers
            self.reader.catch_up()
        raise SystemExit("the index does not come to rest")

    def compare_under_load(self, requests: int) -> Judged:
        """While requests run: an answer counts as below if it is below what is reused before and after it was given."""
        judged = Judged("while requests run", READERS["1"])
        running = threading.Thread(target=self.load, args=(requests,))
        running.start()
        while running.is_alive():
            for salt, tokens in self.probes(5):
                first = self.lookup(salt, tokens)
                expected = self.expected(salt, tokens)["1"]
                least = min(first, self.lookup(salt, tokens)) // BLOCK * BLOCK
                judged.count.update(["probes", *["below"] * (expected < least)])
        running.join()
        return judged


def _count(judged: Judged, expected: int, hit: int, told: int, behind: int) -> None:
    """Count an answer: `told` is what should be told to be usable; -1 if our own reader did not find the hit."""
    whole = hit // BLOCK * BLOCK
    judged.expected += expected
    judged.excess += max(0, expected - whole)
    judged.count["probes"] += 1
    if expected == whole:
        judged.count["equal"] += 1
    elif expected < whole:
        judged.count["below"] += 1
    elif expected == behind // BLOCK * BLOCK:
        judged.count["last token"] += 1
    else:
        judged.count["between" if expected == told else "unexplained"] += 1


@contextmanager
def serving(loaded: LoadedModel, ports: Sequence[int], index: httpx.Client, said: Said) -> Iterator[Judge]:
    """A server of the built-in model that publishes at these ports."""
    live, replay = (f"tcp://127.0.0.1:{port}" for port in ports)
    sockets = KvEventSockets(
        KvEventsConfig(
            enable_kv_cache_events=True,
            endpoint=f"tcp://*:{ports[0]}",
            replay_endpoint=replay,
            heartbeat_seconds=0.1,
            buffer_steps=50,
        )
    )
    built = engine_of(loaded, CONFIG)
    publisher = KvEventPublisher(built.engine.cache, sockets, BLOCK)
    options = ServerOptions("m", kv_events=publisher)
    with ExitStack() as ends:
        url, _ = ends.enter_context(listening(built.engine.start(), built.tokenizer, options))
        built.engine.observer = said
        http = ends.enter_context(httpx.Client(base_url=url, timeout=300))
        reader = ends.enter_context(reading(BLOCK, live, replay))
        reader.receive()
        yield Judge(http, index, built.engine, reader, said, min(4000, built.layout.vocab_size))
        print(f"  {publisher.counts}, {built.engine.cache.counters.evicted}", file=sys.stderr)


@contextmanager
def lossy_line(source: int, target: int) -> Iterator[None]:
    """What is published at a port, at another one, without every third message."""
    context = zmq.Context()
    inward, outward = context.socket(zmq.XSUB), context.socket(zmq.XPUB)
    inward.connect(f"tcp://127.0.0.1:{source}")
    outward.bind(f"tcp://127.0.0.1:{target}")
    ended = threading.Event()

    def forward() -> None:
        number = 0
        while not ended.is_set():
            ready, _, _ = zmq.select([inward, outward], [], [], 0.1)
            if outward in ready:
                inward.send_multipart(outward.recv_multipart())
            if inward in ready:
                frames, number = inward.recv_multipart(), number + 1
                if number % 3:
                    outward.send_multipart(frames)

    thread = threading.Thread(target=forward)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        context.destroy(0)


@contextmanager
def indexing(python: str, port: int) -> Iterator[httpx.Client]:
    """Dynamo's index, without workers; its warnings go to standard error, counted."""
    log = Path("build/kv-events-index.log")
    log.parent.mkdir(exist_ok=True)
    with log.open("w") as out, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        command = [python, "-m", "dynamo.indexer", "--port", str(port), "--block-size", str(BLOCK), "--threads", "1"]
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            for _ in range(300):
                try:
                    client.get("/health").raise_for_status()
                    break
                except httpx.HTTPError:
                    assert process.poll() is None, log.read_text()
                    time.sleep(0.1)
            yield client
        finally:
            process.terminate()
            process.wait(30)
    said = Counter(
        word
        for word in ("Gap detected", "Replay incomplete", "Failed to decode", "duplicate")
        for line in log.read_text().splitlines()
        if word in line
    )
    print(f"  the index said: {dict(said)} ({log})", file=sys.stderr)


def register(index: httpx.Client, name: str, live: int, replay: int) -> None:
    body = {
        "instance_id": int(name),
        "endpoint": f"tcp://127.0.0.1:{live}",
        "replay_endpoint": f"tcp://127.0.0.1:{replay}",
        "model_name": "m",
        "block_size": BLOCK,
    }
    index.post("/register", json=body).raise_for_status()


def free_ports(count: int) -> list[int]:
    with ExitStack() as ends:
        taken = [ends.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in taken]


def judge(python: str, requests: int, seed: int) -> list[Judged]:
    loaded, said = load_model(None, "cpu", "fp32"), Said(random.Random(seed))
    live, replay, lossy, port = free_ports(4)
    found: list[Judged] = []
    with indexing(python, port) as index:
        with serving(loaded, (live, replay), index, said) as judge, lossy_line(live, lossy):
            register(index, "1", live, replay)
            register(index, "3", lossy, replay)
            judge.wait_for("13")
            judge.load(requests // 4)
            found += judge.compare("before anything is evicted", "13")
            found.append(judge.compare_under_load(requests // 2))
            found += judge.compare("after evictions", "13")
            register(index, "2", live, replay)
            judge.wait_for("2")
            found += judge.compare("late, after more than is kept", "2")
            judge.load(requests // 8)
            found += judge.compare("later", "123")
        with serving(loaded, (live, replay), index, said) as judge, lossy_line(live, lossy):
            judge.wait_for("123")
            found += judge.compare("started again", "123")
            judge.load(requests // 8)
            found += judge.compare("started again, later", "123")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--indexer", required=True, help="a Python with the package ai-dynamo-runtime")
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    given = parser.parse_args()
    print(f"seed {given.seed}, {given.requests} requests", file=sys.stderr)
    found = judge(given.indexer, given.requests, given.seed)
    names = [
        "when",
        "listener",
        "prompts",
        "equal",
        "last token",
        "between checkpoints",
        "below",
        "unexplained",
        "above",
    ]
    print("| " + " | ".join(names) + " |\n| --- | --- |" + " ---: |" * (len(names) - 2))
    print("\n".join(one.line() for one in found))
    bad = [
        one for one in found if one.count["unexplained"] or (one.count["below"] and one.name != "while requests run")
    ]
    print(json.dumps({"below": sum(one.count["below"] for one in bad), "failed": len(bad)}), file=sys.stderr)
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
