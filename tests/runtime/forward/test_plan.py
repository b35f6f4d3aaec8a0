"""How a batch becomes forwards."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.cache import (
    CacheGeometry,
    ChunkedLocal,
    FullAttention,
    LayerSpec,
    ParallelLayout,
    Recurrent,
    SlidingWindow,
)
from headway.runtime.forward.batch import RunBatch
from headway.runtime.forward.plan import PlanRules, TokenPlan, forwards

CPU = torch.device("cpu")


def batch(starts: list[int], counts: list[int], geometry: CacheGeometry) -> RunBatch:
    n, width = len(starts), 4000
    return RunBatch(
        tokens=np.arange(sum(counts), dtype=np.int32),
        starts=np.array(starts, dtype=np.int64),
        counts=np.array(counts, dtype=np.int64),
        tables=[np.arange(n * width, dtype=np.int32).reshape(n, width) for _ in geometry.tables],
        fresh=np.array(starts) == 0,
    )


PLAIN = PlanRules()


def shapes(starts: list[int], counts: list[int], rules: PlanRules = PLAIN, state: bool = True) -> list[object]:
    groups: list[LayerSpec] = [FullAttention("full", 4)]
    geometry = CacheGeometry(groups + ([Recurrent("state", 64)] if state else []), block_tokens=16)
    return [
        (plan.rows.tolist(), plan.count, plan.fresh)
        for plan in forwards(batch(starts, counts, geometry), geometry, rules, CPU)
    ]


def test_rows_of_equal_length_run_together() -> None:
    assert shapes([5, 9, 7], [1, 1, 1]) == [([1, 2, 0], 1, False)]
    assert shapes([5, 0, 7, 0], [1, 20, 1, 20]) == [([2, 0], 1, False), ([1, 3], 20, True)]


def test_a_fresh_row_runs_apart_only_where_states_are_kept() -> None:
    assert shapes([0, 7], [4, 4]) == [([0], 4, True), ([1], 4, False)]
    assert shapes([0, 7], [4, 4], state=False) == [([1, 0], 4, False)]


def test_one_long_row_does_not_pad_all_others() -> None:
    assert shapes([20_000, 30, 20, 10], [1, 1, 1, 1]) == [([0], 1, False), ([1, 2, 3], 1, False)]
    assert shapes([1000, 30, 20, 10], [1, 1, 1, 1]) == [([0, 1, 2, 3], 1, False)]


def test_ranks_share_long_forwards_and_store_alike() -> None:
    geometry = CacheGeometry([FullAttention("full", 4), Recurrent("state", 64)], ParallelLayout(pcp=2), block_tokens=16)
    asked = batch([0, 40, 7], [35, 35, 9], geometry)
    plans = [[*forwards(asked, geometry, PlanRules(place=(rank, 2)), CPU, rank)] for rank in (0, 1)]
    assert [[plan.own for plan in each] for each in plans] == [[(0, 18), (0, 18), (0, 9)], [(18, 35), (18, 35), (0, 9)]]
    assert [plan.shared for plan in plans[0]] == [True, True, False]
    for one, other in zip(*plans, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert one.tables[0].merged == other.tables[0].merged is True
        written = [{*zip(*(x.tolist() for x in plan.tables[0].write), strict=True)} for plan in (one, other)]
        assert sum(map(len, written)) == one.tokens.numel()


def test_models_that_know_one_length_run_rows_of_one_start() -> None:
    rules = PlanRules(uniform_starts=True)
    assert shapes([5, 9, 5], [1, 1, 1], rules) == [([0, 2], 1, False), ([1], 1, False)]


def test_single_steps() -> None:
    rules = PlanRules(single_steps=True)
    assert shapes([5, 0], [3, 3], rules) == [([0], 1, False)] * 3 + [([1], 3, True)]


@settings(max_examples=60)
@given(st.data())
def test_every_token_is_computed_once_and_in_order(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 6))
    starts = data.draw(st.lists(st.sampled_from([0, 3, 3, 50, 9000]), min_size=n, max_size=n))
    counts = data.draw(st.lists(st.sampled_from([1, 1, 2, 9]), min_size=n, max_size=n))
    rules = PlanRules(data.draw(st.booleans()), data.draw(st.booleans()))
    geometry = CacheGeometry([FullAttention("full", 4), Recurrent("state", 64)], block_tokens=16)
    made = batch(starts, counts, geometry)
    seen: dict[int, list[tuple[int, int]]] = {row: [] for row in range(n)}
    for plan in forwards(made, geometry, rules, CPU):
        for row, tokens, positions in zip(plan.rows, plan.tokens.tolist(), plan.positions.tolist(), strict=True):
            seen[int(row)] += list(zip(tokens, positions, strict=True))
    first = 0
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        assert seen[row] == [(first + i, start + i) for i in range(count)]
        first += count


SPECS: list[LayerSpec] = [FullAttention("a", 4), SlidingWindow("b", 4, window=7), ChunkedLocal("c", 4, chunk=6)]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: type(spec).__name__)
@pytest.mark.parametrize("count", [1, 2, 11])
def test_masks_are_the_definition(spec: LayerSpec, count: int) -> None:
    """Each query sees, of the columns that carry its row's tokens, exactly those that its kind lets it see."""
    geometry = CacheGeometry([spec], block_tokens=4)
    starts = np.array([0, 3, 4, 17, 30], dtype=np.int64) if count > 1 else np.array([1, 3, 4, 17, 30], dtype=np.int64)
    held = np.arange(5 * 16, dtype=np.int32).reshape(5, 16)
    plan = TokenPlan(geometry.tables[0], held, starts, count, CPU)
    mask = plan.mask(0, count)
    for row, start in enumerate(starts.tolist()):
        for i in range(count):
            query = start + i
            low = {"a": 0, "b": query - 6, "c": query // 6 * 6}[spec.name]
            seen = plan._keys[row] if mask is None else plan._keys[row][mask[row, 0, i]]
            assert sorted(seen.tolist()) == list(range(max(0, low), query + 1))


def test_new_entries_go_only_where_blocks_are_held() -> None:
    geometry = CacheGeometry([SlidingWindow("w", 4, window=5)], block_tokens=4)
    held = np.array([[-1, -1, 7, 8]], dtype=np.int32)
    plan = TokenPlan(geometry.tables[0], held, np.array([4]), 10, CPU)
    assert plan.kept is not None
    assert plan.kept.tolist() == [4, 5, 6, 7, 8, 9]
    assert [x.tolist() for x in plan.write] == [[7, 7, 7, 7, 8, 8], [0, 1, 2, 3, 0, 1]]
