"""An hour of chat, and what was computed twice: `python benchmarks/chat_hour.py`.

Users talk to a server through the official `openai` client, at a temperature of 0.7. They give answers up, use stop
strings, edit what they said (all of a message or its end), ask for another answer, and paste documents. About half of
them use a template that shows `<think>` in the generation prompt and strips reasoning from earlier answers. The hour is
simulated: its pauses are shortened by `--speed`, while the model computes in real time, so on a slow machine it takes
longer.

An independent record of every position that any step has computed, known by the digest of all bytes up to it, judges
the result: of all prompt tokens, how many had been computed before and were computed again. Bytes and not tokens,
because a text that is sent back may be split into other tokens than those that were sampled. The memory is large enough
for all, which is shown, so every one of them could have been kept. The record reads the steps and not the cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

import openai
import torch
import uvicorn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Gemma3TextConfig

from headway.engine import Engine, EngineConfig
from headway.engine.build import build_engine
from headway.engine.executor import BlockRange, CanonicalGroup, Executor, Int32s, StepWork
from headway.engine.request import RunningRequest
from headway.runtime.interface import RowAnswer
from headway.runtime.sources import resolve_source
from headway.server import ServerOptions, create_app
from headway.sizes import parse_bytes

ROOT = Path(__file__).parents[1]
TEMPLATE = (
    "{{- bos_token }}{%- for message in messages %}{%- set said = message['content'] %}"
    "{%- if message['role'] == 'assistant' and enable_thinking %}"
    "{%- set said = said.split('</think>')[-1] %}{%- endif %}"
    "{{- '<|' + message['role'] + '|>\\n' + said + '<|end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- if enable_thinking %}{{- '<think>\\n' }}{%- endif %}"
    "{%- endif %}"
)
GIVE_UPS, STOPS, EDITS, REGENERATIONS, THINKING, DOCUMENTS = 0.10, 0.20, 0.15, 0.10, 0.5, 0.05
APPLICATIONS, TURNS = 12, 10
SECONDS = 3600


# -- the record -------------------------------------------------------------------------------------------------------


@dataclass
class Count:
    """Prompt tokens of the requests of one kind: all, those that were computed, those computed before that."""

    requests: int = 0
    prompts: int = 0
    computed: int = 0
    again: int = 0


class Record:
    """Stands between the engine and its executor, and remembers every position that was computed."""

    def __init__(self, engine: Engine, piece: Callable[[int], bytes]) -> None:
        self._scheduler, self._inner, self._piece = engine._scheduler, engine._executor, piece
        self._seen: set[int] = set()
        self._after: dict[tuple[int, int], tuple[int, ...]] = {}
        self._digests: WeakKeyDictionary[RunningRequest, list[tuple[int, ...]]] = WeakKeyDictionary()
        self.counts: dict[str, Count] = {}
        self.prompts: list[int] = []
        engine._executor = self

    def run(self, work: StepWork) -> Sequence[RowAnswer]:
        """Compute a step; then note which positions it has computed."""
        by_row = {r.lease.row: r for r in self._scheduler.running if r.lease is not None}
        rows = [(by_row[int(row)], i) for i, row in enumerate(work.step.rows.tolist()) if work.step.counts[i] > 0]
        answers = self._inner.run(work)
        for request, i in rows:
            start = int(work.step.starts[i])
            self._note(request, start, start + len(work.tokens[i]))
        return answers

    def _note(self, request: RunningRequest, start: int, stop: int) -> None:
        count = self.counts.setdefault(request.user.partition(" ")[0], Count())
        if request not in self._digests:
            self._digests[request] = []
            self.prompts.append(request.prompt_length)
            count.requests += 1
            count.prompts += request.prompt_length
        digests = self._digests[request]
        for token in request.tokens[len(digests) : stop].tolist():
            digests.append(self._digest(digests[-1][-1] if digests else 0, token))
        for position in range(start, min(stop, request.prompt_length)):
            count.computed += 1
            count.again += digests[position][-1] in self._seen
        for position in range(start, stop):
            self._seen.update(digests[position])

    def _digest(self, before: int, token: int) -> tuple[int, ...]:
        """The digests of a text of digest `before` with each byte of the token added."""
        if (before, token) not in self._after:
            digests = [before]
            for byte in self._piece(token):
                digests.append(hash((digests[-1], byte)))
            self._after[before, token] = tuple(digests)
        return self._after[before, token]

    def check(self) -> None:
        """As the executor."""
        self._inner.check()

    def restart(self) -> None:
        """As the executor."""
        self._inner.restart()

    @property
    def canonical(self) -> Mapping[str, CanonicalGroup]:
        """As the executor."""
        return self._inner.canonical

    def move_blocks(self, out: Int32s, back: Int32s) -> None:
        """As the executor."""
        self._inner.move_blocks(out, back)

    def read_objects(self, ranges: Sequence[BlockRange]) -> Sequence[memoryview]:
        """As the executor."""
        return self._inner.read_objects(ranges)

    def write_objects(self, ranges: Sequence[BlockRange], objects: Sequence[memoryview]) -> None:
        """As the executor."""
        self._inner.write_objects(ranges, objects)

    def close(self) -> None:
        """As the executor."""
        self._inner.close()


_: type[Executor] = Record


# -- the users --------------------------------------------------------------------------------------------------------


@dataclass
class Words:
    """Sentences of the project's own documentation, put together at random."""

    rng: random.Random
    words: list[str]

    def some(self, least: int, most: int) -> str:
        """Between `least` and `most` words."""
        start, count = self.rng.randrange(len(self.words)), self.rng.randint(least, most)
        return " ".join(self.words[(start + i) % len(self.words)] for i in range(count))


