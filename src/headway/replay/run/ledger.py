"""What a run writes down: what became of each request, checkpoints by kind, memory over time."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.cache import Counters, Explanation, Reason
from headway.formats import Trace
from headway.tell.reasons import FORGOTTEN, LINES
from headway.tell.run import Memory

__all__ = ["Ledger", "Progress", "StateMark"]

Longs = NDArray[np.int64]
Progress = Callable[[int, int], None]
"""Called now and then with the requests done and the requests in all."""

_SAMPLES = 60
_LINE = {line: number for number, line in enumerate(LINES)}
_EVICTED, _NEVER_TAKEN, _COMPUTING, _LAST, _PARTED, _NOTHING = (
    _LINE[reason.value]
    for reason in (
        Reason.EVICTED,
        Reason.STATE_NEVER_TAKEN,
        Reason.STILL_COMPUTING,
        Reason.LAST_TOKEN,
        Reason.PARTED,
        Reason.NOTHING_MATCHED,
    )
)


@dataclass
class StateMark:
    """A state that an imitated engine keeps: why, and whether anybody has resumed from it."""

    kind: str
    used: bool = False


class Ledger:
    """The ledger of one run.

    Attributes:
        hits: int64 [R], tokens reused.
        loaded: int64 [R], of the tokens reused those that were read back from lower tiers of memory.
        lost: int64 [lines, R], tokens lost, in the order of `LINES`.
        memory: Memory over time.
        half: Counters when half of the requests had ended.
        counters: Counters at the end.
        refused: Requests that the memory could never hold, and the bytes of one rank that each needs.
    """

    def __init__(
        self, trace: Trace, matches: Longs, progress: Progress | None = None, counters: Counters | None = None
    ) -> None:
        """An empty one.

        Args:
            trace: The trace.
            matches: int64 [R], tokens that an endless memory would reuse.
            progress: Called with each sample of memory.
            counters: Those of the cache that runs; by default empty ones, which `took`, `resumed` and `evicted` count.
        """
        requests = len(trace)
        self.hits: Longs = np.zeros(requests, dtype=np.int64)
        self.loaded: Longs = np.zeros(requests, dtype=np.int64)
        self.lost: Longs = np.zeros((len(LINES), requests), dtype=np.int64)
        self.memory: list[Memory] = []
        self.half = Counters()
        self.counters = Counters() if counters is None else counters
        self.refused: dict[int, int] = {}
        self._matches: list[int] = matches.tolist()
        self._tokens: list[int] = trace.prompt_tokens.tolist()
        self._progress = progress
        self._every = max(1, requests // _SAMPLES)

    def match(self, request: int) -> int:
        """Tokens of a prompt that an endless memory would reuse."""
        return self._matches[request]

    def refuse(self, request: int, needed: int) -> None:
        """A request needs `needed` bytes of one rank, and the memory has fewer."""
        self.refused[request] = needed

    def explain(
        self,
        request: int,
        explanation: Explanation,
        length: int,
        symbol: int,
        *,
        resends: bool = False,
        unknown: str = FORGOTTEN,
    ) -> None:
        """Write down what became of a prompt, as the cache explains it.

        Args:
            request: The request.
            explanation: What the cache said, in symbols.
            length: Symbols of the prompt.
            symbol: Tokens of a symbol; the last one may have fewer.
            resends: A prompt that is known to its end and resumes behind its whole blocks is a resend: in tokens its
                checkpoint lies before its last token.
            unknown: Line for tokens that an endless memory would reuse and the cache does not know.
        """
        tokens, lost = self._tokens[request], self.lost
        own, reused = explanation.hit_tokens, explanation.hit_tokens + explanation.loaded_tokens
        if explanation.matched == length and reused == length - 1 and resends:
            self._reuse(request, tokens - 1, own * symbol if own < reused else tokens - 1)
            lost[_LAST, request] = 1
            return
        hit = reused * symbol
        if hit == tokens:
            hit, lost[_LAST, request] = tokens - 1, 1
        self._reuse(request, hit, min(hit, own * symbol))
        known = tokens - 1 if explanation.matched == length else explanation.matched * symbol
        forgotten = self._matches[request] - known
        for loss in explanation.losses:
            amount = (tokens if loss.stop >= length else loss.stop * symbol) - loss.start * symbol
            if forgotten > 0 and loss.reason in (Reason.PARTED, Reason.NOTHING_MATCHED):
                lost[_LINE[unknown], request] += forgotten
                amount -= forgotten
            elif loss.reason is Reason.LAST_TOKEN and loss.stop >= length:
                lost[_EVICTED, request] += amount - 1
                amount = 1
            lost[_LINE[loss.reason.value], request] += amount

    def _reuse(self, request: int, hit: int, own: int) -> None:
        """Of the `hit` tokens that are reused, `own` were in the device's memory."""
        self.hits[request], self.loaded[request] = hit, hit - own

    def note(self, request: int, hit: int, kept: int, computed: int) -> None:
        """Write down what became of a prompt in an imitated engine.

        Args:
            request: The request.
            hit: Tokens reused.
            kept: Tokens up to the deepest position where a state was kept at any time (0: none).
            computed: Tokens of the prompt that somebody has computed; what lies behind is at most under way.
        """
        lost, tokens, match = self.lost, self._tokens[request], max(hit, self._matches[request])
        self.hits[request] = hit
        kept, computed = (min(max(hit, position), match) for position in (kept, computed))
        lost[_EVICTED, request] += kept - hit
        lost[_NEVER_TAKEN, request] += max(0, computed - kept)
        lost[_COMPUTING, request] += match - max(kept, computed)
        if match == tokens - 1:
            lost[_LAST, request] += 1
        else:
            lost[_PARTED if match else _NOTHING, request] += tokens - match

    def take(self, kind: str) -> StateMark:
        """A state is kept."""
        self.counters.taken[kind] = self.counters.taken.get(kind, 0) + 1
        return StateMark(kind)

    def resume(self, mark: StateMark) -> None:
        """A request resumes from a state."""
        counters = self.counters
        counters.resumed[mark.kind] = counters.resumed.get(mark.kind, 0) + 1
        if not mark.used:
            mark.used = True
            counters.reused[mark.kind] = counters.reused.get(mark.kind, 0) + 1

    def evict(self, mark: StateMark) -> None:
        """A state is given up."""
        counters = self.counters
        counters.evicted[mark.kind] = counters.evicted.get(mark.kind, 0) + 1
        if not mark.used:
            counters.evicted_unused[mark.kind] = counters.evicted_unused.get(mark.kind, 0) + 1

    def sample_is_due(self, done: int) -> bool:
        """Whether to sample memory when that many requests are done. Keeps the counters of the first half."""
        if done == len(self._tokens) // 2:
            self.half = deepcopy(self.counters)
        return done % self._every == 0

    @property
    def kept(self) -> int:
        """Checkpoints kept at the moment."""
        return sum(self.counters.taken.values()) - sum(self.counters.evicted.values())

    def sample(self, done: int, time: float, used: int, checkpoints: int) -> None:
        """Write down the memory after `done` requests.

        Args:
            done: Requests that have ended.
            time: Seconds of the trace.
            used: Bytes held, on one rank.
            checkpoints: Bytes of checkpoints.
        """
        self.memory.append(Memory(done, time, used, min(used, checkpoints), self.kept))
        if self._progress:
            self._progress(done, len(self._tokens))
