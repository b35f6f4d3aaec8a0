"""The changes that `tools/mutants.py` makes to `src/headway/cache/`, one at a time, and what must notice each."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["MUTATIONS", "Mutation"]


class Mutation(NamedTuple):
    """One change.

    Attributes:
        name: Says what is wrong then.
        file: Under `src/headway/cache/`.
        old: Text that occurs there once.
        new: What stands there instead.
        tests: What pytest is to run.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MACHINE = "tests/model/test_machine.py::test_cache_beside_oracle_and_device[0]"
ADMISSION, EVENTS, EXHAUSTION = (f"tests/cache/test_{part}.py" for part in ("admission", "events", "exhaustion"))
EXPLAIN, GEOMETRY, LIFE, MEMORY = (f"tests/cache/test_{part}.py" for part in ("explain", "geometry", "life", "memory"))
DISPLACED = "tests/cache/test_displaced.py"
MISUSE, PLACEMENT, POOL, REUSE = (f"tests/cache/test_{part}.py" for part in ("misuse", "placement", "pool", "reuse"))
QUEUE, TREE, WISHES = (f"tests/cache/test_{part}.py" for part in ("eviction_queue", "tree", "wishes"))
FORGET, LOOKING, OWN, TWO, WINDOWS = (
    f"tests/cache/test_{part}.py" for part in ("forget", "looking_in", "own_blocks", "steps_in_flight", "windows")
)

_TREE = (
    Mutation(
        "split: a pin stays with the lower half",
        "index/tree.py",
        "(*upper.checkpoints, *upper.pins, *upper.anchors)",
        "(*upper.checkpoints, *upper.anchors)",
        (WISHES, MACHINE),
    ),
    Mutation(
        "split: the upper half forgets its pins",
        "index/tree.py",
        "upper.pins, edge.pins = _divide(edge.pins, position)",
        "upper.pins, edge.pins = _divide(edge.pins, position - 1)",
        (WISHES, MACHINE),
    ),
    Mutation(
        "split: the upper half forgets lost checkpoints",
        "index/tree.py",
        "for at in list(edge.lost) if at <= position}",
        "for at in list(edge.lost) if at <= position and not edge.lost.pop(at)}",
        (TREE, EXPLAIN, MACHINE),
    ),
    Mutation(
        "split: the lower half forgets lost checkpoints",
        "index/tree.py",
        "for at in list(edge.lost) if at <= position}",
        "for at in list(edge.lost) if edge.lost[at].position <= position or not edge.lost.pop(at)}",
        (TREE, EXPLAIN, MACHINE),
    ),
    Mutation(
        "split: the upper half counts as never computed",
        "index/tree.py",
        "upper.computed, edge.computed = min(edge.computed, position), max(edge.computed, position)",
        "upper.computed, edge.computed = upper.start, max(edge.computed, position)",
        (TREE, MACHINE),
    ),
    Mutation(
        "split: the lower half counts as computed",
        "index/tree.py",
        "upper.computed, edge.computed = min(edge.computed, position), max(edge.computed, position)",
        "upper.computed, edge.computed = min(edge.computed, position), edge.end",
        (TREE, MACHINE),
    ),
    Mutation(
        "split: the upper half forgets when it was trimmed",
        "index/tree.py",
        "upper.trim = edge.trim if upper.computed > upper.resident else None",
        "upper.trim = None",
        (TREE, EXPLAIN, MACHINE),
    ),
    Mutation(
        "split: the lower half forgets when it was trimmed",
        "index/tree.py",
        "        edge.trim = edge.trim if edge.computed > edge.resident else None",
        "        edge.trim = None",
        (TREE, EXPLAIN, MACHINE),
    ),
    Mutation(
        "split: the upper half forgets its uses",
        "index/tree.py",
        "over.hits, over.missed, over.used, over.age = under.hits, under.missed, under.used, under.age",
        "over.used, over.age = under.used, under.age",
        (TREE,),
    ),
    Mutation(
        "split: the upper half forgets when it was used",
        "index/tree.py",
        "over.hits, over.missed, over.used, over.age = under.hits, under.missed, under.used, under.age",
        "over.hits, over.missed = under.hits, under.missed",
        (TREE,),
    ),
    Mutation(
        "split: a lease stays with the lower half",
        "index/tree.py",
        "(*upper.checkpoints, *upper.pins, *upper.anchors)",
        "(*upper.checkpoints, *upper.pins)",
        (MACHINE,),
    ),
    Mutation(
        "split: the lower half counts leases of the upper",
        "index/tree.py",
        "edge.busy -= len(upper.anchors)",
        "edge.busy -= 0",
        (MACHINE,),
    ),
    Mutation(
        "split: checkpoints stay with the lower half",
        "index/tree.py",
        "(*upper.checkpoints, *upper.pins, *upper.anchors)",
        "(*upper.pins, *upper.anchors)",
        (MACHINE,),
    ),
    Mutation(
        "split: the shared block has one holder",
        "index/tree.py",
        "self._pool.share_one(run[0])",
        "self._pool.share_one(run[0]) if False else None",
        (LIFE, MACHINE),
    ),
    Mutation(
        "cut: what went counts as computed",
        "index/tree.py",
        "edge.computed = min(edge.computed, keep)",
        "edge.computed = edge.computed",
        (TREE, EXPLAIN, MACHINE),
    ),
    Mutation(
        "cut: lost checkpoints of other tokens stay",
        "index/tree.py",
        "for at, lost in edge.lost.items() if at <= keep}",
        "for at, lost in edge.lost.items()}",
        (TREE, EXPLAIN, MACHINE),
    ),
    Mutation(
        "enter: every turn of a conversation is an edge",
        "index/tree.py",
        "if edge.parent is not None and not edge.children:",
        "if edge.parent is not None and not edge.children and not edge.resident:",
        (TREE,),
    ),
    Mutation(
        "follow: lookahead is not asked for inside an edge",
        "index/tree.py",
        "position += _common(child.text, 0, data, offset) - self.lookahead",
        "position += _common(child.text, 0, data, offset)",
        (LIFE, MACHINE),
    ),
    Mutation(
        "computing: the whole edge counts as computed",
        "index/tree.py",
        "one.computed = max(one.computed, min(stop, one.end))",
        "one.computed = one.end",
        (EXPLAIN,),
    ),
)

