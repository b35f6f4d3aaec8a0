"""The block tables of the vLLM preset: which pages a request holds, what can be found, what a request needs."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import cast

from headway.replay.imitate.pool import Page, PagePool
from headway.replay.imitate.windows import WindowPages, WindowRow, WindowTable
from headway.replay.run.ledger import Ledger, StateMark

__all__ = ["PageSizes", "PagedCache", "PagedRequest"]

_ENDLESS = 1 << 40
_ATTENTION = -1


@dataclass(frozen=True)
class PageSizes:
    """The pages of one rank.

    Attributes:
        block_tokens: Tokens between two places that have a key.
        spans: Blocks of so many tokens that one page of attention covers.
        page_bytes: Bytes of a page.
        state_groups: Pages of a state; 0: the model has no states.
        count: Pages; 0: no limit.
        windows: Pages of sliding windows. A model has windows or states.
        align: Hits end at multiples of so many blocks.
        grain: States are kept at multiples of so many blocks.
        named_by: Times its own size of blocks under which a state is kept; it is looked for under its own size.
    """

    block_tokens: int
    spans: int
    page_bytes: int
    state_groups: int
    count: int
    windows: tuple[WindowPages, ...] = ()
    align: int = 1
    grain: int = 1
    named_by: int = 1


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
        windows: Pages of its windows.
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
    windows: list[WindowRow] = field(default_factory=list)


class PagedCache:
    """Pages are found by (_ATTENTION, key), those of windows by (group, key), of states by (group, key, named_by)."""

    def __init__(self, sizes: PageSizes, *, dense: bool, ledger: Ledger, step_tokens: int = 8192) -> None:
        """An empty cache that keeps every state at a block boundary, or (`dense` is False) the telling ones."""
        self._block, self._spans, self._groups = sizes.block_tokens, sizes.spans, sizes.state_groups
        self._align, self._grain, self._named_by = sizes.align, sizes.grain, sizes.named_by
        self._page_bytes, self._dense, self._ledger = sizes.page_bytes, dense, ledger
        self._pool = PagePool(sizes.count or _ENDLESS, self._evicted, blank_first=not dense)
        self._windows: list[WindowTable] = []
        first = self._groups
        for window in sizes.windows:
            self._windows.append(WindowTable(self._pool, window, first, self._block, step_tokens))
            first += window.groups
        self._telling = bool(self._groups or self._windows)
        """Whether some places can be resumed at, and others cannot."""
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
        return self._pages(sequence) <= self._pool.count

    def bytes_for(self, sequence: PagedRequest) -> int:
        """Memory of a pool that could hold it, the null block included."""
        return (self._pages(sequence) + 1) * self._page_bytes

    def _pages(self, sequence: PagedRequest) -> int:
        windows = sum(table.most(sequence.total) for table in self._windows)
        return self._attention_pages(sequence.total) + 1 + 3 * self._groups + windows

    def look_up(self, sequence: PagedRequest) -> None:
        """Find where it resumes; takes nothing."""
        most, spans, keys, find = (sequence.known - 1) // self._block, self._spans, sequence.keys, self._pool.find
        known = 0
        while known + spans <= most and find((_ATTENTION, keys[known + spans - 1])):
            known += spans
        inner = range(min(known + spans - 1, most), known, -1) if self._align == 1 else ()
        known = next((n for n in inner if find((_ATTENTION, keys[n - 1]))), known)
        hit = known // self._align * self._align
        while hit and not all(find((group, keys[hit - 1], 1)) for group in range(self._groups)):
            hit -= 1
        hit = self._windows_found(keys, hit)
        sequence.hit = sequence.done = hit * self._block
        sequence.junction = known * self._block if known > hit else 0

    def enter(self, sequence: PagedRequest, end: int) -> bool:
        """Hold what was found and take pages up to `end`. Returns False, and changes nothing, if it must wait."""
        hit, pool = sequence.hit // self._block, self._pool
        if hit and sequence.keys[hit - 1] in self._this_step:
            return False
        shared = [pool.find((_ATTENTION, sequence.keys[n - 1])) for n in range(self._spans, hit + 1, self._spans)]
        inside = self._found_inside(sequence, hit)
        state = [pool.find((group, sequence.keys[hit - 1], 1)) for group in range(self._groups)] if hit else []
        rows = [table.resumed(sequence.keys, hit) for table in self._windows]
        in_windows = [page for row in rows for pages in row.pages for page in pages]
        held = [page for page in (*shared, *state, inside, *in_windows) if page is not None]
        need = self._attention_pages(sequence.known) - len(shared) + self._groups * self._states_ahead(sequence, hit)
        for table, row in zip(self._windows, rows, strict=True):
            done = hit * self._block
            need += max(table.needed(row, done, sequence.known, admitting=True), table.needed(row, done, end))
        if need + sum(page.holders == 0 for page in held) > pool.free:
            return False
        for page in held:
            pool.hold(page)
        if inside is not None:
            pool.release(inside)  # it was copied, and is young again
        sequence.attention = [page for page in shared if page is not None]
        sequence.state = (hit, [page for page in state if page is not None])
        sequence.windows, sequence.named = rows, hit
        if hit and (mark := self._marks.get(sequence.keys[hit - 1])) is not None:
            self._ledger.resume(mark)
        return self.extend(sequence, end)

    def extend(self, sequence: PagedRequest, end: int) -> bool:
        """Take the pages for tokens up to `end`, and name what will be whole. Returns False if there are too few."""
        blocks, pages = -(-end // self._block), self._attention_pages(end)
        new_state = self._groups > 0 and blocks > sequence.state[0]
        windows = list(zip(self._windows, sequence.windows, strict=True))
        for table, row in windows:
            table.drop(row, sequence.done)
        need = pages - len(sequence.attention) + new_state * self._groups
        if need + sum(table.needed(row, sequence.done, end) for table, row in windows) > self._pool.free:
            return False
        while len(sequence.attention) < pages:
            sequence.attention.append(self._pool.take())
        if new_state:
            sequence.old_state = sequence.state
            sequence.state = (blocks, [self._pool.take() for _ in range(self._groups)])
        for table, row in windows:
            table.take(row, end)
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
        for table, row in zip(self._windows, sequence.windows, strict=True):
            table.free(row)
        sequence.attention, sequence.state, sequence.old_state = [], (0, []), (0, [])

    def history(self, sequence: PagedRequest, match: int) -> tuple[int, int]:
        """What was there before: of the first `match` tokens of a prompt.

        Returns:
            Tokens up to the deepest place where a state was kept that may have gone since, and tokens that somebody has
            computed.
        """
        keys = sequence.keys[: match // self._block]
        done = next((n for n, key in enumerate(keys) if key not in self._computed), len(keys))
        kept_in = self._kept if self._telling else self._computed
        kept = next((n for n in range(done, 0, -1) if keys[n - 1] in kept_in), 0) if self._something_went else 0
        under_way = done < len(keys)
        return kept * self._block, done * self._block if under_way else match

    def bytes(self) -> tuple[int, int]:
        """Bytes used, and of these bytes of states that can be hit, on one rank."""
        each = self._groups + sum(table.most(table.tail * self._block) for table in self._windows)
        return self._pool.used * self._page_bytes, len(self._marks) * each * self._page_bytes

    # ---- pages

    def _windows_found(self, keys: list[int], most: int) -> int:
        """The deepest block, at most `most`, at which every window is found."""
        hit = most
        while self._windows:
            for table in self._windows:
                hit = table.longest(keys, hit, self._align)
            if hit == most:
                break
            most = hit
        return hit

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
        if self._windows and full > sequence.named:
            self._name_windows(sequence, full)
        sequence.named = max(sequence.named, full)

    def _name_state(self, sequence: PagedRequest, block: int) -> None:
        telling = {"prompt_end": sequence.prompt - 1, "junction": sequence.junction}
        grain = self._grain
        kinds = {tokens // self._block // grain * grain: kind for kind, tokens in telling.items()}
        if not self._dense and block not in kinds:
            return
        key = sequence.keys[block - 1]
        for group, page in enumerate(sequence.state[1]):
            self._pool.name(page, (group, key, self._named_by))
        self._this_step.add(key)
        self._mark(key, kinds.get(block, "chunk_end"))

    def _name_windows(self, sequence: PagedRequest, full: int) -> None:
        """The tails that end at telling places, or all whole pages; of blocks behind those that were named before."""
        before, last = sequence.named, (sequence.prompt - 1) // self._block
        kinds = {last: "prompt_end", sequence.junction // self._block: "junction"}
        places = {block // self._align * self._align: kind for block, kind in kinds.items()}
        for table, row in zip(self._windows, sequence.windows, strict=True):
            if self._dense:
                table.name(row, sequence.keys, table.whole_pages(before, full))
            else:
                for place in places:
                    table.name(row, sequence.keys, table.tail_pages(place, before, full))
        for place, kind in places.items():
            if before < place <= full:
                self._mark(sequence.keys[place - 1], kind)

    def _mark(self, key: int, kind: str) -> None:
        """One can resume here from now on."""
        self._kept.add(key)
        if key not in self._marks:
            self._marks[key] = self._ledger.take(kind)

    def _evicted(self, name: Hashable) -> None:
        self._something_went = True
        group, key, *_ = cast("tuple[int, ...]", name)
        if group != _ATTENTION and key in self._marks:
            self._ledger.evict(self._marks.pop(key))
