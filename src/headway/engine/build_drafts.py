"""From the options of drafting to a speculator, in this process or on ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from headway.cache import LayerSpec
from headway.engine.config import EngineConfig
from headway.engine.drafts import DraftPlanner, StepCosts
from headway.engine.measuring import measure_costs
from headway.errors import ModelError
from headway.runtime.communicator import Communicator
from headway.runtime.drafting.acceptance import AcceptanceRule
from headway.runtime.drafting.drafter import Drafter
from headway.runtime.drafting.loading import groups_without_weights, load_drafter
from headway.runtime.drafting.speculator import Speculator
from headway.runtime.loading import LoadedModel
from headway.runtime.runner import ModelRunner
from headway.runtime.selfcheck import SelfCheck

__all__ = ["DraftSource", "Measured", "planner_of", "require_verifiable", "speculator_of"]


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
        """
        return groups_without_weights(self.drafter, folder, dtype) if self.wanted else ()


@dataclass(frozen=True)
class Measured:
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
) -> tuple[Speculator | None, Measured | None]:
    """A speculator on `runner`, and what it costs there with up to `max_running` requests at once.

    All of `ranks` call this at the same time.
    """
    if drafter is None:
        return None, None
    speculator = Speculator(runner, drafter, AcceptanceRule(drafts.rule), ranks)
    return speculator, Measured(drafter.name, drafter.most, measure_costs(speculator, max_running))


def planner_of(measured: Measured | None) -> DraftPlanner | None:
    """Who chooses the lengths of drafts, or None where nobody drafts."""
    return None if measured is None else DraftPlanner(measured.name, measured.most, measured.costs)