_MEMORY = (
    Mutation(
        "known: what nobody computed stays",
        "index/reclaim.py",
        "keep = max([edge.computed, *[anchor.position for anchor in edge.anchors]])",
        "keep = edge.end",
        (EXPLAIN, MACHINE),
    ),
    Mutation(
        "known: a path is cut under its lease",
        "index/reclaim.py",
        "keep = max([edge.computed, *[anchor.position for anchor in edge.anchors]])",
        "keep = edge.computed",
        (EXPLAIN, MACHINE),
    ),
    Mutation(
        "known: history is never forgotten",
        "index/reclaim.py",
        "gone = self._cut(edge, edge.resident)",
        "gone = False",
        (TREE,),
    ),
    Mutation(
        "known: history of a parent is never forgotten",
        "index/reclaim.py",
        "if gone and parent.parent is not None and not parent.children and parent.end > parent.resident:",
        "if False:",
        (TREE,),
    ),
    Mutation(
        "known: what is kept takes more bytes than it may",
        "index/reclaim.py",
        "while tree.nbytes > keep.hard_bytes:",
        "while False:",
        (LOOKING,),
    ),
    Mutation(
        "known: entries beyond the last checkpoint stay",
        "index/reclaim.py",
        "self._trim(edge, edge.last_checkpoint, cause)",
        "self._trim(edge, edge.last_checkpoint if edge.checkpoints else edge.resident, cause)",
        (MEMORY, MACHINE),
    ),
    Mutation(
        "evict: a pinned checkpoint goes",
        "index/reclaim.py",
        "if item.pinned:",
        "if item.pinned and item.floats:",
        (WISHES, MEMORY, MACHINE),
    ),
    Mutation(
        "evict: a pinned path goes",
        "index/reclaim.py",
        "return max(edge.floor, (-(-item.position // self._span) - blocks) * self._span)",
        "return max(edge.start, (-(-item.position // self._span) - blocks) * self._span)",
        (WISHES, MEMORY, MACHINE),
    ),
    Mutation(
        "evict: more of a path than is wanted goes",
        "index/reclaim.py",
        'self._trim(edge, self._fallback(item, wanted), "evicted")',
        'self._trim(edge, self._fallback(item, 2 * wanted), "evicted")',
        (MEMORY,),
    ),
    Mutation(
        "evict: what went is not remembered",
        "index/reclaim.py",
        "self._tree.remember(item.edge, lost)",
        "del lost",
        (EXPLAIN, MACHINE),
    ),
    Mutation(
        "evict: every victim counts as unused",
        "index/reclaim.py",
        "if item.hits == 0:",
        "if item.hits >= 0:",
        (MEMORY,),
    ),
    Mutation(
        "evict: what lies behind running leases is not found",
        "index/reclaim.py",
        "keep = max(edge.floor, min(held[edge], edge.resident))",
        "keep = edge.resident",
        (EXHAUSTION, MACHINE),
    ),
    Mutation(
        "evict: second copies of blocks are not found",
        "index/reclaim.py",
        "self._residency.merge_last_blocks(edge)",
        "continue",
        (EXHAUSTION, MACHINE),
    ),
    Mutation(
        "shrink: the block at the end goes too",
        "index/residency.py",
        "-(-keep // span) - edge.start // span if keep > edge.start else 0",
        "keep // span - edge.start // span if keep > edge.start else 0",
        (MEMORY, MACHINE),
    ),
    Mutation(
        "grow: the block at the end has one holder",
        "index/residency.py",
        "self._pool.share_one(row.item(end - 1))",
        "self._pool.share_one(row.item(end - 1)) if False else None",
        (LIFE, MACHINE),
    ),
    Mutation(
        "grow: a pin stays on a block that is named no more",
        "index/residency.py",
        "for _ in [pin for pin in one.pins if pin.position > first]:",
        "for _ in [pin for pin in one.pins if pin.position > first + span]:",
        (WISHES, MACHINE),
    ),
    Mutation(
        "grow: edges before it go on naming the block",
        "index/residency.py",
        "if one.runs[table][-1] == old:",
        "if one is edge:",
        (WISHES, MACHINE),
    ),
    Mutation(
        "pool: a pinned block that nobody holds is free",
        "index/pool.py",
        "return self.blocks - self.used",
        "return self.blocks - self.used + self.pinned",
        (POOL, MACHINE),
    ),
)

