"""Ranks x interleave x drafters x models: the tokens of one rank without a cache, and the hits of one rank with it.

Ranks either have all of the weights each, and split the tokens of full attention; or they share the weights, and groups
of them split the tokens.

A scheduler and a cache drive all ranks, with prefix hits, chunks, preemption and a fork inside a block. With a drafter,
rank 0 alone knows better than its random weights: so a rank that judged by itself would part from it at once.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine.ranks.rank_executor import ThreadRanks
from tests.runtime.drafting.published_drafts import published_reference, save_published
from tests.runtime.drafting.tiny_drafters import TOKENS, Improved, save_tiny
from tests.runtime.parallel.rank_threads import layout_of
from tests.runtime.tiny_models import generated, tiny_model

from headway.cache import CacheConfig, PrefixCache, Prompt
from headway.engine import DraftPlanner, EngineConfig, GenerationRequest, RunningRequest, Scheduler
from headway.runtime.drafting.drafter import Drafter
from headway.runtime.drafting.loading import load_drafter
from headway.runtime.interface import AS_COMPUTED, StoredTypes
from headway.runtime.model.inspection import inspect_model
from headway.runtime.model.layout import ModelLayout
from headway.runtime.model.stored import stored_layout
from headway.runtime.parallel import prefill_context
from headway.runtime.parallel.communicator import Rehearsal
from headway.runtime.parallel.tensor_parallel import layout_of_share, split_model

TOLERANCE = 1e-4
FLIP = 1e-2
"""For entries in fp8: a number that lies halfway between two is rounded either way."""
ROUNDED = 0.1
"""For states in bf16, beside an answer without rounding."""
BLOCKS = 4000
FAMILIES = {"KDA": "KimiLinear", "GatedDeltaNet": "Qwen3Next", "Mamba-2": "GraniteMoeHybrid", "window": "GptOss"}
"""What each model has beside full attention."""
SHARED = {"KDA": "KimiLinear", "GatedDeltaNet": "Qwen3NextWide", "Mamba-2": "GraniteMoeHybrid", "window": "Gemma3Wide"}
"""The same for models that four ranks can share. In the second and the last, heads of full attention are split too."""
SEED = 7


@dataclass(frozen=True)
class Case:
    """One place of the matrix."""

    model: str
    dcp: int = 1
    interleave: int = 1
    form: str = "ag_rs"
    drafter: str = "none"
    tp: int = 1
    pcp: int = 1
    types: StoredTypes = AS_COMPUTED

    @property
    def alike(self) -> int:
        """Ranks that a rank of prefill context parallelism consists of."""
        return self.dcp if self.tp == 1 else self.tp

    @property
    def ranks(self) -> int:
        return self.alike * self.pcp

    def __str__(self) -> str:
        pcp = f"-pcp{self.pcp}" if self.pcp > 1 else ""
        types = "".join(f"-{name}" for name in (self.types.entries, self.types.states) if name != "auto")
        return f"{self.model}-tp{self.tp}-dcp{self.dcp}{pcp}-{self.interleave}-{self.form}-{self.drafter}{types}"

    @property
    def entries(self) -> torch.dtype | None:
        """What entries are rounded to."""
        return torch.float8_e4m3fn if self.types.entries == "fp8_e4m3" else None


LAYOUTS = [(2, 1, "ag_rs"), (2, 16, "a2a"), (4, 1, "a2a"), (4, 16, "ag_rs")]
CASES = [Case(model, *layout) for model, layout in product(FAMILIES.values(), LAYOUTS)]
TENSORS = [
    *((2, 1, 1, "ag_rs"), (2, 2, 1, "a2a"), (2, 2, 16, "ag_rs")),
    *((4, 1, 1, "ag_rs"), (4, 2, 1, "ag_rs"), (4, 2, 16, "a2a"), (4, 4, 1, "a2a"), (4, 4, 16, "ag_rs")),
]
"""Ranks that share the weights, DCP, interleave and form of communication."""
CASES += [Case(model, *rest, tp=tp) for model, (tp, *rest) in product(SHARED.values(), TENSORS)]
CASES += [Case("KimiK3", *LAYOUTS[0]), Case("KimiK3", 4, 16, "a2a", tp=4), Case("KimiK3", 2, 1, "ag_rs", tp=4)]
PREFILLS = [
    *(
        Case(model, pcp=2, interleave=interleave)
        for model, interleave in zip(FAMILIES.values(), (1, 16, 1, 16), strict=True)
    ),
    *(Case(model, dcp, 4, "a2a", tp=2, pcp=2) for model, dcp in zip(SHARED.values(), (1, 2, 1, 2), strict=True)),
    *(
        Case("KimiK3", pcp=3),
        Case("KimiK3", 2, 16, tp=4, pcp=2),
        Case("Qwen3NextWide", 2, pcp=2),
        Case("DeepseekV2", tp=2, pcp=2),
    ),
    *(Case(model, pcp=2) for model in ("Lfm2", "FalconH1", "Llama4", "Mamba2", "Gemma4", "LlamaLong", "Phi3Long")),
]
"""Ranks that share the tokens of long forwards."""
CASES += PREFILLS
FP8 = StoredTypes("fp8_e4m3")
CASES += [Case("KimiLinear", *LAYOUTS[0], types=FP8), Case("GptOss", *LAYOUTS[3], types=FP8)]
CASES += [Case("KimiK3", 4, 16, "a2a", tp=4, types=FP8), Case("Qwen3NextWide", 2, 16, tp=4, types=FP8)]
CASES += [Case("FalconH1", pcp=2, types=FP8), Case("Qwen3Next", pcp=2, types=StoredTypes("auto", "bf16"))]
DRAFTERS = ("mtp", "dspark")
DRAFTED = [Case(model, *layout, kind) for model, layout, kind in product(FAMILIES.values(), LAYOUTS, DRAFTERS)]
DRAFTED += [Case(model, *rest, kind, tp) for model, (tp, *rest), kind in product(SHARED.values(), TENSORS, DRAFTERS)]
DRAFTED += [Case("KimiK3", 4, 16, "ag_rs", "latent", tp=4), Case("KimiK3", 2, 1, "a2a", "latent", tp=4)]
DRAFTED += [Case("KimiK3", 4, 1, "ag_rs", "latent"), Case("KimiK3", 2, 16, "ag_rs", "grouped", tp=4)]
DRAFTED += [Case("KimiLinear", drafter="mtp", pcp=2), Case("Qwen3Next", drafter="dspark", pcp=2)]
DRAFTED += [Case("KimiK3", 2, 1, drafter="latent", tp=2, pcp=2)]
DRAFTED += [Case("Qwen3Next", *LAYOUTS[0], "mtp", types=FP8), Case("GptOss", *LAYOUTS[1], "dspark", types=FP8)]


class Driver:
    """A scheduler over ranks, with a preemption every few steps, or `every` so many: drafts make fewer of them."""

    def __init__(self, case: Case, drafters: Sequence[Drafter] = (), every: int | None = None) -> None:
        model = tiny_model(case.model)
        layout = layout_of_ranks(case)
        parallel = layout_of(case.alike, case.interleave, case.dcp, case.pcp)
        groups = (*layout.groups, *(drafters[0].groups if drafters else ()))
        config = CacheConfig(groups, BLOCKS, layout=parallel, block_tokens=16, cost=layout.cost, check=True)
        self.cache = PrefixCache(config)
        ranks = (self.cache.geometry, BLOCKS, case.form, drafters)
        self.executor = ThreadRanks(model, *ranks, split=case.tp > 1, types=case.types)
        planner = DraftPlanner(drafters[0].name, drafters[0].most) if drafters else None
        engine = EngineConfig(max_batched_tokens=48, max_running=4)
        self.long_rope = layout.long_rope
        self.scheduler = Scheduler(self.cache, engine, planner=planner, long_rope=self.long_rope)
        self.requests: list[RunningRequest] = []
        self._steps, self._every = 0, every or (3 if drafters else 7)

    def add(self, prompt: list[int], count: int) -> None:
        order = len(self.requests)
        asked = GenerationRequest(np.array(prompt, dtype=np.int32), count, breakpoints=(max(1, len(prompt) // 2),))
        self.requests.append(RunningRequest.start(asked, str(order), order, 0.0))
        self.scheduler.add(self.requests[-1])

    def step(self) -> bool:
        self._steps += 1
        if self._steps % self._every == 0:  # as if the oldest had got no memory in the step before
            self.scheduler._starved = self.scheduler.running[:1]
        scheduled = self.scheduler.schedule()
        if scheduled is None:
            return False
        self.scheduler.complete(scheduled, self.executor.run(scheduled.work))
        return True


def layout_of_ranks(case: Case) -> ModelLayout:
    """What the driver knows of a rank, without any: from a model of shapes alone."""
    whole = inspect_model(tiny_model(case.model))
    if case.tp == 1:
        return stored_layout(whole, case.types)
    model = copy.deepcopy(tiny_model(case.model)).to("meta")
    model.config._experts_implementation = "batched_mm"
    split_model(model, Rehearsal(case.tp))
    return stored_layout(layout_of_share(whole, model, case.tp).over(case.dcp), case.types)


def prompts(model: str, entries: torch.dtype | None = None) -> list[tuple[list[int], int]]:
    """Two prompts on one stem that part inside a block, a short one, a follow-up to an answer, and the second again."""
    rng = np.random.default_rng(SEED)
    stem, left, right = (rng.integers(3, 256, n).tolist() for n in (70, 25, 30))
    answer, _ = generated(model, tuple(stem + left), 5, entries)
    followed = stem + left + answer + rng.integers(3, 256, 7).tolist()
    return [(stem + left, 5), (stem + right, 4), ([5], 8), (followed, 3), (stem + right, 2)]


def drive(case: Case, drafters: Sequence[Drafter] = ()) -> Driver:
    """The second prompt comes while the first is computed, the last two when all is answered."""
    driver = Driver(case, drafters)
    asked = prompts(case.model, case.entries)
    driver.add(*asked[0])
    for _ in range(3):
        driver.step()
    driver.add(*asked[1])
    driver.add(*asked[2])
    while driver.step():
        pass
    driver.add(*asked[3])
    driver.add(*asked[4])
    while driver.step():
        pass
    return driver


@pytest.fixture(autouse=True)
def _short_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks share even short forwards, so that what is shared begins and ends anywhere."""
    monkeypatch.setattr(prefill_context, "LEAST_SHARE", 2)


