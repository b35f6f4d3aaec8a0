"""The bench: cases take turns, the spread is told, and every case does what its name says."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from typer import BadParameter

from headway.bench import command, moves, workloads
from headway.bench.measure import Case, Figure, Work, measure
from headway.bench.moves import measure_moves
from headway.bench.workloads import CONFIGURATIONS, FOUR_GROUPS, Configuration, all_cases
from headway.cache import PrefixCache, Prompt
from headway.errors import ConfigError
from headway.replay.config.tiers import link_of
from headway.tiers.faults import Fault, FaultyStore
from headway.tiers.memory import MemoryStore


class Clock:
    """Nanoseconds that pass only when something is done."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


def test_cases_take_turns_and_only_the_operation_counts() -> None:
    clock, order = Clock(), list[str]()

    def case(name: str, nanoseconds: int, *, calls: int = 1, each: int = 1) -> Case:
        def operation() -> None:
            order.append(name)
            clock.now += nanoseconds

        def prepare() -> None:
            clock.now += 1_000_000

        return Case(name, lambda: Work(operation, prepare, calls, each), samples=6)

    figures = measure([case("a", 2000), case("b", 3000, calls=2), case("c", 8000, each=8)], rounds=3, clock=clock)
    assert {name: figure.median for name, figure in figures.items()} == {"a": 2.0, "b": 3.0, "c": 1.0}
    a_turn = ["a"] * 3 + ["b"] * 6 + ["c"] * 3  # one untimed and two samples
    assert order == a_turn * 3


def test_the_first_of_a_turn_is_not_timed() -> None:
    clock, costs = Clock(), iter([900, 10, 20, 900, 30, 40])

    def operation() -> None:
        clock.now += next(costs) * 1000

    figures = measure([Case("a", lambda: Work(operation), samples=4)], rounds=2, clock=clock)
    assert figures["a"] == Figure(median=25.0, low=17.5, high=32.5, mean=25.0, least=10.0, most=40.0)


def test_every_case_runs() -> None:
    cases = list(all_cases((1024,), (3,), (100,)))
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    assert {"full/request, 3 branch points", "kimi-k3/one row, extend and commit", "evict one of 100"} <= set(names)
    figures = measure([Case(case.name, case.start, samples=2) for case in cases if "1024" not in case.name], rounds=1)
    assert all(
        0 < figure.least <= figure.low <= figure.median <= figure.high <= figure.most for figure in figures.values()
    )


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[PrefixCache]:
    """The caches that a case makes, in order."""
    made: list[PrefixCache] = []
    init: Callable[..., None] = PrefixCache.__init__

    def noted(self: PrefixCache, *args: object, **options: object) -> None:
        init(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(PrefixCache, "__init__", noted)
    return made


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda c: c.name)
def test_the_path_has_as_many_branch_points_as_the_name_says(
    configuration: Configuration, caches: list[PrefixCache]
) -> None:
    work = workloads.branching_request(configuration, 20)
    (cache,) = caches
    work.operation()
    assert sum(cache.counters.evicted.values()) == 0, "all that parted is still there"
    path = cache.path(Prompt(workloads._prompt(16 * 21, 5)))
    parted = [part.stop for part in path.parts if part.branches > 1]
    assert len(parted) == 20
    events: list[object] = []
    cache.subscribe(events.append)
    work.operation()
    assert events == [], "the same again and again"


def test_an_eviction_is_counted_once(caches: list[PrefixCache]) -> None:
    work = workloads.evict(200)
    (cache,) = caches
    assert work.prepare is not None
    for _ in range(5):
        work.prepare()
        before = sum(cache.counters.evicted.values())
        work.operation()
        assert sum(cache.counters.evicted.values()) - before == work.each


@pytest.mark.parametrize("configuration", [*CONFIGURATIONS, FOUR_GROUPS], ids=lambda c: c.name)
def test_a_decoding_row_takes_no_block_in_the_timed_part(
    configuration: Configuration, caches: list[PrefixCache]
) -> None:
    work = workloads.decode_row(configuration)
    (cache,) = caches
    assert work.prepare is not None
    free = []
    for _ in range(4):
        work.prepare()
        free.append(cache.free_blocks)
        for _ in range(work.calls):
            work.operation()
            free.append(cache.free_blocks)
    taken = [before - after for before, after in pairwise(free)]
    assert all(count == 0 for i, count in enumerate(taken) if (i + 1) % (work.calls + 1)), taken


def test_the_figures_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    command.bench(as_json=True, quick=True, only="1K/lookup, cached")
    told = json.loads(capsys.readouterr().out)
    assert told["unit"] == "microseconds of processor time"
    assert set(told["figures"]) == {"full/1K/lookup, cached", "kimi-k3/1K/lookup, cached"}
    assert set(told["figures"]["full/1K/lookup, cached"]) == {"median", "low", "high", "mean", "least", "most"}


def test_the_figures_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    command.bench(quick=True, only="full/1K/lookup, cached")
    out = capsys.readouterr().out
    assert "quartiles" in out
    assert "full/1K/lookup, cached" in out


def test_a_name_that_no_case_has_is_refused() -> None:
    with pytest.raises(BadParameter, match="no case has 'nonsense'"):
        command.bench(only="nonsense")


def test_moves_are_measured_and_told_as_options_of_replay(tmp_path: Path) -> None:
    """What was written to be measured is removed; what is printed is read by replay."""
    found = measure_moves(tmp_path, None, 1 << 23)
    assert [figure.tier for figure in found] == ["host", "disk"]
    assert list(tmp_path.iterdir()) == []
    for figure in found:
        name, _, rates = figure.option.partition(" ")
        read = link_of(figure.tier, rates, 1, 1)
        assert name == f"--{figure.tier}-link"
        assert read.read == pytest.approx(figure.read, abs=1e7)
        assert read.write == pytest.approx(figure.write, abs=1e7)


def test_a_store_that_gives_back_something_else_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FaultyStore(MemoryStore(), [Fault("corrupt", "read", ".")])
    monkeypatch.setattr(moves, "open_store", lambda url: (None, store))
    with pytest.raises(ConfigError, match="not what was written"):
        measure_moves(None, "valkey://there", 1 << 23)
    assert list(store.names("")) == []


@pytest.mark.parametrize("options", [{"disk": Path(".")}, {"store": "valkey://x"}, {"tiers": True, "only": "1K"}])
def test_options_that_would_do_nothing_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(BadParameter):
        command.bench(**options)  # type: ignore[arg-type]


def test_the_command_prints_moves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command.bench(tiers=True, disk=tmp_path, quick=True, as_json=True)
    assert [figure["tier"] for figure in json.loads(capsys.readouterr().out)] == ["host", "disk"]