_PINS = (
    Mutation(
        "pins: what two share counts twice",
        "index/pins.py",
        "more = sum(int(np.count_nonzero(self._pool.pins[part.ids] == 0)) for part in parts)",
        "more = sum(len(part.ids) for part in parts)",
        (WISHES,),
    ),
    Mutation(
        "pins: they may take the whole pool",
        "index/pins.py",
        "> self._share * self._pool.blocks",
        "> self._pool.blocks",
        (WISHES, MEMORY),
    ),
    Mutation(
        "pins: renewing does not prolong",
        "index/pins.py",
        "pin.until = max(pin.until, until)",
        "pin.until = min(pin.until, until)",
        (WISHES, MACHINE),
    ),
    Mutation(
        "pins: the checkpoint is not protected",
        "index/pins.py",
        "checkpoint.pinned = pinned",
        "checkpoint.pinned = False",
        (WISHES, MEMORY, MACHINE),
    ),
    Mutation(
        "pins: a renewed pin ends at its first end",
        "index/pins.py",
        "if pin.until > self._clock():",
        "if pin.until > self._clock() + 1e9:",
        (WISHES, MACHINE),
    ),
    Mutation(
        "pins: one is made off the grid",
        "policy/placement.py",
        'wanted[self.place(length, prompt.pin)] = "breakpoint"',
        'wanted[min(prompt.pin, last)] = "breakpoint"',
        (PLACEMENT, WISHES),
    ),
    Mutation(
        "pins: a wish is told off the grid",
        "lease/open.py",
        "floor = (lambda position: position) if self.index.floats else self.placement.floor",
        "floor = lambda position: position",
        (WISHES, MACHINE),
    ),
    Mutation(
        "pins: a prompt's own time is ignored",
        "lease/commit.py",
        "seconds = self.pin_seconds if record.prompt.pin_seconds is None else record.prompt.pin_seconds",
        "seconds = self.pin_seconds",
        (WISHES, MACHINE),
    ),
    Mutation(
        "wishes: a kept checkpoint counts as refused",
        "lease/commit.py",
        "if outcome is not Outcome.KEPT:",
        "if outcome is not None:",
        (WISHES, MEMORY, MACHINE),
    ),
    Mutation(
        "wishes: the end of a lease is not told",
        "lease/commit.py",
        "self.close_wish(wish, Outcome.ENDED)",
        "pass",
        (WISHES, MACHINE),
    ),
)