def hits(driver: Driver) -> list[int | None]:
    return [request.cached_tokens for request in driver.requests]


@cache
def one_rank(model: str) -> list[int | None]:
    """Hits of one rank, which must itself reuse and preempt for the matrix to mean anything."""
    driver = drive(Case(model))
    found = hits(driver)
    reused = (3, 4) if driver.long_rope else (1, 3, 4)  # the second begins with long frequencies, the first with short
    assert all(found[i] for i in reused), found
    assert driver.scheduler.counters.preemptions > 0
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_and_hits_are_those_of_one_rank(case: Case) -> None:
    driver = drive(case)
    for request in driver.requests:
        prompt = tuple(request.request.tokens.tolist())
        answer, first = generated(case.model, prompt, request.request.max_tokens, case.entries)
        assert request.answer.tolist() == answer
        tolerance = TOLERANCE if case.types is AS_COMPUTED else FLIP if case.types is FP8 else ROUNDED
        assert (driver.executor.first[prompt] - first).abs().max().item() < tolerance
    assert hits(driver) == one_rank(case.model)
    assert driver.scheduler.counters.preemptions > 0
    merge = driver.executor.ranked.ranks.merges[0]
    calls = [] if case.dcp == 1 else merge.ranks.exchange.calls[0]
    merged = calls.count("all_to_all" if case.form == "a2a" else "reduce_scatter")
    assert merged > 10 if case.dcp > 1 else merged == 0
    if case.pcp > 1:
        said = merge.tokens.ranks.exchange.calls[0]
        assert said.count("broadcast") >= 4  # once per forward that was shared, or twice with states
        assert said.count("take") == said.count("pass_on")
    stats = driver.cache.stats()
    assert (stats.leases, stats.leased) == (0, 0)


