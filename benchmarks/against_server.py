"""Our server with the built-in model, and what `headway replay` predicts of it: the traffic, its counters, the command.

    python benchmarks/against_server.py FOLDER [--memory 8MB] [--at-once 4]

The built-in model is served, and conversations that begin alike take turns. FOLDER gets the requests twice, as the
server's recording of tokens and as the log of a gateway, and the server's `/metrics` after them. Printed are the
commands that predict the counters from each.
"""

from __future__ import annotations

import argparse
import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from tests.server.fakes import listening

from headway.engine import EngineConfig
from headway.engine.build import build_engine
from headway.runtime.sources import resolve_source
from headway.server import ServerOptions
from headway.server.recorder import Recorder
from headway.sizes import parse_bytes

WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "it",
    "was",
    "for",
    "on",
    "are",
    "with",
    "as",
    "at",
    "be",
    "this",
)


def conversations(seed: int, talks: int = 8, turns: int = 3) -> list[list[dict[str, str]]]:
    """Messages of requests, in the order in which they are asked."""
    chance = random.Random(seed)

    def words(count: int) -> str:
        return " ".join(chance.choices(WORDS, k=count))

    rules = [words(60), words(90)]
    said: list[list[dict[str, str]]] = [[{"role": "system", "content": rules[talk % 2]}] for talk in range(talks)]
    asked = []
    for _ in range(turns):
        for talk in chance.sample(range(talks), talks):
            said[talk].append({"role": "user", "content": words(chance.randrange(10, 40))})
            asked.append(list(said[talk]))
            said[talk].append({"role": "assistant", "content": words(chance.randrange(5, 20))})
    return asked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--memory", default="8MB")
    parser.add_argument("--at-once", type=int, default=1, help="requests in flight")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True)
    recording, log, counters = (asked.folder / name for name in ("tokens.jsonl", "log.jsonl", "metrics.txt"))
    built = build_engine(None, EngineConfig(memory=parse_bytes(asked.memory, "--memory"), max_running=asked.at_once))
    recorder = Recorder(recording, "tokens", "builtin")
    options = ServerOptions("builtin", recorder=recorder)
    with listening(built.engine.start(), built.tokenizer, options) as (url, _), httpx.Client(timeout=600) as http:

        def ask(numbered: tuple[int, list[dict[str, str]]]) -> str:
            number, messages = numbered
            body: dict[str, Any] = {"model": "builtin", "messages": messages, "max_tokens": 4, "temperature": 0}
            answer = http.post(f"{url}/v1/chat/completions", json=body).raise_for_status().json()
            return json.dumps({"timestamp": number, "request": body, "response": {"body": answer}})

        with ThreadPoolExecutor(asked.at_once) as pool:
            lines = list(pool.map(ask, enumerate(conversations(1))))
        counters.write_text(http.get(f"{url}/metrics").text)
        config = built.engine.cache.config
    log.write_text("\n".join(lines) + "\n")
    memory = config.blocks * config.geometry().block_bytes
    _, model = resolve_source(None)
    for trace, more in ((recording, ""), (log, f" --tokenizer {model}")):
        print(f"headway replay {trace}{more} --model {model} --kv-dtype fp32 --memory {memory} --against {counters}")


if __name__ == "__main__":
    main()
