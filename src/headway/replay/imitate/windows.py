"""The pages of sliding windows in the vLLM preset: held while a request sees them, found where a tail of them is whole.

A request holds the pages that its window covers, and those of the tokens that its step computes. What the window has
left is freed before the next step takes pages. To resume, all pages that the window covers must be found. With "latest"
retention the tails can be found that end at the last boundary of the prompt and at the junction; with "dense" retention
every whole page.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from headway.replay.imitate.pool import Page, PagePool

__all__ = ["WindowPages", "WindowRow", "WindowTable"]


@dataclass(frozen=True)
class WindowPages:
    """The pages of windows of one reach.

    Attributes:
        reach: Tokens that a query sees, itself included.
        groups: Groups of layers: pages that a stretch of tokens takes.
        spans: Blocks that a page covers.
    """

    reach: int
    groups: int
    spans: int


@dataclass(eq=False)
class WindowRow:
    """What one request holds: one list of pages, a page for each group, from page `first` on."""

    first: int = 0
    pages: deque[list[Page]] = field(default_factory=deque)

    @property
    def stop(self) -> int:
        """The page behind the last one."""
        return self.first + len(self.pages)


class WindowTable:
    """Windows of one reach. Their pages are found by (number of the group, key)."""

    def __init__(self, pool: PagePool, sizes: WindowPages, first_group: int, block: int, step_tokens: int) -> None:
        """Take pages of `pool`; blocks have `block` tokens, steps `step_tokens`."""
        self._pool, self._reach, self._spans = pool, sizes.reach, sizes.spans
        self._groups = range(first_group, first_group + sizes.groups)
        self._tokens = sizes.spans * block
        self._most = -(-(sizes.reach - 1 + step_tokens) // self._tokens) + 1
        self.tail = -(-(sizes.reach - 1) // self._tokens)
        """Pages that must be found to resume behind them."""

    def longest(self, keys: Sequence[int], most: int, align: int) -> int:
        """The deepest block, at most `most` and a multiple of `align`, at which the window is found."""
        run = 0
        for page in range(most // self._spans, 0, -1):
            if not run and page * self._spans % align:
                continue
            if self._found(keys, page) is None:
                run = 0
                continue
            run += 1
            if run >= self.tail:
                return (page - 1 + run) * self._spans
        return run * self._spans // align * align

    def needed(self, row: WindowRow, start: int, end: int, *, admitting: bool = False) -> int:
        """Pages to take so that tokens up to `end` have theirs, where `start` tokens are done."""
        pages = -(-end // self._tokens)
        if admitting:
            pages = min(pages, self._most)
        return max(0, pages - max(row.stop, self._skipped(start))) * len(self._groups)

    def most(self, tokens: int) -> int:
        """Pages that a request of so many tokens holds at once, at most."""
        return min(-(-tokens // self._tokens), self._most) * len(self._groups)

    def resumed(self, keys: Sequence[int], hit: int) -> WindowRow:
        """The row of a request that resumes behind `hit` blocks; its pages are found and not yet held."""
        stop = hit // self._spans
        first = min(self._skipped(hit * self._tokens // self._spans), stop)
        found = (self._found(keys, page) for page in range(first + 1, stop + 1))
        return WindowRow(first, deque(pages for pages in found if pages is not None))

    def drop(self, row: WindowRow, done: int) -> None:
        """Free the pages that the window has left, where `done` tokens are computed."""
        first = min(self._skipped(done), row.stop)
        left = [row.pages.popleft() for _ in range(row.first, first)]
        row.first = first
        for page in (page for pages in reversed(left) for page in pages):
            self._pool.release(page)

    def take(self, row: WindowRow, end: int) -> None:
        """Take the pages for tokens up to `end`."""
        while row.stop < -(-end // self._tokens):
            row.pages.append([self._pool.take() for _ in self._groups])

    def name(self, row: WindowRow, keys: Sequence[int], pages: Iterable[int]) -> None:
        """Of the pages behind page numbers `pages` (1 is the first), those that are held can be found."""
        for page in pages:
            if row.first < page <= row.stop:
                for group, held in zip(self._groups, row.pages[page - 1 - row.first], strict=True):
                    self._pool.name(held, (group, keys[page * self._spans - 1]))

    def tail_pages(self, boundary: int, before: int, full: int) -> range:
        """Pages of the tail that ends at block `boundary`, of those that lie in blocks (before, full]."""
        stop = boundary // self._spans
        return range(max(stop - self.tail, before // self._spans) + 1, min(stop, full // self._spans) + 1)

    def whole_pages(self, before: int, full: int) -> range:
        """Pages that end in blocks (before, full]."""
        return range(before // self._spans + 1, full // self._spans + 1)

    def free(self, row: WindowRow) -> None:
        """Free all that a request holds, last page first."""
        for page in (page for pages in reversed(row.pages) for page in pages):
            self._pool.release(page)
        row.pages.clear()

    def _skipped(self, done: int) -> int:
        """Pages that a request with `done` tokens computed sees no more."""
        return max(0, done - self._reach + 1) // self._tokens

    def _found(self, keys: Sequence[int], page: int) -> list[Page] | None:
        key, found = keys[page * self._spans - 1], []
        for group in self._groups:
            held = self._pool.find((group, key))
            if held is None:
                return None
            found.append(held)
        return found