@pytest.mark.parametrize("case", DRAFTED, ids=str)
def test_drafts_change_neither_tokens_nor_hits(case: Case, tmp_path: Path) -> None:
    name = case.model
    save = save_tiny if case.drafter in DRAFTERS else save_published
    source = str(save(case.drafter, tiny_model(name), tmp_path, SEED))
    plain = [load_drafter(source, copy.deepcopy(tiny_model(name)), None, TOKENS) for _ in range(case.ranks)]
    asked = [tuple(prompt) for prompt, _ in prompts(name, case.entries)]
    answers = {prompt: generated(name, prompt, 8, case.entries)[0] for prompt in asked}
    improved = Improved(plain[0], answers, SEED)
    driver = drive(case, [improved, *plain[1:]])
    for request in driver.requests:
        truth = answers[tuple(request.request.tokens.tolist())]
        assert request.answer.tolist() == truth[: request.request.max_tokens]
    assert driver.scheduler.counters.accepted_tokens > 0
    lookahead = int(case.drafter == "mtp")
    for got, one in zip(hits(driver), one_rank(case.model), strict=True):
        assert got is not None
        assert one is not None
        assert one - lookahead <= got <= one
    assert driver.scheduler.counters.preemptions > 0
    assert (driver.cache.stats().leases, driver.cache.stats().leased) == (0, 0)
    if save is save_published:
        for tokens, proposed in improved.seen:
            assert proposed == published_reference(tmp_path, tiny_model(name), tokens, len(proposed))