@dataclass
class Shared:
    """What all users have in common."""

    client: openai.AsyncOpenAI
    systems: list[str]
    speed: float
    done: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)


class User:
    """One person and a client."""

    def __init__(self, name: int, shared: Shared, seed: int, words: list[str]) -> None:
        self.rng = random.Random(f"{seed} {name}")
        self.words = Words(self.rng, words)
        self.shared = shared
        self.name = name
        self.system = self.rng.choice(shared.systems)
        self.thinking = self.rng.random() < THINKING
        self.said: list[dict[str, str]] = []

    async def talk(self, requests: int) -> None:
        """Make so many requests, spread over the hour."""
        pause = SECONDS / requests / self.shared.speed
        await asyncio.sleep(self.rng.random() * pause)
        for _ in range(requests):
            kind = self._choose()
            if await self._ask(kind) and self.rng.random() < 0.5:
                await self._ask("retry", patient=True)
            await asyncio.sleep(self.rng.expovariate(1 / (0.7 * pause)))

    def _choose(self) -> str:
        """Change the conversation. Returns what was done."""
        turns = len(self.said) // 2
        if turns == 0 or turns >= TURNS:
            self.said = [{"role": "system", "content": self.system}]
            self._say(self._new())
            return "new"
        draw = self.rng.random()
        if draw < REGENERATIONS:
            del self.said[-1]
            return "regenerate"
        if draw < REGENERATIONS + EDITS:
            turn = turns if self.rng.random() < 0.7 else self.rng.randint(1, turns)
            before = self.said[2 * turn - 1]["content"].split()
            del self.said[2 * turn - 1 :]
            kept = before[: self.rng.randrange(len(before))] if self.rng.random() < 0.5 else []
            self._say(" ".join([*kept, self._new()]))
            return "edit"
        self._say(self._new())
        return "next"

    def _new(self) -> str:
        """A few sentences, or now and then a document."""
        return self.words.some(1000, 3000) if self.rng.random() < DOCUMENTS else self.words.some(20, 90)

    def _say(self, text: str) -> None:
        self.said.append({"role": "user", "content": text})

    async def _ask(self, kind: str, patient: bool = False) -> bool:
        """Ask, and take the answer into the conversation. Returns whether it was given up."""
        impatient = not patient and self.rng.random() < GIVE_UPS
        if kind == "retry":
            del self.said[-1]
        stop = [self.rng.choice([".", ",", "the", "e", "an"])] if self.rng.random() < STOPS else None
        self.shared.done.update({kind: 1, "stop strings": int(stop is not None), "given up": int(impatient)})
        try:
            text = await self._read(kind, stop, self._patience() if impatient else None)
        except openai.APIError as error:
            self.shared.errors.append(f"{kind}: {error}")
            text = ""
        if self.thinking and text:
            cut = self.rng.randrange(len(text))  # a model that was not taught to think does not write the mark itself
            text = f"{text[:cut]}</think>{text[cut:]}"
        self.said.append({"role": "assistant", "content": text})
        return impatient

    def _patience(self) -> tuple[float, int]:
        """How long, in seconds, and for how many chunks an impatient user reads."""
        return self.rng.uniform(0.02, 1.0), self.rng.randint(1, 30)

    async def _read(self, kind: str, stop: list[str] | None, patience: tuple[float, int] | None) -> str:
        stream = await self.shared.client.chat.completions.create(
            model="hour",
            messages=self.said,  # type: ignore[arg-type]
            max_completion_tokens=self.rng.randint(16, 80),
            temperature=0.7,
            stop=stop,
            stream=True,
            user=f"{kind} {self.name}",
            extra_body={"chat_template_kwargs": {"enable_thinking": self.thinking}},
        )
        assert isinstance(stream, openai.AsyncStream)
        text, chunks, started = "", 0, time.monotonic()
        async with stream:
            async for chunk in stream:
                chunks += 1
                text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
                if patience and (chunks > patience[1] or time.monotonic() - started > patience[0]):
                    break
        return text


