"""The block tables of the vLLM preset: which pages a request holds, what can be found, what a request needs.

Under them lies a pool of pages that are found by hash, with the free list of vLLM's block pool: a page that nobody
holds keeps what it has until somebody takes it, so the free list is the cache. It is taken from the front. A page with
a key goes to its end when it is freed. A page without one can never be hit: it goes to the front, or also to the end
(`blank_first=False`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import cast

from headway.replay.run.ledger import Ledger, StateMark

__all__ = ["Page", "PagePool", "PageSizes", "PagedCache", "PagedRequest"]

_ENDLESS = 1 << 40
_ATTENTION = -1


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


@dataclass(frozen=True)
class PageSizes:
    """The pages of one rank.

    Attributes:
        block_tokens: Tokens between two places where a hit can end.
        spans: Of these, how many one page of attention covers.
        page_bytes: Bytes of a page.
        state_groups: Pages of a state; 0: the model has no states.
        count: Pages; 0: no limit.
    """

    block_tokens: int
    spans: int
    page_bytes: int
    state_groups: int
    count: int


@dataclass(eq=False)
class PagedRequest:
    """A request that runs, or would.

    Attributes:
        request: Its number.
        prompt: Tokens of the prompt.
        known: Tokens that are known: the prompt and what has been answered.
        total: Tokens when it ends.
        keys: Key at each block boundary.
        done: Tokens computed.
        hit: Tokens reused.
        junction: Where attention alone would have resumed, or 0.
        attention: Pages of attention, in order.
        state: Block boundary (number of blocks) of the running state, and its pages.
        old_state: The same of the state before it.
        named: Blocks that can be found already.
    """

    request: int
    prompt: int
    known: int
    total: int
    keys: list[int]
    done: int = 0
    hit: int = 0
    junction: int = 0
    attention: list[Page] = field(default_factory=list)
    state: tuple[int, list[Page]] = (0, [])
    old_state: tuple[int, list[Page]] = (0, [])
    named: int = 0


class PagedCache:
    """Pages of attention are found by (_ATTENTION, key), those of states by (group, key)."""

    def __init__(self, sizes: PageSizes, *, dense: bool, ledger: Ledger) -> None:
        """An empty cache that keeps every state at a block boundary, or (`dense` is False) the telling ones."""
        self._block, self._spans, self._groups = sizes.block_tokens, sizes.spans, sizes.state_groups
        self._page_bytes, self._dense, self._ledger = sizes.page_bytes, dense, ledger
        self._pool = PagePool(sizes.count or _ENDLESS, self._evicted, blank_first=not dense)
        self._marks: dict[int, StateMark] = {}
        self._this_step: set[int] = set()
        self._kept: set[int] = set()
        self._computed: set[int] = set()
        self._something_went = False

    def new_step(self) -> None:
        """States that were planned before can be used from now on."""
        self._this_step.clear()

    def could_hold(self, sequence: PagedRequest) -> bool:
        """Whether the empty pool could hold it to its end, with the state that it found, its last and its next one."""
        return self._attention_pages(sequence.total) + 1 + 3 * self._groups <= self._pool.count

    def look_up(self, sequence: PagedRequest) -> None:
        """Find where it resumes; takes nothing."""
        most, spans, keys, find = (sequence.known - 1) // self._block, self._spans, sequence.keys, self._pool.find
        known = 0
        while known + spans <= most and find((_ATTENTION, keys[known + spans - 1])):
            known += spans
        inner = range(min(known + spans - 1, most), known, -1)
        known = next((n for n in inner if find((_ATTENTION, keys[n - 1]))), known)
        hit = known
        while hit and not all(find((group, keys[hit - 1])) for group in range(self._groups)):
            hit -= 1
        sequence.hit = sequence.done = hit * self._block
        sequence.junction = known * self._block if known > hit else 0

    def enter(self, sequence: PagedRequest, end: int) -> bool:
        """Hold what was found and take pages up to `end`. Returns False, and changes nothing, if it must wait."""
        hit, pool = sequence.hit // self._block, self._pool
        if hit and sequence.keys[hit - 1] in self._this_step:
            return False
        shared = [pool.find((_ATTENTION, sequence.keys[n - 1])) for n in range(self._spans, hit + 1, self._spans)]
        inside = self._found_inside(sequence, hit)
        state = [pool.find((group, sequence.keys[hit - 1])) for group in range(self._groups)] if hit else []
        held = [page for page in (*shared, *state, inside) if page is not None]
        need = self._attention_pages(sequence.known) - len(shared) + self._groups * self._states_ahead(sequence, hit)
        if need + sum(page.holders == 0 for page in held) > pool.free:
            return False
        for page in held:
            pool.hold(page)
        if inside is not None:
            pool.release(inside)  # it was copied, and is young again
        sequence.attention = [page for page in shared if page is not None]
        sequence.state = (hit, [page for page in state if page is not None])
        sequence.named = hit
        if hit and self._groups:
            self._ledger.resume(self._marks[sequence.keys[hit - 1]])
        return self.extend(sequence, end)

    def extend(self, sequence: PagedRequest, end: int) -> bool:
        """Take the pages for tokens up to `end`, and name what will be whole. Returns False if there are too few."""
        blocks, pages = -(-end // self._block), self._attention_pages(end)
        new_state = self._groups > 0 and blocks > sequence.state[0]
        if pages - len(sequence.attention) + new_state * self._groups > self._pool.free:
            return False
        while len(sequence.attention) < pages:
            sequence.attention.append(self._pool.take())
        if new_state:
            sequence.old_state = sequence.state
            sequence.state = (blocks, [self._pool.take() for _ in range(self._groups)])
        self._name(sequence, end)
        return True

    def drop_old_state(self, sequence: PagedRequest) -> None:
        """Free the state before the running one."""
        boundary, pages = sequence.old_state
        if boundary < -(-sequence.done // self._block):
            for page in pages:
                self._pool.release(page)
            sequence.old_state = (0, [])

    def computed(self, sequence: PagedRequest, count: int) -> None:
        """`count` more tokens are computed."""
        before, sequence.done = sequence.done // self._block, sequence.done + count
        self._computed.update(sequence.keys[before : sequence.done // self._block])

    def free(self, sequence: PagedRequest) -> None:
        """Free all that it holds, last block first."""
        for page in reversed(sequence.attention):
            self._pool.release(page)
        for page in (*sequence.state[1], *sequence.old_state[1]):
            self._pool.release(page)
        sequence.attention, sequence.state, sequence.old_state = [], (0, []), (0, [])

    def history(self, sequence: PagedRequest, match: int) -> tuple[int, int]:
        """What was there before: of the first `match` tokens of a prompt.

        Returns:
            Tokens up to the deepest place where a state was kept that may have gone since, and tokens that somebody has
            computed.
        """
        keys = sequence.keys[: match // self._block]
        done = next((n for n, key in enumerate(keys) if key not in self._computed), len(keys))
        kept_in = self._kept if self._groups else self._computed
        kept = next((n for n in range(done, 0, -1) if keys[n - 1] in kept_in), 0) if self._something_went else 0
        under_way = done < len(keys)
        return kept * self._block, done * self._block if under_way else match

    def bytes(self) -> tuple[int, int]:
        """Bytes used, and of these bytes of states that can be hit, on one rank."""
        return self._pool.used * self._page_bytes, len(self._marks) * self._groups * self._page_bytes

    # ---- pages

    def _attention_pages(self, tokens: int) -> int:
        return -(-tokens // (self._block * self._spans))

    def _states_ahead(self, sequence: PagedRequest, hit: int) -> int:
        """States that a request holds at once besides the one that it found."""
        return 1 + (sequence.known // self._block - hit > 1)

    def _found_inside(self, sequence: PagedRequest, hit: int) -> Page | None:
        """The page in which a hit ends, if it ends inside one."""
        if hit % self._spans == 0:
            return None
        whole = (hit // self._spans + 1) * self._spans
        for place in (whole, *range(whole - 1, hit - 1, -1)):
            if place <= len(sequence.keys) and (page := self._pool.find((_ATTENTION, sequence.keys[place - 1]))):
                return page
        return None

    def _name(self, sequence: PagedRequest, end: int) -> None:
        """Attention blocks that `end` completes, the last boundary of the prompt, and the state, if it is kept."""
        full, spans, keys = end // self._block, self._spans, sequence.keys
        for block in range((sequence.named // spans + 1) * spans, full + 1, spans):
            self._pool.name(sequence.attention[block // spans - 1], (_ATTENTION, keys[block - 1]))
        last = sequence.prompt // self._block
        if spans > 1 and sequence.named < last <= full and last % spans and full // spans == last // spans:
            self._pool.name(sequence.attention[last // spans], (_ATTENTION, keys[last - 1]))
        if self._groups and full * self._block == end and full > sequence.named:
            self._name_state(sequence, full)
        sequence.named = max(sequence.named, full)

    def _name_state(self, sequence: PagedRequest, block: int) -> None:
        last = (sequence.prompt - 1) // self._block
        kinds = {last: "prompt_end", sequence.junction // self._block: "junction"}
        if not self._dense and block not in kinds:
            return
        key = sequence.keys[block - 1]
        for group, page in enumerate(sequence.state[1]):
            self._pool.name(page, (group, key))
        self._this_step.add(key)
        self._kept.add(key)
        if key not in self._marks:
            self._marks[key] = self._ledger.take(kinds.get(block, "chunk_end"))

    def _evicted(self, name: Hashable) -> None:
        self._something_went = True
        group, key = cast("tuple[int, int]", name)
        if group != _ATTENTION and key in self._marks:
            self._ledger.evict(self._marks.pop(key))
