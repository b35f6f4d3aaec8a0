"""The four rules, each run on the same recorded conversations, and what each of them reuses.

The first three are vLLM's rules as the preset `vllm` imitates them; the last is this cache as it is. Memory is endless
in all of them: what differs between two steps differs by the rule alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from headway.cache import ComputeCost, LayerSpec, ParallelLayout
from headway.formats import Trace
from headway.incident.sessions import BLOCK
from headway.replay.ask.catalogue import Model
from headway.replay.ask.record import record_of
from headway.replay.config import ReplayConfig
from headway.replay.replay import replay_trace
from headway.tell.run import RunRecord

__all__ = ["PUBLISHED", "STEPS", "Step", "configuration", "hits_of", "run_steps", "what_fails"]

_IN_VLLM = f"vllm,block_tokens={BLOCK},state_groups=3,running=1"


@dataclass(frozen=True)
class Step:
    """A step of the story.

    Attributes:
        name: The rule.
        why: What it does, in a sentence.
        preset: What `headway replay --preset` would be given; None for this cache.
    """

    name: str
    why: str
    preset: str | None


STEPS = (
    Step(
        "one geometry for all groups",
        "The size of a block is multiplied by the number of ranks in every group, also where nothing is split. States "
        "are kept under one size of blocks and looked for under another.",
        f"{_IN_VLLM},geometry=process,retention=common",
    ),
    Step(
        "geometry per group, states at the common multiple",
        "Every group has its own size of blocks. But a state is kept only where blocks of all groups end.",
        f"{_IN_VLLM},retention=common",
    ),
    Step(
        "states kept where requests resume",
        "A state is kept at the last end of one of its own blocks in each prompt, and where prompts part.",
        _IN_VLLM,
    ),
    Step(
        "Headway",
        "States are kept at the token: ends of prompts and answers, and where prompts part.",
        None,
    ),
)
PUBLISHED = (None, 0.1560, 0.7190, None)
"""Rates published for the same steps (vllm#53598), of other traffic."""
PUBLISHED_MOST = 0.8037
"""What was published as the most that could be reused there."""


def configuration(step: Step, groups: Sequence[LayerSpec], ranks: int) -> ReplayConfig:
    """What a step runs the conversations against.

    Args:
        step: The step.
        groups: Cache groups of the model and its drafter, on one rank before context parallelism.
        ranks: Ranks.
    """
    return ReplayConfig(groups, None, ParallelLayout(tp=ranks, dcp=ranks), preset=step.preset)


def run_steps(trace: Trace, groups: Sequence[LayerSpec], ranks: int) -> list[RunRecord]:
    """Run the conversations under each rule; one record for each of `STEPS`."""
    model = Model("tiny Kimi-K3", tuple(groups), ComputeCost(), "", 0, "")
    runs = []
    for step in STEPS:
        config = configuration(step, groups, ranks)
        runs.append(record_of(replay_trace(trace, config), config, model, trace))
    return runs


def hits_of(trace: Trace, groups: Sequence[LayerSpec], ranks: int) -> list[int]:
    """Tokens that each request reuses under the last rule."""
    config = configuration(STEPS[-1], groups, ranks)
    parts = [trace.head(count) for count in range(1, len(trace) + 1)]
    totals = [0, *(replay_trace(part, config).whole.hit_tokens for part in parts)]
    return [after - before for before, after in pairwise(totals)]


def what_fails(runs: Sequence[RunRecord]) -> list[str]:
    """What of the story the figures do not show, in words; empty if all of it holds."""
    rates = [run.result.whole.token_hit_rate for run in runs]
    faults = [] if rates[0] == 0 else [f"step 1 reuses {rates[0]:.2%}, and one geometry must find nothing"]
    for number, (before, after) in enumerate(pairwise(rates), 2):
        if after <= before:
            faults += [f"step {number} reuses {after:.2%}, no more than the step before it"]
    return faults
