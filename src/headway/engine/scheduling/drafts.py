"""How many tokens each answering request drafts in the next step.

The budget is that of DSpark, for any drafter: the most tokens per second that can be expected, from what drafts of
*earlier* steps say about each request (`RunningRequest.survival`), never from the draft at hand, which would bend the
distribution of sampled answers. Two things are this engine's own:

- Rows that compute equally many tokens run as one forward, others apart (`headway.runtime.forward.plan`). So what is
  chosen is one *width* for all rows, pending tokens and draft together, and not a length for each request by itself,
  which would turn one forward into many.
- A recurrent state with a rejected token in it is dropped, and accepted tokens stay pending (see
  `headway.runtime.drafting.speculator`). A row with m pending tokens in a step of width w drafts w - m, so pending
  tokens never exceed the largest width: a row that has as many drafts nothing, and is up to date after that step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.engine.request import RunningRequest

__all__ = ["DraftPlanner", "StepCosts"]

Int64s = NDArray[np.int64]
Floats = NDArray[np.float32]

_MEMORY = 0.8
"""Share of the old estimate in a new one, for drafters without an opinion of their own."""
_FADING = 0.98
"""What is left after each draft of what earlier drafts say about the drafter's opinion of itself."""
_HOPE = 0.05
"""How fast an estimate returns to 1 while nothing is drafted, so that drafting is tried again."""


@dataclass(frozen=True)
class StepCosts:
    """What forwards and drafts take, measured at start.

    Attributes:
        rows: int64 [r], numbers of rows measured, ascending.
        counts: int64 [c], numbers of tokens per row measured, ascending.
        seconds: float [r, c], of one forward.
        draft: float [r], seconds of one draft for so many rows.
    """

    rows: Int64s
    counts: Int64s
    seconds: NDArray[np.float64]
    draft: NDArray[np.float64]

    def forward(self, rows: int, count: int) -> float:
        """Seconds of one forward, between and beyond what was measured by straight lines."""
        each = [_line(self.counts, line, count) for line in self.seconds]
        return _line(self.rows, np.array(each), rows)

    def drafting(self, rows: int) -> float:
        """Seconds of one draft."""
        return _line(self.rows, self.draft, rows)


class DraftPlanner:
    """Chooses drafts for a batch.

    Args:
        name: What the drafter is called.
        most: Most tokens of one draft.
        costs: What a step takes; None drafts as much as the width allows.

    Attributes:
        widest: Most tokens of a row, pending and drafted.
        costs: As given; may be changed between steps.
    """

    def __init__(self, name: str, most: int, costs: StepCosts | None = None) -> None:
        self.name = name
        self.most = most
        self.widest = 2 * most + 1
        self.costs = costs
        self._expected, self._found = 1.0, 1.0

    def answering(self, request: RunningRequest) -> bool:
        """Whether a request has nothing to compute but pending tokens of its answer."""
        return request.observed == request.known - 1 and request.pending <= self.widest

    def plan(self, requests: Sequence[RunningRequest], budget: int) -> list[int]:
        """How many tokens each of some decoding requests computes in the next step: pending ones, and a draft.

        Args:
            requests: The requests; only those that are `answering` draft, not the last token of a cut prompt.
            budget: Most tokens of all of them; drafts give way to it, pending tokens do not.
        """
        if not requests:
            return []
        pending = np.array([request.pending for request in requests], dtype=np.int64)
        room = np.array([self._room(request) for request in requests], dtype=np.int64)
        survival = np.stack([np.pad(request.survival, (0, self.most))[: self.most] for request in requests])
        widths = [w for w in range(1, self.widest + 1) if (pending + _drafts(w, pending, room)).sum() <= budget]
        expected = survival.cumsum(axis=1) * np.float32(self._found / self._expected)
        best = self._best(widths, pending, room, expected) if self.costs else max(widths, default=1)
        drafts = _drafts(best, pending, room)
        for request, count, could in zip(requests, drafts.tolist(), room.tolist(), strict=True):
            if could and not count:
                request.survival = request.survival + _HOPE * (1 - request.survival)
                self._fade(0.0, 0.0)
        return [int(count) for count in pending + drafts]

    def _room(self, request: RunningRequest) -> int:
        """Tokens that a request may draft: one more is answered than accepted, and an ended answer drafts nothing."""
        if request.draining or not self.answering(request):
            return 0
        return min(self.most, max(0, len(request.tokens) - request.known - 1))

    def _best(self, widths: Sequence[int], pending: Int64s, room: Int64s, expected: Floats) -> int:
        """The width of the most tokens per second; the narrowest of equals."""
        rates = {w: self._rate(pending, _drafts(w, pending, room), expected) for w in widths}
        return max(rates, key=lambda width: (rates[width], -width), default=1)

    def _rate(self, pending: Int64s, drafts: Int64s, expected: Floats) -> float:
        assert self.costs is not None
        accepted = np.where(drafts > 0, expected[np.arange(len(drafts)), drafts - 1], 0.0).sum()
        counts, rows = np.unique(pending + drafts, return_counts=True)
        seconds = sum(self.costs.forward(r, c) for r, c in zip(rows.tolist(), counts.tolist(), strict=True))
        drafting = int((drafts > 0).sum())
        return float((len(drafts) + accepted) / (seconds + (self.costs.drafting(drafting) if drafting else 0.0)))

    def new_estimate(self) -> Floats:
        """What is expected of the drafts of a new request: that all are accepted."""
        return np.ones(self.most, dtype=np.float32)

    def _fade(self, expected: float, found: float) -> None:
        """Compare what was expected of a draft with what was found.

        A confidence head was trained on drawn drafts; of greedy answers, or by `match`, other shares are accepted. So
        expectations are scaled by how they came true lately, for all requests together; 1 in the beginning.
        """
        self._expected = 1 + _FADING * (self._expected - 1) + expected
        self._found = 1 + _FADING * (self._found - 1) + found

    def learn(self, request: RunningRequest, proposed: int, accepted: int, confidence: Floats | None) -> None:
        """Take what a step says about a request's next drafts.

        Args:
            request: The request.
            proposed: Tokens that were drafted for it, at least 1.
            accepted: How many of them count.
            confidence: The drafter's own opinion of each place (see `RowAnswer`), or None.
        """
        self._fade(float(request.survival[:proposed].sum()), float(accepted))
        if confidence is not None:
            request.survival = np.cumprod(confidence[: self.most], dtype=np.float32)
            return
        seen = (np.arange(proposed) < accepted).astype(np.float32)
        survival = request.survival.copy()
        survival[:proposed] = _MEMORY * survival[:proposed] + (1 - _MEMORY) * seen
        request.survival = np.minimum.accumulate(survival)


def _drafts(width: int, pending: Int64s, room: Int64s) -> Int64s:
    return np.clip(width - pending, 0, room)


def _line(places: Int64s, values: NDArray[np.float64], at: int) -> float:
    """The value at `at` on the line through the measured places around it, or through the last two beyond them."""
    if len(places) == 1:
        return float(values[0] * at / places[0])
    i = int(np.clip(np.searchsorted(places, at), 1, len(places) - 1))
    share = (at - places[i - 1]) / (places[i] - places[i - 1])
    return float(values[i - 1] + share * (values[i] - values[i - 1]))
