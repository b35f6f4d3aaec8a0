"""A request trace as token ids, for an engine that hashes and compares tokens.

A trace of block hashes says which whole blocks two prompts share. Here each block becomes pseudo-random token ids of
its own, so that any engine finds exactly what the trace says. Two things that the trace cannot say are restored:

- The *tail*: what follows the last whole block of a prompt has an id of its own, and the next turn, which repeats it,
  names the fuller block at that place by another id. Where a prompt goes on from an earlier one, its next block begins
  with the tail of that one.
- The *answer*: where the trace's format says that a prompt contains the answer of the prompt that it goes on from, and
  it is long enough for that, this answer is what stands there. Every other answer is made of tokens that occur nowhere
  else.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.errors import ConfigError
from headway.formats import Trace, read_trace

__all__ = ["VOCABULARY", "Workload", "conversation", "sessions"]

VOCABULARY = 163_840
"""Token ids of prompts lie below this; those of answers that come back nowhere lie above."""


@dataclass(frozen=True)
class Link:
    """A prompt that goes on from an earlier one: `child` repeats all of `parent`, whose tail is the symbol `tail`."""

    parent: int
    child: int
    tail: int
    tokens: int


@dataclass
class Workload:
    """Requests in the order in which they are sent.

    Attributes:
        name: For reports.
        trace: What they were made from.
        order: Numbers of the requests in `trace`.
        one_by_one: Whether a request waits until the one before it that starts with the same block has ended.
        links: Which prompts go on from which, by the symbol of the block that begins with the tail.
    """

    name: str
    trace: Trace
    order: NDArray[np.int64]
    one_by_one: bool
    links: dict[int, Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Find the links, and from them who answers what."""
        self.links = _links(self.trace, self.order.tolist())
        self._child = {link.parent: link.child for link in self.links.values()}

    def __len__(self) -> int:
        """Requests."""
        return len(self.order)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return int(self.trace.prompt_tokens[self.order].sum())

    def thread(self, index: int) -> int | None:
        """What requests have in common that are sent one by one; None where each is on its own."""
        return int(self.trace.prompt(int(self.order[index]))[0]) if self.one_by_one else None

    def prompt(self, index: int) -> list[int]:
        """Token ids of a prompt."""
        return self._tokens(int(self.order[index])).tolist()

    def answer(self, index: int, tokens: int) -> list[int]:
        """The first `tokens` tokens of an answer, as far as a later prompt contains it; else nothing."""
        trace, request = self.trace, int(self.order[index])
        child = self._child.get(request)
        if trace.outputs != "continuation" or child is None:
            return []
        length = int(trace.prompt_tokens[request])
        if trace.prompt_tokens[child] < length + trace.answer_tokens[request]:
            return []
        return self._tokens(child)[length : length + tokens].tolist()

    def answer_tokens(self, index: int, most: int) -> int:
        """Tokens of an answer, cut to `most`; at least one."""
        return int(min(max(self.trace.answer_tokens[self.order[index]], 1), most))

    def _tokens(self, request: int) -> NDArray[np.int64]:
        width = self.trace.width
        symbols = self.trace.prompt(request)
        source = np.repeat(symbols.astype(np.uint64)[:, None], width, axis=1)
        for row, symbol in enumerate(symbols.tolist()):
            for link in _chain(self.links, symbol):
                source[row, : link.tokens] = np.uint64(link.tail)
        grid = source * np.uint64(width) + np.arange(width, dtype=np.uint64)
        tokens: NDArray[np.int64] = (_mixed(grid) % np.uint64(VOCABULARY)).astype(np.int64).ravel()
        return tokens[: int(self.trace.prompt_tokens[request])]


def conversation(path: Path, requests: int) -> Workload:
    """The first requests of a trace of one file, each on its own.

    Raises:
        TraceError: The file is no trace.
    """
    trace = read_trace(path, limit=requests)
    return Workload(path.stem, trace, np.arange(len(trace)), one_by_one=False)


def sessions(folder: Path, *, files: int, requests: int, longest: int) -> Workload:
    """The same number of requests from the start of each of the first `files` sessions of a folder, by arrival.

    Requests longer than `longest` tokens are left out. A session answers before it asks again: requests that start with
    the same block are sent one by one.

    Raises:
        ConfigError: Fewer sessions than asked for.
        TraceError: The files are no sessions.
    """
    names = list(islice(sorted(folder.glob("*.json*")), files))
    if len(names) < files:
        raise ConfigError(f"{folder}: {len(names)} sessions where {files} were asked for")
    with tempfile.TemporaryDirectory() as chosen:
        for name in names:
            (Path(chosen) / name.name).symlink_to(name.resolve())
        trace = read_trace(chosen)
    short = np.flatnonzero(trace.prompt_tokens <= longest)
    first = trace.symbols[trace.offsets[short]]
    rank = np.zeros(len(short), dtype=np.int64)
    by_thread = np.argsort(first, kind="stable")
    for _, group in groupby(by_thread.tolist(), key=lambda i: int(first[i])):
        members = list(group)
        rank[members] = np.arange(len(members))
    share = next(n for n in range(len(short), 0, -1) if (rank < n).sum() <= requests)
    return Workload(folder.name, trace, short[rank < share], one_by_one=True)


def _links(trace: Trace, order: Sequence[int]) -> dict[int, Link]:
    """Which block begins with whose tail.

    The whole blocks of a prompt are followed through those of all earlier ones. Where it leaves them exactly at the end
    of the whole blocks of an earlier prompt that is shorter, it goes on from that one: each has at most one follower,
    and at least two whole blocks must agree. Where the trace does not say whose turn is whose, the earlier prompt must
    be shorter by its answer too. (In sessions, what is thought is answered and not sent back.)
    """
    links: dict[int, Link] = {}
    root: list[Any] = [{}, []]
    answers = np.zeros_like(trace.answer_tokens) if trace.outputs == "continuation" else trace.answer_tokens
    for request in order:
        symbols = trace.prompt(request).tolist()
        length = int(trace.prompt_tokens[request])
        node, depth = root, 0
        while depth < len(symbols) - 1 and symbols[depth] in node[0]:
            node, depth = node[0][symbols[depth]], depth + 1
        partial = length > depth * trace.width
        if depth >= 2 and partial and symbols[depth] not in links:
            parent = next((p for p in reversed(node[1]) if length >= p[1] and symbols[depth] != p[2]), None)
            if parent is not None:
                links[symbols[depth]] = Link(parent[0], request, parent[2], parent[3])
                node[1].remove(parent)
        for symbol in symbols[depth:-1]:
            node = node[0].setdefault(symbol, [{}, []])
        if tail := length % trace.width:
            node[1].append((request, length + int(answers[request]), symbols[-1], tail))
    return links


def _chain(links: dict[int, Link], symbol: int) -> list[Link]:
    """The link of a block, that of the tail that it begins with, and so on."""
    found = []
    while symbol in links:
        found.append(links[symbol])
        symbol = links[symbol].tail
    return found


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Each word scrambled (the finaliser of splitmix64)."""
    with np.errstate(over="ignore"):
        x = words + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed
