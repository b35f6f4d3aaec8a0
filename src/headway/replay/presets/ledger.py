"""What a preset's run writes down: hits, one reason for every lost token, states by kind, memory over time."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.cache import Reason
from headway.replay.result import LINES, REFUSED, Memory, Recording
from headway.replay.trace import Trace

__all__ = ["Ledger", "Progress", "StateMark"]

Progress = Callable[[int, int], None]
_SAMPLES = 60
_LINE = {reason: LINES.index(reason.value) for reason in Reason}


@dataclass
class StateMark:
    """A state that was kept: why, and whether anybody has resumed from it."""

    kind: str
    used: bool = False


class Ledger:
    """The record of one run; `recording` is what it has found so far."""

    def __init__(self, trace: Trace, matches: NDArray[np.int64], progress: Progress | None) -> None:
        self.recording = Recording.of(len(trace))
        self._matches: list[int] = matches.tolist()
        self._tokens: list[int] = trace.prompt_tokens.tolist()
        self._times: list[float] = trace.times.tolist()
        self._progress = progress
        self._every = max(1, len(trace) // _SAMPLES)
        self._done = 0

    def match(self, request: int) -> int:
        """Tokens of a prompt that an endless memory would reuse."""
        return self._matches[request]

    def refused(self, request: int) -> None:
        """A prompt is larger than the memory."""
        self.recording.refused += 1
        self.recording.lost[LINES.index(REFUSED), request] = self._tokens[request]

    def note(self, request: int, hit: int, kept: int, computed: int) -> None:
        """Write down what became of a prompt.

        Args:
            request: The request.
            hit: Tokens reused.
            kept: Tokens up to the deepest position where a state was kept at any time (0: none).
            computed: Tokens of the prompt that somebody has computed; what lies behind is at most under way.
        """
        lost, tokens, match = self.recording.lost, self._tokens[request], max(hit, self._matches[request])
        self.recording.hits[request] = hit
        kept, computed = (min(max(hit, position), match) for position in (kept, computed))
        lost[_LINE[Reason.EVICTED], request] += kept - hit
        lost[_LINE[Reason.STATE_NEVER_TAKEN], request] += max(0, computed - kept)
        lost[_LINE[Reason.STILL_COMPUTING], request] += match - max(kept, computed)
        if match == tokens - 1:
            lost[_LINE[Reason.LAST_TOKEN], request] += 1
        else:
            lost[_LINE[Reason.PARTED if match else Reason.NOTHING_MATCHED], request] += tokens - match

    def took(self, kind: str) -> StateMark:
        """A state is kept."""
        counters = self.recording.counters
        counters.taken[kind] = counters.taken.get(kind, 0) + 1
        return StateMark(kind)

    def resumed(self, mark: StateMark) -> None:
        """A request resumes from a state."""
        counters = self.recording.counters
        counters.resumed[mark.kind] = counters.resumed.get(mark.kind, 0) + 1
        if not mark.used:
            mark.used = True
            counters.reused[mark.kind] = counters.reused.get(mark.kind, 0) + 1

    def evicted(self, mark: StateMark) -> None:
        """A state is given up."""
        counters = self.recording.counters
        counters.evicted[mark.kind] = counters.evicted.get(mark.kind, 0) + 1
        if not mark.used:
            counters.evicted_unused[mark.kind] = counters.evicted_unused.get(mark.kind, 0) + 1

    def admitted(self, used: Callable[[], int], checkpoints: Callable[[], int]) -> None:
        """One more request has been looked up; sample memory (bytes held, bytes of states) now and then."""
        if self._done == len(self._tokens) // 2:
            self.recording.half = deepcopy(self.recording.counters)
        if self._done % self._every == 0:
            self._sample(used(), checkpoints())
        self._done += 1

    def close(self, used: int, checkpoints: int) -> Recording:
        """The end of the run."""
        self._sample(used, checkpoints)
        return self.recording

    def _sample(self, used: int, checkpoints: int) -> None:
        counters, done, requests = self.recording.counters, self._done, len(self._tokens)
        kept = sum(counters.taken.values()) - sum(counters.evicted.values())
        time = self._times[min(done, requests - 1)]
        self.recording.memory.append(Memory(done, time, used, min(used, checkpoints), kept))
        if self._progress:
            self._progress(done, requests)
