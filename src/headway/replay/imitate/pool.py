"""A pool of pages that are found by hash, with the free list of vLLM's block pool.

A page that nobody holds keeps what it has until somebody takes it, so the free list is the cache. It is taken from the
front. A page with a key goes to its end when it is freed. A page without one can never be hit: it goes to the front, or
also to the end (`blank_first=False`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

__all__ = ["Page", "PagePool"]


class Page:
    """A page.

    Attributes:
        key: What it is found by, or None.
        holders: Requests that hold it.
    """

    __slots__ = ("holders", "key")

    def __init__(self) -> None:
        self.key: Hashable = None
        self.holders = 1


class PagePool:
    """Pages, held or free. Several pages may have the same key: requests that ran side by side computed it twice."""

    def __init__(self, count: int, evicted: Callable[[Hashable], None], *, blank_first: bool = True) -> None:
        """Make `count` free pages without keys. `evicted` is told of every key whose last page is taken."""
        self.count = count
        self._unused = count
        self._blank_first = blank_first
        self._evicted = evicted
        self._blank: list[Page] = []
        self._free: OrderedDict[Page, None] = OrderedDict()
        self._found: dict[Hashable, list[Page]] = {}

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return self._unused + len(self._blank) + len(self._free)

    @property
    def used(self) -> int:
        """Pages that hold something: held by a request, or found by a key."""
        return self.count - self._unused - len(self._blank)

    def find(self, key: Hashable) -> Page | None:
        """A page with that key."""
        pages = self._found.get(key)
        return pages[0] if pages else None

    def take(self) -> Page:
        """Take the first free page; there must be one. What it held is gone."""
        if self._blank:
            page = self._blank.pop()
        elif self._unused:
            self._unused -= 1
            return Page()
        else:
            page, _ = self._free.popitem(last=False)
            self._forget(page)
        page.holders = 1
        return page

    def hold(self, page: Page) -> None:
        """One more request holds a page that was found."""
        if page.holders == 0:
            del self._free[page]
        page.holders += 1

    def release(self, page: Page) -> None:
        """One request holds it no more."""
        page.holders -= 1
        if page.holders:
            return
        if page.key is None and self._blank_first:
            self._blank.append(page)
        else:
            self._free[page] = None

    def name(self, page: Page, key: Hashable) -> None:
        """What the page holds can be found from now on. A page has one key: an earlier one is forgotten."""
        self._forget(page)
        page.key = key
        self._found.setdefault(key, []).append(page)

    def _forget(self, page: Page) -> None:
        if page.key is None:
            return
        pages = self._found[page.key]
        pages.remove(page)
        if not pages:
            del self._found[page.key]
            self._evicted(page.key)
        page.key = None
