"""Objects of a group are the same bytes whatever ranks computed them: read on some, written on others, gone on from.

T16, T22 and T28 are faults of other engines' tiers that belong here, as are those of states that were cut among ranks.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.engine.ranks.rank_executor import ThreadRanks
from tests.engine.ranks.test_matrix import FP8, Case, layout_of_ranks
from tests.runtime.drafting.published_drafts import save_published
from tests.runtime.drafting.tiny_drafters import TOKENS, save_tiny
from tests.runtime.parallel.rank_threads import layout_of
from tests.runtime.tiny_models import generated, tiny_model

from headway.cache import CacheGeometry, Step, TableKind
from headway.engine import StepWork
from headway.engine.executor import BlockRange
from headway.engine.ranks import objects as objects_module
from headway.engine.ranks.objects import RankObjects
from headway.runtime.drafting.drafter import DraftRequest
from headway.runtime.drafting.loading import load_drafter
from headway.runtime.drafting.memory import EntrySizes
from headway.runtime.forward.arena import Arena
from headway.runtime.forward.canonical import shares_of
from headway.runtime.forward.moves import BlockMover
from headway.runtime.interface import AS_COMPUTED, GREEDY, SampleRow, StoredTypes
from headway.runtime.model.inspection import inspect_model

BLOCKS, HOST_BLOCKS = 400, 60
POSITION, ANSWER = 83, 4
"""Where the objects end, inside a block of most tables; and tokens that are computed behind."""
TOLERANCE = 1e-4
"""For what other ranks have computed in another order, in fp32, of numbers of about 1."""
COMPUTED, WRITTEN = 0, 1
"""Rows of the tables."""
PROMPT = np.random.default_rng(4).integers(3, 250, POSITION + 1, dtype=np.int32)

CASES = [
    *(Case("KimiLinear", *rest) for rest in ((1, 1, "ag_rs", "none", 2), (2, 16, "ag_rs", "none", 4), (2, 16))),
    Case("KimiK3", 4, 16, tp=4),
    *(Case("Qwen3NextWide", *rest) for rest in ((2, 16, "ag_rs", "none", 2), (2, 1, "ag_rs", "none", 4), (4, 4))),
    *(Case("GraniteMoeHybrid", *rest) for rest in ((1, 1, "ag_rs", "none", 2), (2, 8, "ag_rs", "none", 4))),
    *(Case("NemotronH", *rest) for rest in ((2, 2, "ag_rs", "none", 2),)),
    *(Case("NemotronHWide", *rest) for rest in ((1, 1, "ag_rs", "none", 2),)),
    *(Case("Gemma3Wide", *rest) for rest in ((2, 16, "ag_rs", "none", 4), (4, 1, "ag_rs", "none", 4), (2, 4))),
    *(Case("MiMoV2Flash", *rest) for rest in ((2, 2, "ag_rs", "none", 2),)),
    *(Case("DeepseekV2", *rest) for rest in ((1, 1, "ag_rs", "none", 4), (4, 16))),
    Case("GptOss", 2, 16),
    Case("Qwen3", 4, 1),  # of two key/value heads
    Case("Llama4", 2, 2),
    Case("FalconH1", 2, 16),
    Case("Lfm2", 2, 1),
    *(Case("KimiLinear", 2, 4, tp=2, pcp=2), Case("Gemma3Wide", 1, 1, tp=2, pcp=2), Case("FalconH1", pcp=3)),
    Case("KimiK3", 4, 16, tp=4, types=FP8),
    Case("Gemma3Wide", 2, 16, tp=4, types=FP8),
]
DRAFTED = [Case("KimiLinear", 2, 16, "ag_rs", kind, 2) for kind in ("mtp", "dspark")]
DRAFTED += [Case("KimiK3", 2, 16, "ag_rs", "latent", 4), Case("KimiK3", 2, 1, "ag_rs", "grouped")]
"""Latents of a drafter are split by tokens, in the blocks of the target's."""