def test_the_scenario_of_three_groups_on_eight_ranks(tmp_path: Path) -> None:
    """What stands in `tests/conformance/geometry.json`, computed: 8 ranks, target, draft and states of three kinds."""
    scenarios = json.loads((Path(__file__).parents[2] / "conformance" / "geometry.json").read_text())
    (scenario,) = (scenario for scenario in scenarios if scenario["name"] == "dcp8-three-groups")
    first, second = scenario["steps"]
    length, count = second["prompt"][0][2], second["output"]
    name, case = "KimiK3Wide", Case("KimiK3Wide", 8, 1, drafter="latent", tp=8)
    prompt = np.random.default_rng(SEED).integers(3, 256, length).tolist()
    source = str(save_published("latent", tiny_model(name), tmp_path, SEED))
    drafters = [load_drafter(source, copy.deepcopy(tiny_model(name)), None, TOKENS) for _ in range(8)]
    answers = {tuple(prompt): generated(name, tuple(prompt), count + 6)[0]}
    improved = Improved(drafters[0], answers, SEED)
    driver = Driver(case, [improved, *drafters[1:]], every=1000)
    tables = {group.spec.name: group.table for group in driver.cache.geometry.groups}
    for step in (first, second):
        hit = driver.cache.lookup(Prompt(np.array(prompt, dtype=np.int32)))
        driver.add(prompt, count + 6)
        while driver.step():
            pass
        request = driver.requests[-1]
        assert request.answer.tolist() == answers[tuple(prompt)]
        assert [request.cached_tokens] * 2 == step["expect"]["hit"]
    expected = second["expect"]["geometry"]
    for group, told in (("full", expected["target"]), ("draft", expected["draft"])):
        assert len(hit.blocks(tables[group].index)) == told["blocks"]
        assert tables[group].span == told["span"]
    assert hit.tokens == expected["kda"]["position"] == 16 * tables["full"].block_tokens
    assert len(hit.blocks(tables["state"].index)) == tables["state"].state_blocks > 0
    for tokens, proposed in improved.seen:
        assert proposed == published_reference(tmp_path, tiny_model(name), tokens, len(proposed))
