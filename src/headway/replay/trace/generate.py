"""Workloads with a known structure, made up from a seed: for those who have no trace, and for tests.

Five kinds of traffic, each of which a cache must treat differently:

    shared    one of a few long instructions, then a short question, and never again
    chat      one of several system prompts, then turns that each contain all before them, the answers included
    agents    instructions and tools, then many short steps: a call, its result, and so on; now and then a sub-agent
    search    one question answered several times, the best answers followed up: a tree of prompts
    one-off   prompts that share nothing with any other

`mixed` is all of them at once. A text here is a list of block ids that grows; forks share the blocks that are full, and
what stands in a block that is not full belongs to each fork alone, as it does in tokens. Answers are recorded, so a
trace made here is read without guessing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np

from headway.errors import ConfigError
from headway.formats import Trace, TraceBuilder

__all__ = ["WORKLOADS", "generate"]

_CHAT_SYSTEMS, _AGENT_SYSTEMS, _SHARED = 24, 4, 8
_BRANCHES, _KEPT, _LEVELS = 4, 2, 3


class _Text:
    """A text that grows: the ids of its whole blocks, how many tokens it has, and where its messages end."""

    __slots__ = ("blocks", "marks", "tokens")

    def __init__(self, blocks: list[int], tokens: int, marks: list[int]) -> None:
        self.blocks, self.tokens, self.marks = blocks, tokens, marks

    def fork(self) -> _Text:
        return _Text(self.blocks.copy(), self.tokens, self.marks.copy())


@dataclass(frozen=True)
class _Request:
    """A request of a session.

    Attributes:
        time: Seconds from the session's start.
        blocks: Ids of the whole blocks of prompt and answer.
        tokens: Tokens of the prompt.
        answer: Tokens of the answer.
        marks: Message boundaries of the prompt.
    """

    time: float
    blocks: list[int]
    tokens: int
    answer: int
    marks: list[int]


Session = Iterator[_Request]


class _Maker:
    """Makes sessions; everything it draws comes from one generator of random numbers."""

    def __init__(self, seed: int, width: int) -> None:
        self.random = np.random.default_rng(seed)
        self._width, self._ids = width, count()
        self._chat_systems = [self._new(self._size(700, 0.8)) for _ in range(_CHAT_SYSTEMS)]
        self._agent_systems = [self._new(self._size(9000, 0.3)) for _ in range(_AGENT_SYSTEMS)]
        self._instructions = [self._new(self._size(3500, 0.5)) for _ in range(_SHARED)]

    def shared(self) -> Session:
        """A question under one of a few long instructions."""
        text = self._one_of(self._instructions)
        self._grow(text, self._size(180, 0.7))
        yield self._ask(text, 0.0, self._size(60, 0.8))

    def chat(self) -> Session:
        """A conversation: every turn contains all before it."""
        text, time = self._one_of(self._chat_systems), 0.0
        for _ in range(int(self.random.geometric(0.22))):
            self._grow(text, self._size(160, 1.1))
            yield self._ask(text, time, self._size(320, 0.8))
            time += 8.0 + self.random.exponential(75.0)

    def agents(self) -> Session:
        """An agent at work: calls of tools and their results; sub-agents start from its instructions anew."""
        start = self._one_of(self._agent_systems)
        text, time = start.fork(), 0.0
        self._grow(text, self._size(300, 0.6))
        for _ in range(4 + int(self.random.geometric(0.06))):
            yield self._ask(text, time, self._size(140, 0.7))
            time += 2.0 + self.random.exponential(9.0)
            self._grow(text, self._size(650, 1.1))
            if self.random.random() < 0.06:
                inner, then = start.fork(), time
                self._grow(inner, self._size(400, 0.5))
                for _ in range(int(self.random.geometric(0.2))):
                    yield self._ask(inner, then, self._size(140, 0.7))
                    then += 2.0 + self.random.exponential(6.0)
                    self._grow(inner, self._size(650, 1.1))

    def search(self) -> Session:
        """A tree of prompts: one prompt is answered several times, and the best answers are followed up."""
        root, time = self._new(self._size(2500, 0.5)), 0.0
        level = [root]
        for _ in range(_LEVELS):
            following: list[_Text] = []
            for text in level:
                branches = [text.fork() for _ in range(_BRANCHES)]
                for branch in branches:
                    yield self._ask(branch, time, self._size(450, 0.4))
                    time += 0.2
                following += branches[:_KEPT]
            time += 12.0 + self.random.exponential(6.0)
            for text in following:
                self._grow(text, self._size(60, 0.4))
            level = following

    def one_off(self) -> Session:
        """A prompt that shares nothing."""
        yield self._ask(self._new(self._size(4200, 0.9)), 0.0, self._size(250, 0.8))

    # ---- texts

    def _size(self, median: int, spread: float) -> int:
        """A length around `median` tokens."""
        return max(1, int(median * np.exp(self.random.normal(0.0, spread))))

    def _new(self, tokens: int) -> _Text:
        text = _Text([], 0, [])
        self._grow(text, tokens)
        return text

    def _one_of(self, texts: list[_Text]) -> _Text:
        """A copy of one of `texts`, the first ones more often (as 1/rank)."""
        weights = 1.0 / np.arange(1, len(texts) + 1)
        return texts[int(self.random.choice(len(texts), p=weights / weights.sum()))].fork()

    def _grow(self, text: _Text, tokens: int) -> None:
        """Add tokens that occur nowhere else."""
        text.tokens += tokens
        text.marks.append(text.tokens)
        text.blocks.extend(next(self._ids) for _ in range(text.tokens // self._width - len(text.blocks)))

    def _ask(self, text: _Text, time: float, answer: int) -> _Request:
        """Send the text as a prompt; the answer is added to it."""
        tokens, marks = text.tokens, text.marks.copy()
        self._grow(text, answer)
        return _Request(time, text.blocks.copy(), tokens, answer, marks)


_KINDS: dict[str, Callable[[_Maker], Session]] = {
    "shared": _Maker.shared,
    "chat": _Maker.chat,
    "agents": _Maker.agents,
    "search": _Maker.search,
    "one-off": _Maker.one_off,
}
WORKLOADS: dict[str, dict[str, float]] = {name: {name: 1.0} for name in _KINDS} | {
    "mixed": {"shared": 0.30, "chat": 0.36, "agents": 0.06, "search": 0.02, "one-off": 0.26}
}
"""Shares of new sessions by kind, for each workload."""


def generate(
    workload: str = "mixed",
    requests: int = 3000,
    *,
    seed: int = 0,
    block_tokens: int = 64,
    sessions_per_second: float = 0.5,
) -> Trace:
    """Make a trace.

    Args:
        workload: A name of `WORKLOADS`.
        requests: Requests, counted in order of arrival.
        seed: Equal seeds make equal traces.
        block_tokens: Tokens in a block.
        sessions_per_second: New sessions in a second, on average.

    Raises:
        ConfigError: An unknown workload, or a number below 1.
    """
    if workload not in WORKLOADS:
        raise ConfigError(f"unknown workload {workload!r}; known are {', '.join(WORKLOADS)}")
    if requests < 1 or block_tokens < 1 or seed < 0 or sessions_per_second <= 0:
        raise ConfigError("a workload needs at least one request, blocks of one token, and a seed of 0 or more")
    maker = _Maker(seed, block_tokens)
    kinds, shares = list(WORKLOADS[workload]), list(WORKLOADS[workload].values())
    builder = TraceBuilder(f"{workload} (generated, seed {seed})", "generated", block_tokens, "recorded")
    start = 0.0
    for _ in range(requests):
        if len(builder) >= requests:
            break
        kind = kinds[int(maker.random.choice(len(kinds), p=shares))]
        for request in _KINDS[kind](maker):
            whole = request.tokens // block_tokens
            builder.add_blocks(
                request.blocks[:whole],
                request.tokens,
                request.answer,
                start + request.time,
                answer=request.blocks[whole:],
                boundaries=request.marks,
            )
        start += maker.random.exponential(1.0 / sessions_per_second)
    return builder.build().head(requests)