@dataclass
class World:
    """Ranks with two sequences in blocks of their own, one that is computed and one that is written."""

    case: Case
    executor: ThreadRanks
    geometry: CacheGeometry
    tables: list[NDArray[np.int32]]

    @classmethod
    def of(cls, case: Case, folder: Path | None = None) -> World:
        model, layout = tiny_model(case.model), layout_of_ranks(case)
        drafters = []
        if case.drafter != "none":
            assert folder is not None
            models = [copy.deepcopy(model) for _ in range(case.ranks)]
            drafters = [load_drafter(str(folder), each, None, TOKENS) for each in models]
        groups = (*layout.groups, *(drafters[0].groups if drafters else ()))
        geometry = CacheGeometry(groups, layout_of(case.alike, case.interleave, case.dcp, case.pcp), block_tokens=16)
        split = case.tp > 1
        more = {"split": split, "host_blocks": HOST_BLOCKS, "types": case.types}
        executor = ThreadRanks(model, geometry, BLOCKS, case.form, drafters, **more)  # type: ignore[arg-type]
        ids = np.random.default_rng(case.ranks).permutation(BLOCKS).astype(np.int32)
        ends = np.cumsum([2 * table.blocks_for(POSITION + 1 + ANSWER) for table in geometry.tables])
        return cls(case, executor, geometry, [part.reshape(2, -1) for part in np.split(ids, ends)[:-1]])

    def run(self, row: int, text: list[int], start: int, stop: int) -> int:
        """Compute tokens [start, stop) of a text on one of the rows; returns the likeliest next one."""
        one = np.array([row])
        nothing = np.empty((0, 2), dtype=np.int32)
        step = Step(one, np.array([start]), np.array([stop - start]), nothing, one if start == 0 else one[:0], ())
        known = np.array(text, dtype=np.int32)
        sample = SampleRow(GREEDY, 0, known[:stop], known[:0])
        following = np.array([text[stop] if stop < len(text) else -1])
        (answer,) = self.executor.run(StepWork(step, self.tables, [known[start:stop]], [sample], following))
        return answer.tokens[0]

    def compute(self) -> None:
        """The prompt up to the position, in two pieces."""
        self.run(COMPUTED, PROMPT.tolist(), 0, 50)
        self.run(COMPUTED, PROMPT.tolist(), 50, POSITION)

    def go_on(self, row: int) -> list[int]:
        """The answer, from what the row has of the first tokens."""
        text = PROMPT.tolist()
        for stop in range(POSITION + 1, POSITION + 1 + ANSWER):
            text.append(self.run(row, text, stop - 1, stop))
        return text[POSITION + 1 :]

    def draft(self, row: int) -> list[int]:
        """What the drafter proposes behind the prompt."""
        drafters = [each._speculator.drafter for each in self.executor.executors if each._speculator is not None]
        asked = SampleRow(GREEDY, 0, PROMPT, PROMPT[:0])
        request = DraftRequest(row, TOKENS, asked, False, [table[row] for table in self.tables])

        def prepare(rank: int) -> None:
            with torch.no_grad():
                drafters[rank].prepare([request])

        self.executor.ranked.ranks(prepare)
        with torch.no_grad():
            (proposal,) = drafters[0].propose([request])
        return proposal.tokens.tolist()

    def ranges(self, row: int, position: int = POSITION) -> list[BlockRange]:
        """What one needs to resume at a position, one range per group."""
        found = []
        for group in self.geometry.groups:
            table, held = group.table, self.tables[group.table.index][row]
            if table.kind is TableKind.STATE:
                found.append(BlockRange(group.spec.name, position, position, held[: table.state_blocks]))
            else:
                first = table.first_needed(position)
                blocks = held[first // table.span : -(-position // table.span)]
                found.append(BlockRange(group.spec.name, first, position, blocks))
        return found

    def read(self, row: int) -> list[bytes]:
        return [bytes(each) for each in self.executor.read_objects(self.ranges(row))]

    def write(self, row: int, objects: list[bytes]) -> None:
        self.executor.write_objects(self.ranges(row), [memoryview(each) for each in objects])


@cache
def one_rank(model: str, types: StoredTypes) -> tuple[World, list[bytes]]:
    world = World.of(Case(model, types=types))
    world.compute()
    return world, world.read(COMPUTED)


def close(left: bytes, right: bytes, fp8: bool) -> bool:
    if fp8:  # what lies halfway between two numbers is rounded either way
        return len(left) == len(right) and sum(a != b for a, b in zip(left, right, strict=True)) < 0.01 * len(left)
    a, b = (np.frombuffer(each, dtype=np.float32) for each in (left, right))
    return len(a) == len(b) and bool(np.all(np.abs(a - b) < TOLERANCE * np.maximum(1, np.abs(b))))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_objects_go_from_any_ranks_to_any_others(case: Case) -> None:
    """Every block is full of NaN at first, and ids of what is written are others than those that were read."""
    alone, expected = one_rank(case.model, case.types)
    world = World.of(case)
    assert world.executor.canonical == alone.executor.canonical, "the same key, the same sizes"
    assert all(group.certified for group in world.executor.canonical.values())
    world.compute()
    objects = world.read(COMPUTED)
    for asked, got, want in zip(world.ranges(COMPUTED), objects, expected, strict=True):
        assert len(got) == world.executor.canonical[asked.group].bytes * asked.tokens
        assert close(got, want, case.types is FP8 and asked.group != "state"), asked.group
    world.write(WRITTEN, expected)
    assert world.read(WRITTEN) == expected, "bit for bit"
    alone.write(WRITTEN, objects)
    assert alone.read(WRITTEN) == objects
    answer = world.go_on(COMPUTED)
    assert world.go_on(WRITTEN) == alone.go_on(WRITTEN) == answer
    assert answer == generated(case.model, tuple(PROMPT.tolist()), ANSWER, case.entries)[0]


@pytest.mark.parametrize("case", DRAFTED, ids=str)
def test_entries_of_drafters_are_one_ranks_to_write_and_all_ranks_to_read(case: Case, tmp_path: Path) -> None:
    save = save_published if case.model == "KimiK3" else save_tiny
    folder = save(case.drafter, tiny_model(case.model), tmp_path, 3)
    alone, world = World.of(Case(case.model, drafter=case.drafter), folder), World.of(case, folder)
    for each in (alone, world):
        each.compute()
    expected, objects = alone.read(COMPUTED), world.read(COMPUTED)
    assert world.executor.canonical == alone.executor.canonical
    assert world.executor.canonical["draft"].lookahead == int(case.drafter == "mtp")
    assert all(close(got, want, False) for got, want in zip(objects, expected, strict=True))
    world.write(WRITTEN, expected)
    assert world.read(WRITTEN) == expected
    blocks = world.ranges(WRITTEN)[-1].blocks.tolist()
    group = world.geometry.group("draft")
    held = [
        mover.arena.data[blocks, group.offset : group.offset + group.spec.bytes_per_token * group.block_tokens]  # type: ignore[union-attr]
        for mover in world.executor.movers
    ]
    assert all(torch.equal(each, held[0]) for each in held[1:]) == (case.drafter != "latent")
    for row in (COMPUTED, WRITTEN):
        world.run(row, PROMPT.tolist(), POSITION, POSITION + 1)
    assert world.draft(WRITTEN) == world.draft(COMPUTED)


# -- faults of others, by their number --------------------------------------------------------------------------------


def test_t16_a_rank_that_has_nothing_of_an_object_is_asked_like_all_others() -> None:
    """Of the first 16 tokens, ranks 1 to 3 have no entries: each answers with nothing, and none waits for it."""
    world = World.of(Case("GptOss", 4, 16))
    world.run(COMPUTED, PROMPT.tolist(), 0, 16)
    asked = [each for each in world.ranges(COMPUTED, 16) if each.group == "full"]
    sent: list[list[int]] = []
    ask = world.executor._ask

    def counted(messages: object) -> object:
        answers = ask(messages)  # type: ignore[arg-type]
        sent.append([sum(len(part) for part in each) for each in answers])
        return answers

    world.executor._ask = counted  # type: ignore[method-assign, assignment]
    (read,) = world.executor.read_objects(asked)
    world.executor.write_objects([replace(asked[0], blocks=world.tables[0][WRITTEN][:1])], [read])
    assert sent == [[len(read), 0, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("name", ["KimiLinear", "GptOss", "Llama4"])
def test_t22_a_block_comes_back_from_host_memory_with_all_its_bytes(name: str) -> None:
    """What lies in host memory, or comes to lie elsewhere, was garbage before: nothing of it may be left."""
    world, expected = World.of(Case(name)), one_rank(name, AS_COMPUTED)[1]
    executor = world.executor
    world.compute()
    ids = np.concatenate([asked.blocks for asked in world.ranges(COMPUTED)])
    others = np.concatenate([asked.blocks for asked in world.ranges(WRITTEN)])
    there = np.random.default_rng(1).permutation(HOST_BLOCKS)[: len(ids)].astype(np.int32)
    nothing = np.empty((0, 2), dtype=np.int32)
    executor.move_blocks(np.stack([ids, there], axis=1), nothing)
    host = [replace(asked, host=True, blocks=there[np.isin(ids, asked.blocks)]) for asked in world.ranges(COMPUTED)]
    assert [bytes(each) for each in executor.read_objects(host)] == expected, "objects are read from host memory too"
    executor.move_blocks(nothing, np.stack([there, others], axis=1))
    data = executor.ranked.arenas[0]
    assert torch.equal(data[others.tolist()], data[ids.tolist()])
    assert world.read(WRITTEN) == expected
    assert world.go_on(WRITTEN) == generated(name, tuple(PROMPT.tolist()), ANSWER)[0]


def test_t22_groups_that_share_blocks_are_each_restored_whole() -> None:
    """A target and a draft of the same kind lie in the same blocks: to write one leaves the other as it is."""
    model = tiny_model("Qwen3")
    layout, sizes = inspect_model(model), EntrySizes(2, (2, 8), (1, 24), torch.bfloat16)
    draft = replace(sizes.group(0), sharded=True)
    geometry = CacheGeometry((*layout.groups, draft), block_tokens=16)
    assert len(geometry.tables) == 1
    arena = Arena(layout, geometry, 20)
    mover = BlockMover(arena, None, shares_of(layout, geometry, 0, (sizes.entries,)))
    rng = np.random.default_rng(0)
    ranges = [BlockRange(name, 5, 70, np.array([3, 4, 9, 1, 7], dtype=np.int32)) for name in ("full", "draft")]
    written = [rng.integers(0, 256, mover.shares[r.group].group.bytes * 65, dtype=np.uint8) for r in ranges]
    for order in ((0, 1), (1, 0)):
        arena.rows.fill_(0xFF)
        for i in order:
            mover.write(ranges[i], written[i])
        assert [mover.read(asked).tobytes() for asked in ranges] == [each.tobytes() for each in written]


def test_t08_blocks_go_out_before_others_come_back() -> None:
    """So that a block of host memory that is filled, and one of the device that is emptied, can be used at once."""
    executor = World.of(Case("KimiLinear", 2, 1)).executor
    arenas = executor.ranked.arenas
    for rank, data in enumerate(arenas):
        data.copy_(torch.arange(BLOCKS)[:, None] % 100 + rank)
    executor.move_blocks(np.array([[7, 1], [9, 2]], dtype=np.int32), np.array([[1, 9], [2, 7]], dtype=np.int32))
    for rank, data in enumerate(arenas):
        assert [set(data[block].tolist()) for block in (7, 9, 8)] == [{9 + rank}, {7 + rank}, {8 + rank}]


@pytest.mark.parametrize("case", [Case("Gemma3Wide", 2, 16, tp=4), Case("KimiLinear", 2, 16)], ids=str)
def test_t28_every_group_is_moved_with_its_own_sizes(case: Case) -> None:
    """Each group in turn, alone: nothing but its own bytes of the tokens that were named changes on any rank."""
    world = World.of(case)
    world.compute()
    for asked, data in zip(world.ranges(WRITTEN), world.read(COMPUTED), strict=True):
        before = [arena.clone() for arena in world.executor.ranked.arenas]
        world.executor.write_objects([asked], [memoryview(data)])
        assert bytes(world.executor.read_objects([asked])[0]) == data
        written = 0
        for arena, old in zip(world.executor.ranked.arenas, before, strict=True):
            changed = (arena != old).any(dim=1).nonzero().flatten().tolist()
            assert set(changed) <= set(asked.blocks.tolist()), asked.group
            written += int((arena != old).sum())
        assert written > 0.9 * len(data), f"{asked.group} has not been written"


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("case", [Case("Gemma3Wide", 2, 4, tp=4), Case("KimiLinear", 2, 16)], ids=str)
def test_what_would_go_to_blocks_that_are_not_given_is_not_written(case: Case, staged: bool) -> None:
    """With a GPU as well, whose blocks are fetched and brought back: here the same memory stands for its own."""
    world, (_, expected) = World.of(case), one_rank(case.model, case.types)
    for mover in world.executor.movers:
        if staged:
            mover.arena.device = torch.device("cuda")
    world.write(COMPUTED, expected)
    for asked, data in zip(world.ranges(WRITTEN), expected, strict=True):
        blocks = asked.blocks.copy()
        blocks[:: 2 if asked.tokens > 1 else 1] = -1
        before = [arena.clone() for arena in world.executor.ranked.arenas]
        world.executor.write_objects([replace(asked, blocks=blocks)], [memoryview(data)])
        for arena, old in zip(world.executor.ranked.arenas, before, strict=True):
            changed = (arena != old).any(dim=1).nonzero().flatten().tolist()
            assert set(changed) == set(blocks[blocks >= 0].tolist())
        world.executor.write_objects([asked], [memoryview(data)])
    assert world.read(WRITTEN) == world.read(COMPUTED) == expected


def test_what_is_beside_the_tokens_of_a_range_stays() -> None:
    """Two stretches that meet inside a block, written one after the other, in either order."""
    world, (alone, expected) = World.of(Case("Gemma3Wide", 2, 4, tp=4)), one_rank("Gemma3Wide", AS_COMPUTED)
    (asked,) = [each for each in alone.ranges(COMPUTED) if each.group == "full"]
    span = world.geometry.group("full").span
    for cut, first in ((37, 0), (71, 1)):
        parts = []
        for start, stop in ((0, cut), (cut, POSITION)):
            own = alone.tables[0][COMPUTED][start // 16 : -(-stop // 16)]
            (read,) = alone.executor.read_objects([replace(asked, first=start, stop=stop, blocks=own)])
            held = world.tables[0][WRITTEN][start // span : -(-stop // span)]
            parts.append((replace(asked, first=start, stop=stop, blocks=held), read))
        for arena in world.executor.ranked.arenas:
            arena.fill_(0xFF)
        for part, data in (parts[first], parts[1 - first]):
            world.executor.write_objects([part], [data])
        (whole,) = [each for each in world.ranges(WRITTEN) if each.group == "full"]
        assert bytes(world.executor.read_objects([whole])[0]) == expected[0]


@pytest.mark.parametrize("limit", [1, 3000, 20000])
def test_messages_are_bounded(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However small they are: a state is sent field by field, tokens block by block."""
    monkeypatch.setattr(objects_module, "MESSAGE_BYTES", limit)
    (_, expected), case = one_rank("KimiLinear", AS_COMPUTED), Case("KimiLinear", 2, 16, tp=4)
    world = World.of(case)
    sizes: list[int] = []
    ask = world.executor._ask

    def counted(messages: object) -> object:
        answers = ask(messages)  # type: ignore[arg-type]
        sizes.append(sum(len(part) for each in answers for part in each))
        return answers

    world.executor._ask = counted  # type: ignore[method-assign, assignment]
    world.write(WRITTEN, expected)
    assert world.read(WRITTEN) == expected
    largest_field = 4 * 16 * 16 * 4
    span = world.geometry.group("full").span * world.executor.canonical["full"].bytes
    assert max(sizes) <= max(limit, largest_field, span)
    assert sum(sizes) <= sum(map(len, expected))


# -- states that are cut among ranks ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tp"), [("GraniteMoeHybrid", 2), ("GraniteMoeHybrid", 8), ("NemotronH", 4), ("KimiLinear", 4)]
)
def test_channels_of_a_convolution_are_cut_part_by_part(name: str, tp: int) -> None:
    """x | B | C of unequal widths, B and C of one group on several ranks: never an equal share of all channels."""
    layout = layout_of_ranks(Case(name, tp=tp))
    geometry = CacheGeometry(layout.groups, layout_of(tp, 1, 1), block_tokens=16)
    of_ranks = [shares_of(layout, geometry, rank)[-1] for rank in range(tp)]
    width = 4 * next(e for e in layout.layers if e.state is not None).state.fields[0].shape[1]  # type: ignore[union-attr]
    channels = [[(p.whole // width, p.length // width) for p in share.fields[0].pieces] for share in of_ranks]
    mine = [len(share.fields[0].mine) for share in of_ranks]
    if name == "GraniteMoeHybrid":  # 8 heads of 16, one group of 16
        assert channels == [[(rank * 128 // tp, 128 // tp), (128, 16), (144, 16)] for rank in range(tp)]
        assert mine == [3] + [1] * (tp - 1), "one rank alone writes B and C"
    elif name == "NemotronH":  # 8 heads of 16, two groups of 16
        assert channels == [
            [(rank * 32, 32), (128 + rank // 2 * 16, 16), (160 + rank // 2 * 16, 16)] for rank in range(4)
        ]
        assert mine == [3, 1, 3, 1]
    else:  # q | k | v of 4 heads of 16
        assert channels == [[(part * 64 + rank * 16, 16) for part in range(3)] for rank in range(4)]
        assert mine == [3, 3, 3, 3]


def test_a_layout_that_is_not_certain_is_said_and_not_guessed() -> None:
    """Its objects go from ranks to the same ranks; the family, which is part of their keys, names these."""
    case = Case("KimiLinear", 2, 16, tp=4)
    layout = layout_of_ranks(case)
    unsure = replace(
        layout,
        layers=tuple(
            each
            if each.state is None
            else replace(
                each, state=replace(each.state, fields=tuple(replace(f, parts=None) for f in each.state.fields))
            )
            for each in layout.layers
        ),
    )
    geometry = CacheGeometry(layout.groups, layout_of(4, 16, 2), block_tokens=16)
    ranked = RankObjects(geometry, [shares_of(unsure, geometry, rank) for rank in range(4)])
    full, state = ranked.canonical["full"], ranked.canonical["state"]
    assert (full.certified, state.certified) == (True, False)
    assert "tp4-dcp2-interleave16" in state.family
    assert state.bytes == 4 * layout.group("state").state_bytes  # type: ignore[union-attr]
    mine = sorted(
        (piece.whole, piece.length)
        for rank in range(4)
        for piece in shares_of(unsure, geometry, rank)[1].fields[0].mine
    )
    size = mine[0][1]
    assert mine == [(rank * size, size) for rank in range(4)], "what each holds, one after another"


@pytest.mark.parametrize("ids", [[9, 8, 7, 6], [3, 4, 5, 4 + 5, 8, 7], [7, 6, 7 + 1, 9, 3]], ids=str)
def test_objects_in_blocks_that_descend_are_those_in_blocks_that_ascend(ids: list[int]) -> None:
    """A pool that is new gives its blocks from the last one down."""
    world = World.of(Case("Qwen3"))
    mover = world.executor.movers[0]
    first, stop = 5, 16 * len(ids) - 3
    name = next(iter(mover.shares))
    data = np.random.default_rng(0).integers(0, 256, mover.shares[name].group.bytes * (stop - first), dtype=np.uint8)
    found = []
    for blocks in (np.arange(len(ids)), np.array(ids)):
        mover.arena.rows.zero_()
        asked = BlockRange(name, first, stop, blocks.astype(np.int32))
        mover.write(asked, data)
        assert np.array_equal(mover.read(asked), data)
        found.append(mover.arena.rows[blocks.tolist()].clone())
    assert torch.equal(*found)


@pytest.mark.parametrize(("host", "count"), list(product((False, True), (1, 200))))
def test_blocks_of_any_order_are_moved(host: bool, count: int) -> None:
    """Runs and single blocks take other ways."""
    world = World.of(Case("Qwen3"))
    mover = world.executor.movers[0]
    assert mover.host is not None
    count = min(count, HOST_BLOCKS)
    rng = np.random.default_rng(count)
    some = np.arange(0, HOST_BLOCKS, 9)[:count]  # so far apart that they are sorted
    orders = [(order, np.arange(count)) for order in (np.arange(count), np.arange(count)[::-1], rng.permutation(count))]
    for order, others in [*orders, (rng.permutation(some), rng.permutation(some))]:
        device, there = (order + 5).astype(np.int32), others.astype(np.int32)
        for data in (mover.arena.rows, mover.host.rows):
            data.copy_(torch.from_numpy(rng.integers(0, 256, data.shape, dtype=np.uint8)))
        nothing = np.empty((0, 2), dtype=np.int32)
        if host:
            mover.move(nothing, np.stack([there, device], axis=1))
        else:
            mover.move(np.stack([device, there], axis=1), nothing)
        assert torch.equal(mover.arena.rows[device.tolist()], mover.host.rows[there.tolist()])
