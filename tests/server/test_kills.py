"""Servers and ranks with a disk below them, killed at random moments: no token is wrong afterwards, nothing is left.

`HEADWAY_KILLS` sets how often (20); `HEADWAY_SEED` when. See `tests/tiers/test_kills.py` for writers and stores.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import threading
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.preforked import Nursery, ranks_of

from headway.tiers.disk import DiskStore

KILLS = int(os.environ.get("HEADWAY_KILLS", "20"))
SEED = int(os.environ.get("HEADWAY_SEED", random.SystemRandom().randrange(2**32)))
LIVES = 6
"""Kills of one server on ranks: of a rank each time but the last."""
STORY = "There was a librarian who kept one shelf for every reader, and each reader had a question. "


def prompts(number: int) -> list[str]:
    """Conversations that share their beginning."""
    rnd = random.Random(number)
    return [
        STORY * rnd.randrange(1, 4) + f"Reader {rnd.randrange(4)} asked: {'why? ' * rnd.randrange(9)}"
        for _ in "12345678"
    ]


def ask(url: str, prompt: str, tokens: int = 8) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    answer: dict[str, Any] = httpx.post(f"{url}/v1/completions", json=body, timeout=300).raise_for_status().json()
    return answer


def said(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@contextmanager
def traffic(url: str, seed: int) -> Iterator[None]:
    """Requests until the server is gone."""
    rnd, over = random.Random(seed), threading.Event()

    def talk(number: int) -> None:
        for turn in range(10_000):
            if over.is_set():
                return
            try:
                ask(
                    url,
                    random.Random(f"{seed} {number} {turn}").choice(prompts(turn % 4)) + f" {number}",
                    rnd.randrange(1, 9),
                )
            except httpx.HTTPError:
                over.wait(0.01)

    with ThreadPoolExecutor(4) as clients:
        for number in range(4):
            clients.submit(talk, number)
        try:
            yield
        finally:
            over.set()


@contextmanager
def served(nursery: Nursery, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A server that listens: its process and its address."""
    process, printed = nursery.serve(["--port", "0", "--memory", "8MiB", *arguments])
    lines, listens = deque[str](maxlen=200), threading.Event()

    def follow() -> None:
        with os.fdopen(printed, encoding="utf-8", errors="replace") as text:
            for line in text:
                lines.append(line)
                if "Application startup complete" in line:
                    listens.set()
        listens.set()

    reader = threading.Thread(target=follow)
    reader.start()
    try:
        assert listens.wait(300)
        found = re.search(r"http://127\.0\.0\.1:\d+", "".join(lines))
        assert found, "".join(lines)
        yield process, found[0]
    except BaseException as error:
        error.add_note("".join(lines))
        raise
    finally:
        process.kill()
        process.wait()
        reader.join()  # nothing of it is left that could print


def nothing_is_held(url: str) -> None:
    """When no request runs, no block is."""
    metrics = httpx.get(f"{url}/metrics", timeout=60).text
    [leased] = re.findall(r'headway_blocks\{[^}]*state="leased"[^}]*\} (\S+)', metrics)
    assert float(leased) == 0, "a block is leased and no request runs"


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc to find the ranks of a server")
@pytest.mark.parametrize("ranks", [(), ("--dcp", "2", "--interleave", "16")], ids=["server", "rank"])
def test_what_is_killed_leaves_no_wrong_token_and_nothing_behind(
    tiny_model: Path, tmp_path: Path, ranks: tuple[str, ...]
) -> None:
    """A server is killed whole; of one on two ranks several times one of them, then all."""
    print(f"seed {SEED}")
    rnd, scratch = random.Random(SEED), tmp_path / "tmp"
    scratch.mkdir()
    nursery = Nursery({**os.environ, "TMPDIR": str(scratch)})
    before = set(nursery.shared_memory.iterdir())
    with served(nursery, str(tiny_model), *ranks) as (_, url):
        right = {prompt: said(ask(url, prompt)) for number in range(4) for prompt in prompts(number)}
    below = ("--disk", f"{tmp_path / 'disk'}:2MiB", "--host-memory", "4MiB", *ranks)
    kills, hits = Counter[str](), 0
    while kills.total() < KILLS:
        with served(nursery, str(tiny_model), *below) as (process, url):
            for life in range(LIVES if ranks else 1):
                for prompt in rnd.sample(sorted(right), 4):
                    answer = ask(url, prompt)
                    assert said(answer) == right[prompt], f"after {kills}, {cached(answer)} tokens were cached"
                    hits += cached(answer) > 0 and not life
                nothing_is_held(url)
                with traffic(url, rnd.randrange(1 << 30)):
                    threading.Event().wait(rnd.random())  # at any moment
                    victim = rnd.choice(ranks_of(process)) if ranks and life < LIVES - 1 else process.pid
                    os.kill(victim, signal.SIGKILL)
                    kills["server" if victim == process.pid else "rank"] += 1
                    if victim == process.pid:
                        process.wait()
        assert set(nursery.shared_memory.iterdir()) <= before, "shared memory is left behind"
        assert not list(scratch.iterdir()), "files are left behind"
    nursery.close()
    print(f"killed: {dict(kills)}; {hits} first requests found something on the disk")
    assert hits, "the disk was of no use"
    store = DiskStore(tmp_path / "disk")
    listed = list(store.names(""))
    assert sum(item.length for item in listed) < 4 << 20
    assert not list((tmp_path / "disk").rglob(".tmp-*"))
