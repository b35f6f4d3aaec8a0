"""Faults injected into weights, memory and single rows: nothing that is not a number is answered, kept or shared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine.ranks import test_matrix
from tests.engine.test_drafts_against_generate import Driver, drafter_for
from tests.runtime.hand_cache import HandCache
from tests.runtime.tiny_models import generated, tiny_model

from headway.cache import TableKind
from headway.engine import EngineConfig, NotFiniteError, RunningRequest
from headway.runtime.forward.finite import extremes, finite_states

MODELS = ("KimiLinear", "GraniteMoeHybrid", "GptOss", "Qwen3")
"""A state and full attention, twice; windows; full attention alone."""
STATEFUL = ("KimiLinear", "BailingHybrid", "Qwen3Next", "OlmoHybrid", "NemotronH", "GraniteMoeHybrid", "Lfm2", "Zamba2")
CONFIG = EngineConfig(max_batched_tokens=64, max_running=4)
NAN = 0xFF


def prompt(seed: int, length: int = 70) -> list[int]:
    return np.random.default_rng(seed).integers(3, 256, length).tolist()


class Watched(Driver):
    """A driver that notes why requests failed."""

    def __init__(self, name: str, kind: str = "none", folder: Path | None = None, asked: tuple[list[int], ...] = ()):
        answers = [(tokens, 12) for tokens in asked]
        drafter = None if kind == "none" else drafter_for(kind, name, folder / "draft", 0, answers)
        super().__init__(name, drafter, 6, CONFIG)
        self.name = name
        self.errors: dict[RunningRequest, BaseException] = {}

    def step(self, preempt: bool = False) -> bool:
        scheduled = self.scheduler.schedule()
        if scheduled is None:
            return False
        for update in self.scheduler.complete(scheduled, self.executor.run(scheduled.work)):
            if update.error is not None:
                self.errors[update.request] = update.error
        return True

    def right(self, request: RunningRequest) -> bool:
        tokens = tuple(request.request.tokens.tolist())
        return request.answer.tolist() == generated(self.name, tokens, request.request.max_tokens)[0]

    def poison(self, blocks: np.ndarray) -> None:
        self.executor._runner.arena.data[torch.from_numpy(blocks.astype(np.int64))] = NAN

    def blocks_of(self, request: RunningRequest, kind: TableKind) -> np.ndarray:
        """Blocks of the first table of a kind that a running request holds."""
        table = next(t for t in self.cache.geometry.tables if t.kind is kind)
        held = self.cache.tables[table.index][request.lease.row]
        return held[: table.state_blocks] if kind is TableKind.STATE else held[:1]


def kind_of(name: str) -> TableKind:
    return TableKind.STATE if name in MODELS[:2] else TableKind.PREFIX


@pytest.mark.parametrize("kind", ["none", "mtp"])
@pytest.mark.parametrize("name", MODELS)
def test_one_row_fails_and_its_neighbours_go_on(name: str, kind: str, tmp_path: Path):
    driver = Watched(name, kind, tmp_path, (prompt(1), prompt(2)))
    bad, good = driver.add(prompt(1), 12), driver.add(prompt(2), 12)
    while len(good.answer) < 3:
        driver.step()
    driver.poison(driver.blocks_of(bad, kind_of(name)))
    driver.run()
    assert isinstance(driver.errors.pop(bad), NotFiniteError)
    assert not driver.errors
    assert driver.right(good)
    assert len(bad.answer) < 12, "not a token after the fault"
    assert bad.answer.tolist() == generated(name, tuple(prompt(1)), 12)[0][: len(bad.answer)]
    assert driver.scheduler.counters.not_finite == 1
    again = driver.add(prompt(1), 12)
    driver.run()
    assert driver.right(again) or again in driver.errors
    if again in driver.errors:  # what was poisoned was shared: its first reader found it, and it is gone
        again = driver.add(prompt(1), 12)
        driver.run()
        assert driver.right(again)


def poison_all_kept(driver: Watched, tokens: list[int]) -> RunningRequest:
    """Poison all that a request resumes from, when its lease has begun and nothing is computed yet."""
    request = driver.add(tokens, 12)
    scheduled = driver.scheduler.schedule()
    row, start = request.lease.row, request.lease.computed
    assert start > 0
    copied = scheduled.work.step.copies[:, 0]
    tables = [t for t in driver.cache.geometry.tables if t.kind is not TableKind.STATE]
    held = [driver.cache.tables[t.index][row, : start // t.span] for t in tables]
    driver.poison(np.concatenate([copied, *(ids[ids >= 0] for ids in held)]))
    for update in driver.scheduler.complete(scheduled, driver.executor.run(scheduled.work)):
        driver.errors[update.request] = update.error
    return request


@pytest.mark.parametrize("name", MODELS)
def test_what_a_request_resumed_from_is_dropped_if_it_is_the_cause(name: str):
    driver = Watched(name)
    for seed in (1, 2):
        driver.add(prompt(seed), 12)
    driver.run()
    bad = poison_all_kept(driver, prompt(1))
    assert "has been forgotten; send the request again" in str(driver.errors.pop(bad))
    assert driver.scheduler.counters.damaged_prefixes == 1
    again, other = driver.add(prompt(1), 12), driver.add(prompt(2), 12)
    driver.run()
    assert not driver.errors
    assert again.cached_tokens == 0
    assert other.cached_tokens == 69, "others lose nothing"
    assert driver.right(again)
    assert driver.right(other)
    assert driver.cache.stats().leased == 0


@pytest.mark.parametrize("name", MODELS[:2])
def test_a_poisoned_state_is_found_where_its_entries_are_sound(name: str):
    driver = Watched(name)
    driver.add(prompt(1), 12)
    driver.run()
    bad = driver.add([*prompt(1), *prompt(5, 6)], 12)
    scheduled = driver.scheduler.schedule()
    running = driver.blocks_of(bad, TableKind.STATE)
    copies = scheduled.work.step.copies
    driver.poison(copies[np.isin(copies[:, 1], running), 0])
    (update,) = driver.scheduler.complete(scheduled, driver.executor.run(scheduled.work))
    assert f"its first {bad.cached_tokens} tokens is damaged" in str(update.error)
    again = driver.add([*prompt(1), *prompt(5, 6)], 12)
    driver.run()
    assert again.cached_tokens < bad.cached_tokens
    assert driver.right(again)


@pytest.mark.parametrize("name", MODELS[:2])
def test_a_broken_state_that_a_bookmark_copies_goes_with_its_row(name: str):
    driver = Watched(name)
    bad = driver.add(prompt(1), 12)
    while len(bad.answer) < 3:
        driver.step()
    running = driver.blocks_of(bad, TableKind.STATE).copy()
    driver.poison(running)
    driver.cache.bookmark([bad.lease.row])
    scheduled = driver.scheduler.schedule()
    assert np.isin(running, scheduled.work.step.copies[:, 0]).all()
    (update,) = driver.scheduler.complete(scheduled, driver.executor.run(scheduled.work))
    assert isinstance(update.error, NotFiniteError)
    assert driver.cache.stats().leased == 0
    again = driver.add([*prompt(1), *bad.answer.tolist()], 12)
    driver.run()
    assert not driver.errors
    assert again.cached_tokens == 69, "the end of the prompt"
    assert driver.right(again)


@contextmanager
def broken_weight(name: str, weight: str) -> Iterator[None]:
    parameter = dict(tiny_model(name).named_parameters())[weight]
    kept = parameter.detach().clone()
    with torch.no_grad():
        parameter.view(-1)[5] = float("nan")
        yield
        parameter.copy_(kept)


@pytest.mark.parametrize("weight", ["model.layers.0.mlp.down_proj.weight", "lm_head.weight", "model.norm.weight"])
def test_a_broken_weight_leaves_nothing_in_the_cache(weight: str):
    driver = Watched("KimiLinear")
    with broken_weight("KimiLinear", weight):
        bad = [driver.add(prompt(seed), 12) for seed in (1, 2)]
        driver.run()
    for request in bad:
        assert "the weights are damaged" in str(driver.errors.pop(request))
        assert len(request.answer) == 0
    assert driver.cache.stats().checkpoints == 0
    again = driver.add(prompt(1), 12)
    driver.run()
    assert again.cached_tokens == 0
    assert driver.right(again)


def test_a_row_is_finite_in_all_its_tokens_and_may_rule_tokens_out():
    logits, hidden = torch.zeros(5, 1, 7), torch.zeros(5, 60, 8)
    logits[0, 0, 2] = -torch.inf  # how some models rule a token out
    hidden[1, 3, 4] = torch.nan  # an entry that has left all windows: the last token does not see it
    logits[2, 0, 6] = torch.inf
    logits[3] = -torch.inf
    logits[4, 0, 1] = torch.nan
    assert extremes(logits, hidden).isfinite().tolist() == [True, False, False, False, False]


@pytest.mark.parametrize("ranks", [{"tp": 2}, {"dcp": 2}, {"pcp": 2}], ids=["tp", "dcp", "pcp"])
@pytest.mark.parametrize("kind", ["none", "mtp"])
def test_what_one_rank_of_several_holds_fails_the_row_on_all(ranks: dict[str, int], kind: str, tmp_path: Path):
    name = "KimiLinear"
    case = test_matrix.Case(name, drafter=kind, **ranks)
    asked = [(prompt(seed), 12) for seed in (1, 2)]
    drafters = [] if kind == "none" else [drafter_for(kind, name, tmp_path / "draft", 0, asked) for _ in range(2)]
    driver = test_matrix.Driver(case, drafters)
    for tokens, count in asked:
        driver.add(tokens, count)
    bad, good = driver.requests
    errors = {}
    while (scheduled := driver.scheduler.schedule()) is not None:
        if 3 <= len(bad.answer) < 12 and bad.lease is not None:
            table = driver.cache.geometry.tables[0]
            held = driver.cache.tables[0][bad.lease.row][: table.state_blocks or 1]
            driver.executor.ranked.arenas[1][torch.from_numpy(held.astype(np.int64))] = NAN
        for update in driver.scheduler.complete(scheduled, driver.executor.run(scheduled.work)):
            if update.error is not None:
                errors[update.request] = update.error
    assert isinstance(errors.pop(bad), NotFiniteError)
    assert not errors
    assert good.answer.tolist() == generated(name, tuple(prompt(2)), 12)[0]


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("name", STATEFUL)
def test_a_step_whose_numbers_are_finite_leaves_a_finite_state(name: str, count: int):
    """So what a bookmark copies and what the end of a request donates needs no look of its own.

    One number of the state is broken at a time, in every field of every layer. The row fails, unless its step neither
    reads that number nor keeps it: the oldest column of a convolution is pushed out.
    """
    cache, dice = HandCache(tiny_model(name)), np.random.default_rng(count)
    cache.start("sound")
    cache.step({"sound": prompt(1, 9)})
    arena, read = cache.runner.arena, 0
    table = next(table for table in cache.geometry.tables if table.kind is TableKind.STATE)
    layers = [layer.index for layer in arena.layout.layers if layer.state is not None]
    for layer in layers:
        for field in arena.state_fields(
            arena.gather_states(torch.zeros((1, table.state_blocks), dtype=torch.int64)), layer
        ):
            copies = cache.fork("sound", "broken")
            arena.copy_blocks(*(torch.tensor(side) for side in zip(*copies, strict=True)))
            ids = torch.from_numpy(cache.tables["broken"][table.index][: table.state_blocks].astype(np.int64))
            states = arena.gather_states(ids[None])
            numbers = arena.state_fields(states, layer)[field][0]
            numbers[tuple(dice.integers(size) for size in numbers.shape)] = dice.choice([np.nan, np.inf, -np.inf])
            arena.scatter_states(ids[None], states)
            result = cache.step({"broken": prompt(2, count)})
            read += not result.finite.item()
            assert not result.finite.item() or bool(finite_states(arena, ids)), (layer, field)
            cache.end("broken")
    assert read > 0