_REASONS = (
    Mutation(
        "explain: evictions before the hit are told",
        "index/explain.py",
        "for lost in at.lost(hit, computed):",
        "for lost in at.lost(0, computed):",
        (EXPLAIN, MACHINE),
    ),
    Mutation(
        "explain: all is told evicted",
        "index/explain.py",
        "        hit = lost.position\n",
        "        hit = computed\n",
        (EXPLAIN, MACHINE),
    ),
    Mutation(
        "explain: a first token hides another namespace",
        "index/explain.py",
        "if matched < elsewhere:",
        "if matched == 0 and matched < elsewhere:",
        (EXPLAIN, MACHINE),
    ),
    Mutation(
        "explain: a hit that is given up is told evicted",
        "index/explain.py",
        "given_up = (Loss(why, 0, self.hit_tokens),) if self.hit_tokens else ()",
        "given_up = (Loss(Reason.EVICTED, 0, self.hit_tokens),) if self.hit_tokens else ()",
        (EXPLAIN, MACHINE),
    ),
    Mutation(
        "explain: lookahead is forgotten in other namespaces",
        "prefix_cache.py",
        "elsewhere = self._matched(known, prompt)",
        "elsewhere = known",
        (EXPLAIN, MACHINE),
    ),
    Mutation(
        "fail: the path of a broken lease counts as being computed",
        "lease/commit.py",
        "self.index.retract(record.anchor, leases.computed.item(row))",
        "pass",
        (EXPLAIN, MACHINE),
    ),
    Mutation(
        "publish: answers are entered before they are computed",
        "lease/commit.py",
        "keep = max(0, leases.known.item(row) - computed - self.geometry.lookahead)",
        "keep = 0",
        (EXPLAIN, MACHINE),
    ),
    Mutation(
        "displaced: what matches in its place is told as displaced",
        "index/displaced.py",
        "if not 0 < change <= same:",
        "if change > same:",
        (DISPLACED,),
    ),
    Mutation(
        "displaced: texts that parted a little before are not looked at",
        "index/displaced.py",
        "base = max(0, at.position - _BACK)",
        "base = at.position",
        (DISPLACED,),
    ),
    Mutation(
        "displaced: text over several edges is not found",
        "index/displaced.py",
        "yield edge, known, length // _GRAM * _GRAM",
        "yield edge, known, length",
        (DISPLACED,),
    ),
)