# -- the server -------------------------------------------------------------------------------------------------------


def write_model(kind: str, folder: Path) -> Path:
    """A model with the thinking template: the built-in one, or a random one with windows."""
    builtin = resolve_source(None)[1]
    words = AutoTokenizer.from_pretrained(builtin)
    words.chat_template = TEMPLATE
    if kind == "builtin":
        config = AutoConfig.from_pretrained(builtin)
        model = AutoModelForCausalLM.from_pretrained(builtin, config=config)
    else:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            Gemma3TextConfig(
                vocab_size=len(words),
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=6,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=32,
                sliding_window=128,
                layer_types=(["sliding_attention"] * 2 + ["full_attention"]) * 2,
                eos_token_id=words.eos_token_id,
                pad_token_id=words.pad_token_id,
                bos_token_id=words.bos_token_id,
                max_position_embeddings=32768,
            )
        )
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


@contextmanager
def served(engine: Engine, tokenizer: Any) -> Iterator[str]:
    """Serve an engine on a loopback port, and yield its address."""
    app = create_app(engine, tokenizer, ServerOptions("hour"))
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=30))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            thread.join()


async def simulate(url: str, users: int, requests: int, speed: float, seed: int) -> Shared:
    """Let all users talk, and print how far they are. Takes an hour of simulated time and more: some pause for long."""
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))
    words = [word for word in text.split() if word.isascii()]
    common = Words(random.Random(seed), words)
    client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=600)
    shared = Shared(client, [common.some(250, 500) for _ in range(APPLICATIONS)], speed)
    each, started = -(-requests // users), time.monotonic()
    talks = [asyncio.ensure_future(User(i, shared, seed, words).talk(each)) for i in range(users)]
    left: set[asyncio.Future[None]] = set(talks)
    while left:
        _, left = await asyncio.wait(left, timeout=10, return_when=asyncio.ALL_COMPLETED)
        sent = sum(shared.done[kind] for kind in ("new", "next", "edit", "regenerate"))
        print(
            f"  {time.monotonic() - started:5.0f} s: {sent:,} of {each * users:,} requests sent, and "
            f"{shared.done['retry']:,} retries; {len(left):,} of {users:,} users talk; {len(shared.errors):,} errors",
            flush=True,
        )
    await asyncio.gather(*talks)
    await client.close()
    return shared


def show(record: Record, engine: Engine, shared: Shared, seconds: float) -> dict[str, Any]:
    """Print the result; returns it as JSON holds it."""
    if not record.prompts:
        sys.exit(f"no request was answered: {shared.errors[:3]}")
    total = Count()
    print(f"\n{'':12} {'requests':>9} {'prompt tokens':>14} {'computed':>10} {'again':>8}  of the prompts")
    for kind, count in [*sorted(record.counts.items()), ("all", total)]:
        if count is not total:
            for name, value in vars(count).items():
                setattr(total, name, getattr(total, name) + value)
        print(
            f"{kind:12} {count.requests:9,} {count.prompts:14,} {count.computed:10,} {count.again:8,}  "
            f"{count.again / max(1, count.prompts):.2%}"
        )
    stats, counters = engine.snapshot(10).cache, engine.snapshot(10).counters
    free = {"blocks": stats.blocks, "free": stats.free, "preemptions": counters.preemptions}
    print(f"median prompt {median(record.prompts):,.0f} tokens; {dict(shared.done)}; {seconds:.0f} s")
    print(f"memory: {free['free']:,} of {free['blocks']:,} blocks are still free, {counters.preemptions} preemptions")
    print(f"errors: {len(shared.errors)} {shared.errors[:3]}")
    return {
        "again": total.again / total.prompts,
        "kinds": {kind: vars(count) for kind, count in record.counts.items()},
        "median_prompt": median(record.prompts),
        "done": dict(shared.done),
        "memory": free,
        "errors": len(shared.errors),
    }


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("builtin", "windows"), default="builtin", help="whom to talk to")
    parser.add_argument("--users", type=int, default=200)
    parser.add_argument("--requests", type=int, default=2000, help="at least so many, retries not counted")
    parser.add_argument("--speed", type=float, default=20.0, help="simulated seconds per second")
    parser.add_argument("--memory", default="6GiB", help="for the cache; enough for everything")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the result here as well")
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    print(f"seed {options.seed}, model {options.model}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(options.model, Path(folder) / "hour")
        built = build_engine(str(model), EngineConfig(memory=parse_bytes(options.memory)), print)
        record, started = Record(built.engine, built.tokenizer.piece), time.monotonic()
        with served(built.engine.start(), built.tokenizer) as url:
            shared = asyncio.run(simulate(url, options.users, options.requests, options.speed, options.seed))
            result = show(record, built.engine, shared, time.monotonic() - started)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
