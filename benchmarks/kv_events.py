"""What KV events cost: processor time per request with and without, in the engine's thread and in the publisher's.

A cache of a hybrid model serves conversations, without a model: each turn is all that was said before, 200 new tokens
and an answer of 50. The same turns run in turns on a cache whose events are published, over a real socket to a reader
that takes everything in a process of its own, and on one whose are not. Seconds are seconds of CPU time, so that other
work on the machine counts less.

Below the table: the same for an engine that runs the built-in model, all threads together.

    python benchmarks/kv_events.py          prints a table
"""

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import zmq

from headway.cache import CacheConfig, FullAttention, PrefixCache, Prompt, Recurrent
from headway.engine import EngineConfig, GenerationRequest
from headway.engine.build import engine_of
from headway.runtime.loading import LoadedModel, load_model
from headway.server.kv_events import KvEventsConfig
from headway.server.kv_publisher import KvEventPublisher, KvEventSockets

ROUNDS, MESSAGE, ANSWER, CHUNK = 5, 200, 50, 2048
LENGTHS = (1_000, 10_000, 100_000)
"""Tokens at which a conversation is looked at: the ten turns behind them are measured."""


def cache_of(blocks: int) -> PrefixCache:
    """The cache of a model with states."""
    return PrefixCache(CacheConfig([FullAttention("mla", 1152), Recurrent("kda", 400_000)], blocks))


def turns(cache: PrefixCache, length: int, seed: int) -> Iterator[None]:
    """A conversation that begins with `length` tokens, turn by turn."""
    rng = np.random.default_rng(seed)
    said = rng.integers(0, 30_000, length).astype(np.int32)
    while True:
        said = np.concatenate([said, rng.integers(0, 30_000, MESSAGE).astype(np.int32)])
        lease = cache.lease(Prompt(said, boundaries=(len(said),)))
        answer: list[int] = []
        while len(answer) < ANSWER:
            step = cache.extend(
                [lease.row], [min(CHUNK, lease.next_stop - lease.computed, lease.tokens - lease.computed)]
            )
            before, token = lease.tokens, int(rng.integers(30_000))
            cache.commit(step, sampled=np.array([token], np.int32))
            answer += [token] * (lease.tokens - before)
        cache.finish([lease.row])
        said = np.concatenate([said, np.array(answer, np.int32)])
        yield


def measure(cache: PrefixCache, length: int, seed: int) -> float:
    """CPU seconds per turn of this thread."""
    conversation = turns(cache, length, seed)
    next(conversation)
    started = time.thread_time()
    for _ in range(10):
        next(conversation)
    return (time.thread_time() - started) / 10


def serve(loaded: LoadedModel, live: str | None, seed: int) -> float:
    """CPU seconds per request of the built-in model, in conversations of six turns."""
    built, rng = engine_of(loaded, EngineConfig(memory=64 << 20)), np.random.default_rng(seed)
    publisher = None
    if live is not None:
        publisher = KvEventPublisher(built.engine.cache, KvEventSockets(KvEventsConfig(endpoint=live)), 16)
    engine, started, requests = built.engine.start(), 0.0, 0
    for talk in range(5):
        said = np.empty(0, np.int32)
        for _ in range(6):
            said = np.concatenate([said, rng.integers(16, 1200, 60).astype(np.int32)])
            result = engine.submit(GenerationRequest(said, 20, ignore_eos=True, boundaries=(len(said),))).result(600)
            said = np.concatenate([said, np.array(result.tokens, np.int32)])
            requests += talk > 0
        started = started or time.process_time()  # the first conversation warms up
    spent = time.process_time() - started
    engine.close()
    if publisher is not None:
        publisher.close()
    return spent / requests


def take_all(live: str) -> None:
    """A reader."""
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(live)
        while True:
            socket.recv_multipart()


def main() -> None:
    print("| tokens of a prompt | without | engine's thread, more by | publisher's thread | batches per request |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as folder:
        live = f"ipc://{Path(folder) / 'live'}"
        reader = multiprocessing.get_context("spawn").Process(target=take_all, args=(live,), daemon=True)
        reader.start()
        for length in LENGTHS:
            compare(length, live)
        loaded = load_model(None, "cpu", "fp32")
        seconds = [(serve(loaded, None, seed), serve(loaded, live, seed)) for seed in range(ROUNDS)]
        plain, told = (1000 * statistics.median(values) for values in zip(*seconds, strict=True))
        more = [1000 * (with_them - without) for without, with_them in seconds]
        print(f"\nThe built-in model: {plain:.1f} ms per request without, {told:.1f} ms with.", end=" ")
        print(f"The difference in {ROUNDS} rounds: {min(more):+.1f} to {max(more):+.1f} ms.")
        reader.terminate()
        reader.join()


def compare(length: int, live: str) -> None:
    """One line of the table."""
    plain, told, behind, batches = [], [], [], 0
    for seed in range(ROUNDS):
        blocks = 40 * (length // 16 + 1000)
        plain.append(measure(cache_of(blocks), length, seed))
        cache = cache_of(blocks)
        publisher = KvEventPublisher(cache, KvEventSockets(KvEventsConfig(endpoint=live)), 16)
        before, own = time.process_time(), time.thread_time()
        told.append(measure(cache, length, seed))
        publisher.close()
        behind.append((time.process_time() - before - (time.thread_time() - own)) / 11)
        batches += publisher.counts.batches
    base, more, thread = (1e6 * min(values) for values in (plain, told, behind))  # the least disturbed
    print(f"| {length:,} | {base:,.0f} us | {more - base:,.0f} us | {thread:,.0f} us | {batches / ROUNDS / 11:.1f} |")


if __name__ == "__main__":
    main()
