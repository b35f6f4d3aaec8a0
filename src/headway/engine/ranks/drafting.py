"""From the options of drafting to a speculator, on one rank or several, and what its drafts cost there."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from headway.cache import CacheGeometry, LayerSpec
from headway.engine.config import EngineConfig
from headway.engine.scheduling.drafts import DraftPlanner, StepCosts
from headway.errors import ModelError
from headway.runtime.drafting.acceptance import AcceptanceRule
from headway.runtime.drafting.drafter import Drafter, DraftRequest
from headway.runtime.drafting.loading import drafter_folder, groups_without_weights, load_drafter
from headway.runtime.drafting.speculator import Speculator
from headway.runtime.forward.batch import RunBatch
from headway.runtime.forward.grammars import Grammars
from headway.runtime.forward.runner import ModelRunner
from headway.runtime.identity import weights_identity
from headway.runtime.interface import SampleRow, SamplingParams
from headway.runtime.loading import LoadedModel
from headway.runtime.parallel.communicator import Communicator
from headway.runtime.selfcheck import SelfCheck

__all__ = ["DraftSource", "ReadyDrafter", "measure_costs", "planner_of", "require_verifiable", "speculator_of"]

_HISTORY = 64
"""Tokens before those that are computed, so that there is something to attend to."""
_ROWS = 8
"""The larger number of rows that is measured; beyond it costs go on in a straight line."""
_REPEATS = 3

Int32s = NDArray[np.int32]


@dataclass(frozen=True)
class DraftSource:
    """Who drafts, and how drafts are judged.

    Attributes:
        drafter: `none`, `lookup`, `mtp`, `dspark`, or the folder of a drafter.
        tokens: Most tokens of a draft; None takes the drafter's own number.
        rule: How drafts of sampled answers are judged.
    """

    drafter: str
    tokens: int | None
    rule: str

    @classmethod
    def of(cls, config: EngineConfig) -> DraftSource:
        """What the options say."""
        return cls(config.draft, config.draft_tokens, config.draft_rule)

    @property
    def wanted(self) -> bool:
        """Whether anybody drafts."""
        return self.drafter != "none"

    def load(self, loaded: LoadedModel) -> Drafter | None:
        """The drafter for a model, or None.

        Raises:
            ModelError: There is no such drafter, or it is for another model.
            ConfigError: More tokens than it can draft.
        """
        return load_drafter(self.drafter, loaded.model, loaded.folder, self.tokens) if self.wanted else None

    def groups(self, folder: Path | None, dtype: torch.dtype) -> tuple[LayerSpec, ...]:
        """What the drafter of a model in `folder` keeps in the cache, off its config alone.

        Raises:
            ModelError: There is no such drafter.
            ConfigError: More tokens than it can draft.
        """
        return groups_without_weights(self.drafter, folder, dtype, self.tokens) if self.wanted else ()

    def identity(self, folder: Path | None) -> bytes:
        """Which drafter that of a model in `folder` is: its entries are no use to another. Empty where it keeps none.

        Raises:
            ModelError: There is no such drafter.
        """
        if self.drafter in ("none", "lookup"):
            return b""
        own = drafter_folder(self.drafter, folder)
        return b"checkpoint" if own is None else weights_identity(str(own))


@dataclass(frozen=True)
class ReadyDrafter:
    """A drafter that is ready, and what it costs.

    Attributes:
        name: What it is called.
        most: Most tokens of a draft.
        costs: What forwards and drafts take.
    """

    name: str
    most: int
    costs: StepCosts


def require_verifiable(drafts: DraftSource, name: str, check: SelfCheck) -> None:
    """Refuse drafts for a model that cannot verify them.

    Raises:
        ModelError: It cannot.
    """
    if drafts.wanted and check.single_steps:
        raise ModelError(
            f"model {name!r} cannot continue by several tokens at once, so it cannot verify drafts: use --draft none"
        )


def speculator_of(
    drafts: DraftSource,
    runner: ModelRunner,
    drafter: Drafter | None,
    max_running: int,
    ranks: Communicator | None = None,
    grammars: Grammars | None = None,
) -> tuple[Speculator | None, ReadyDrafter | None]:
    """A speculator on `runner`, and what it costs there with up to `max_running` requests at once.

    All of `ranks` call this at the same time.
    """
    if drafter is None:
        return None, None
    speculator = Speculator(runner, drafter, AcceptanceRule(drafts.rule), ranks, grammars)
    return speculator, ReadyDrafter(drafter.name, drafter.most, measure_costs(speculator, max_running))


def planner_of(measured: ReadyDrafter | None) -> DraftPlanner | None:
    """Who chooses the lengths of drafts, or None where nobody drafts."""
    return None if measured is None else DraftPlanner(measured.name, measured.most, measured.costs)


def measure_costs(speculator: Speculator, max_running: int) -> StepCosts:
    """Time forwards of few and many rows and tokens, and drafts.

    Medians, and nothing wider or of more rows is cheaper: straight lines go on from these beyond what is measured. The
    memory of the cache is written to: call it before anything is in there. Rows for which it has no room are not
    measured; a single row that is too long for it meets its own blocks again.

    Args:
        speculator: The model and its drafter.
        max_running: Most requests that run at once.
    """
    runner, most = speculator.runner, speculator.drafter.most
    widest = DraftPlanner(speculator.drafter.name, most).widest
    counts = np.unique([1, 2, most + 1, widest])
    each = _blocks_of_a_row(runner.arena.geometry, _HISTORY + widest)
    fitting = max(1, min(_ROWS, max_running, runner.arena.blocks // max(1, each)))
    rows = np.unique([1, fitting])
    made = {n: _tables(runner.arena.geometry, n, _HISTORY + widest, runner.arena.blocks) for n in rows.tolist()}
    used = max(int(table.max()) for tables in made.values() for table in tables)
    runner.arena.data[: used + 1].zero_()  # what nobody has written may read as NaN; the rest stays untouched
    batches = [[_batch(made[n], n, c) for c in counts.tolist()] for n in rows.tolist()]
    seconds = [[_median(partial(runner.run, batch)) for batch in line] for line in batches]
    requests = [_requests(made[n], n, most) for n in rows.tolist()]
    draft = [_median(partial(_draft, speculator.drafter, asked)) for asked in requests]
    rising = np.maximum.accumulate(np.maximum.accumulate(np.array(seconds), axis=1), axis=0)
    return StepCosts(rows, counts, rising, np.maximum.accumulate(np.array(draft)))


@torch.no_grad()
def _draft(drafter: Drafter, requests: list[DraftRequest]) -> None:
    drafter.prepare(requests)
    drafter.propose(requests)


def _blocks_of_a_row(geometry: CacheGeometry, tokens: int) -> int:
    return sum(table.blocks_for(tokens) for table in geometry.tables)


def _tables(geometry: CacheGeometry, rows: int, tokens: int, blocks: int) -> list[Int32s]:
    """Block tables of rows that share nothing, as far as there are blocks."""
    made, first = [], 0
    for table in geometry.tables:
        count = rows * table.blocks_for(tokens)
        made.append((np.arange(first, first + count, dtype=np.int32) % blocks).reshape(rows, -1))
        first += count
    return made


def _batch(tables: list[Int32s], rows: int, count: int) -> RunBatch:
    return RunBatch(
        tokens=np.zeros(rows * count, dtype=np.int32),
        starts=np.full(rows, _HISTORY, dtype=np.int64),
        counts=np.full(rows, count, dtype=np.int64),
        tables=tables,
        fresh=np.zeros(rows, dtype=np.bool_),
        all_logits=np.ones(rows, dtype=np.bool_),
    )


def _requests(tables: list[Int32s], rows: int, count: int) -> list[DraftRequest]:
    # A text without repetition: a lookup then searches all of it and finds nothing, which is its dearest case.
    text = np.arange(_HISTORY, dtype=np.int32)
    sample = SampleRow(SamplingParams(temperature=0.0), 0, text, np.zeros(1, dtype=np.int32))
    return [DraftRequest(row, count, sample, False, [table[row] for table in tables]) for row in range(rows)]


def _median(action: Callable[[], object]) -> float:
    """Seconds that an action takes; a first run, which allocates, does not count."""
    action()
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return float(np.median(times))