_POLICY = (
    Mutation(
        "placement: only the first message boundary",
        "lease/open.py",
        "return first + [place",
        "return first or [place",
        (PLACEMENT,),
    ),
    Mutation(
        "placement: only the last message boundaries",
        "policy/placement.py",
        "for p in ends[:1]",
        "for p in ends[:0]",
        (PLACEMENT,),
    ),
    Mutation(
        "placement: boundaries at any price",
        "lease/open.py",
        'if place.kind == "boundary" and worth(place, 0) >= price]',
        'if place.kind == "boundary"]',
        (PLACEMENT,),
    ),
    Mutation(
        "placement: what is passed over is not remembered",
        "lease/commit.py",
        "self.index.pass_over(record.place(place.position), place.kind)",
        "pass",
        (PLACEMENT,),
    ),
    Mutation(
        "placement: a boundary within the lookahead counts as passed over",
        "lease/open.py",
        "position = self.placement.place(length, boundary)",
        "position = boundary",
        (PLACEMENT,),
    ),
    Mutation(
        "waiting: a position off the grid is taken",
        "lease/open.py",
        "position <= end and placeable)",
        "position <= end)",
        (LIFE,),
    ),
    Mutation(
        "waiting: a position that was passed is taken",
        "lease/open.py",
        "if not (self._settled(row) < position <= end",
        "if not (0 < position <= end",
        (LIFE,),
    ),
    Mutation(
        "placement: message boundaries close to each other",
        "lease/open.py",
        "position - last >= least",
        "position > last",
        (PLACEMENT,),
    ),
    Mutation(
        "placement: a junction only inside an edge",
        "lease/open.py",
        "at.position < at.edge.end or bool(at.edge.children)",
        "at.position < at.edge.end",
        (PLACEMENT, MACHINE),
    ),
    Mutation(
        "placement: a junction is an interval where both lie",
        "policy/placement.py",
        'wanted[self.floor(junction)] = "junction"',
        'wanted.setdefault(self.floor(junction), "junction")',
        (PLACEMENT,),
    ),
    Mutation(
        "placement: a prompt end is a boundary where both lie",
        "policy/placement.py",
        'wanted[last] = "prompt_end"',
        'wanted.setdefault(self.floor(last), "prompt_end")',
        (PLACEMENT,),
    ),
    Mutation(
        "placement: lookahead is not left at the end",
        "policy/placement.py",
        "min(position, length - max(1, self._lookahead))",
        "min(position, length - 1)",
        (PLACEMENT, WISHES, MACHINE),
    ),
    Mutation(
        "placement: intervals off the grid",
        "policy/placement.py",
        "return self.floor(-(-beyond // self.interval) * self.interval)",
        "return -(-beyond // self.interval) * self.interval",
        (PLACEMENT,),
    ),
    Mutation(
        "uses: a checkpoint begins anew where one went",
        "index/usage.py",
        "checkpoint.missed = 0 if lost is None else lost.uses",
        "checkpoint.missed = 0",
        (REUSE,),
    ),
    Mutation(
        "uses: all that went of a kind count",
        "index/usage.py",
        "seen.add(lost.kind)",
        "pass",
        (REUSE,),
    ),
    Mutation(
        "uses: a hit is not a use",
        "index/usage.py",
        "        checkpoint.hits += 1\n",
        "",
        (REUSE, MEMORY),
    ),
    Mutation(
        "uses: what is kept is not counted",
        "index/usage.py",
        "self.reuse.took(checkpoint.kind)",
        "pass",
        (REUSE,),
    ),
    Mutation(
        "reuse: a preempted request may not come back",
        "policy/reuse.py",
        'frozenset({"preempt"})',
        "frozenset()",
        (REUSE,),
    ),
    Mutation(
        "reuse: old evidence does not fade",
        "policy/reuse.py",
        "if seen.taken > self.memory:",
        "if seen.taken < 0:",
        (REUSE,),
    ),
    Mutation(
        "eviction: a priority that has fallen is not noticed",
        "policy/eviction.py",
        "_ASKED_AGAIN = 2",
        "_ASKED_AGAIN = 0",
        (REUSE, QUEUE),
    ),
    Mutation(
        "eviction: what has risen is not put back",
        "policy/eviction.py",
        "not (asked and asked[lowest][0] <= self._heap[0][0])",
        "not asked",
        (QUEUE,),
    ),
)

_LEASES = (
    Mutation(
        "geometry: interleaved layouts are cut outside stripes",
        "shape/geometry.py",
        "fit = block_bytes // per_token // interleave * interleave",
        "fit = block_bytes // per_token",
        (GEOMETRY,),
    ),
    Mutation(
        "geometry: the peak is at the end",
        "shape/geometry.py",
        "while stop > start and self._most_blocks(stop) > peak:",
        "while False:",
        (ADMISSION, GEOMETRY),
    ),
    Mutation(
        "lease: a hit of another cache is taken",
        "prefix_cache.py",
        "if hit is not None and hit.index is not self._index:",
        "if hit is not None and hit.index is None:",
        (MISUSE, MACHINE),
    ),
    Mutation(
        "lease: an old hit is taken",
        "prefix_cache.py",
        "if hit is None or hit.version != self._index.version or hit.prompt is not prompt:",
        "if hit is None or hit.prompt is not prompt:",
        (MISUSE, MACHINE),
    ),
    Mutation(
        "commit: a step of which nothing counts leaves no fresh row",
        "lease/commit.py",
        "if computed > start and not record.restored:",
        "if not record.restored:",
        (LIFE, MACHINE),
    ),
    Mutation(
        "commit: copies that are not needed stay",
        "lease/commit.py",
        "                self.pool.drop(mine)\n",
        "",
        (LIFE, MACHINE),
    ),
    Mutation(
        "abort: what was committed goes",
        "prefix_cache.py",
        'self._end(rows, "abort", reach, BROKEN)',
        "self._end(rows, None, reach, BROKEN)",
        (LIFE,),
    ),
    Mutation(
        "bookmark: windows behind it are let go",
        "lease/table.py",
        "np.minimum(computed, self.bookmarked[rows])",
        "computed",
        (LIFE, MACHINE),
    ),
    Mutation(
        "bookmark: the state is not copied",
        "lease/extend.py",
        "self._copy_state(row, record.bookmark, work)",
        "record.bookmark.due = False",
        (LIFE, MACHINE),
    ),
    Mutation(
        "bookmark: kept where the lease has no room",
        "lease/extend.py",
        "if self.drop_bookmark(row):",
        "if False:",
        (LIFE,),
    ),
    Mutation(
        "abort: a state that was exported stays",
        "lease/commit.py",
        "self.pool.drop(export.destination, whole=True)",
        "pass",
        (LIFE, MACHINE),
    ),
    Mutation(
        "detach: a lease goes on publishing",
        "lease/commit.py",
        "record.anchor, record.published = None, False",
        "record.anchor = None",
        (LIFE, MACHINE),
    ),
    Mutation(
        "forget: pins stay",
        "index/reclaim.py",
        "                self.pins.lift(pin)\n            for",
        "                pass\n            for",
        (FORGET, MACHINE),
    ),
    Mutation(
        "steps: a step that was cut short does not undo the next",
        "lease/commit.py",
        "self._undo_second(rows[leases.phase[rows] == STEPPING])",
        "self._undo_second(rows[:0])",
        (TWO, MACHINE),
    ),
    Mutation(
        "events: a listener that has ended is told",
        "index/events.py",
        "if listener not in self._listeners:",
        "if listener is None:",
        (EVENTS,),
    ),
    Mutation(
        "windows: a checkpoint behind a branch is not found",
        "index/edge.py",
        "todo.extend(edge.children.values())",
        "todo.extend(())",
        (WINDOWS, MACHINE),
    ),
    Mutation(
        "windows: a checkpoint serves one position too many",
        "shape/geometry.py",
        "return block * self.span + self.window - 1 if block",
        "return block * self.span + self.window - 2 if block",
        (WINDOWS, MACHINE),
    ),
    Mutation(
        "windows: what slid out of a window does not go first",
        "index/reclaim.py",
        "while self._spare and self._pool.free < blocks:",
        "while self._spare and self._pool.free < blocks and self.queue.pop() is None:",
        (WINDOWS, MACHINE),
    ),
    Mutation(
        "events: a failing listener breaks the call",
        "index/events.py",
        "except Exception:",
        "except KeyError:",
        (EVENTS,),
    ),
)

MUTATIONS = _TREE + _MEMORY + _PINS + _REASONS + _POLICY + _LEASES
