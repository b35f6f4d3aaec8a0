"""One rank alone, in this process: what it answers to the driver's messages."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.runtime.drafting.tiny_drafters import save_tiny
from tests.server import tiny
from transformers import AutoModelForCausalLM

from headway.cache import CacheConfig, CacheGeometry, PrefixCache, Prompt
from headway.engine import EngineConfig, ParallelConfig, StepWork
from headway.engine.build import build_engine
from headway.engine.ranks import rank as rank_module
from headway.engine.ranks.drafting import DraftSource
from headway.engine.ranks.driver import RankedExecutor
from headway.engine.ranks.messages import (
    Answer,
    FaultSite,
    Load,
    Loaded,
    Prepare,
    Prepared,
    RankFault,
    StepDone,
    compact,
    decode,
    encode,
)
from headway.engine.ranks.rank import Rank
from headway.errors import ConfigError
from headway.runtime.drafting.mtp import MtpNetwork
from headway.runtime.interface import GREEDY, Constraint, SampleRow, StoredTypes
from headway.runtime.loading import layout_of_rank, load_model
from headway.runtime.model.memory import capacity
from headway.runtime.model.stored import stored_layout
from headway.runtime.parallel.distributed import CollectiveError, Rendezvous, TorchCommunicator, join_group, leave_group
from headway.runtime.selfcheck import SelfCheck, Verdict

NOBODY = DraftSource("none", None, "match")
ROOM = Prepare(blocks=200, block_tokens=16, tp=1, dcp=1, interleave=1, single_steps=False, max_running=1)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny.save_model(tmp_path_factory.mktemp("model"))
    save_tiny("mtp", AutoModelForCausalLM.from_pretrained(path), path / "drafts" / "mtp")
    return path


def load(source: Path, drafts: DraftSource = NOBODY) -> Load:
    return Load(
        source=str(source),
        dtype="fp32",
        ranks=1,
        tp=1,
        dcp=1,
        meeting=Rendezvous(),
        communication="ag_rs",
        timeout=60.0,
        drafts=drafts,
    )


def answer(rank: Rank, message: object) -> Answer:
    found = decode(rank.answer(encode(message)))
    assert isinstance(found, Answer)
    return found


@pytest.fixture(scope="module")
def ready(source: Path) -> Rank:
    rank = Rank(0, "cpu")
    for message, expected in ((load(source), Loaded), (ROOM, Prepared)):
        said = answer(rank, message).result
        assert isinstance(said, expected), said
    return rank


def some_work(source: Path, sample: SampleRow | None = None) -> StepWork:
    cache = PrefixCache(CacheConfig(load_model(str(source)).layout.groups, ROOM.blocks, block_tokens=16))
    tokens = np.arange(3, 12, dtype=np.int32)
    step = cache.extend([cache.lease(Prompt(tokens)).row], 5)
    return compact(StepWork(step, cache.tables, [tokens[:5]], [sample]), cache.geometry)


def test_rank_0_chooses_what_the_form_of_an_answer_allows(ready: Rank, source: Path) -> None:
    words = tiny.tokenizer()
    a, b = words("ab", add_special_tokens=False)["input_ids"]
    nothing = np.empty(0, dtype=np.int32)
    for output, expected in (([], a), ([a], b)):
        asked = SampleRow(GREEDY, 0, nothing, np.array(output, dtype=np.int32), constraint=Constraint("regex", "ab"))
        done = answer(ready, some_work(source, asked)).result
        assert isinstance(done, StepDone)
        assert done.rows[0].tokens == (expected,)


def test_every_answer_says_how_many_collectives_were_begun(
    ready: Rank, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchCommunicator, "begun", 31)
    done = answer(ready, some_work(source))
    assert isinstance(done.result, StepDone)
    refused = answer(ready, FaultSite.FORWARD)
    assert isinstance(refused.result, RankFault)
    assert (done.collectives, refused.collectives) == (31, 31)


@pytest.mark.parametrize(
    ("error", "site"), [(ValueError("bad"), FaultSite.FORWARD), (CollectiveError("bad"), FaultSite.COLLECTIVE)]
)
def test_a_fault_of_a_forward_or_of_a_collective_in_it_says_so(
    ready: Rank, source: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, site: FaultSite
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    assert ready._model is not None
    with monkeypatch.context() as patch:
        patch.setattr(ready._model.model, "forward", fail)
        assert answer(ready, some_work(source)).result == RankFault(type(error).__name__, "bad", site)
    assert isinstance(answer(ready, some_work(source)).result, StepDone), "the next message is answered all the same"


def test_a_fault_before_a_forward_says_so(ready: Rank, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("no copy")

    assert ready._executor is not None
    with monkeypatch.context() as patch:
        patch.setattr(ready._executor._runner.arena, "copy_blocks", fail)
        assert answer(ready, some_work(source)).result == RankFault("MemoryError", "no copy", FaultSite.BETWEEN)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[TorchCommunicator]:
    """A group of this process alone."""
    yield join_group(Rendezvous(str(tmp_path / "meeting")), 0, 1, torch.device("cpu"), 60.0)
    leave_group()


def test_collectives_are_counted_when_they_begin(alone: TorchCommunicator) -> None:
    before, part = TorchCommunicator.begun, torch.arange(3.0)
    assert alone.all_gather(part).tolist() == [[0, 1, 2]]
    assert alone.reduce_scatter(part[None]).tolist() == [0, 1, 2]
    assert alone.all_to_all(part[None]).tolist() == [[0, 1, 2]]
    assert TorchCommunicator.begun == before + 3
    with pytest.raises(AttributeError):
        alone.all_gather(None)  # type: ignore[arg-type]
    assert TorchCommunicator.begun == before + 3, "none had begun"
    leave_group()
    with pytest.raises(CollectiveError, match="ValueError"):
        alone.all_gather(part)
    assert TorchCommunicator.begun == before + 4


def test_memory_for_the_cache_is_what_the_drafter_leaves(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def left(_: object) -> int:
        return 1000 - sum(type(thing) is MtpNetwork for thing in gc.get_objects())

    monkeypatch.setattr(rank_module, "default_memory", left)
    gc.collect()
    without = answer(Rank(0, "cpu"), load(source)).result
    drafting = answer(Rank(0, "cpu"), load(source, DraftSource("mtp", None, "match"))).result
    assert isinstance(without, Loaded)
    assert isinstance(drafting, Loaded)
    assert drafting.memory == without.memory - 1


def test_a_rank_measures_and_stores_as_it_is_told(source: Path) -> None:
    rank, types = Rank(0, "cpu"), StoredTypes("fp8_e4m3", "bf16")
    loaded = answer(rank, msgspec.structs.replace(load(source), stored=types)).result
    assert isinstance(loaded, Loaded)
    assert loaded.quality is not None
    assert loaded.quality.types == types
    prepared = answer(rank, ROOM).result
    assert isinstance(prepared, Prepared)
    geometry = CacheGeometry(stored_layout(layout_of_rank(str(source), "fp32")[1], types).groups, block_tokens=16)
    assert prepared.bytes == capacity(ROOM.blocks, geometry).bytes
    assert answer(Rank(0, "cpu"), load(source)).result.quality is None  # type: ignore[union-attr]


# -- who says that there is no room -----------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", ["local", "processes"])
def test_memory_that_cannot_be_had_is_refused_by_name(source: Path, executor: str) -> None:
    """2^47 bytes are all that a process can address; blocks are large, so that there are few to keep account of."""
    config = EngineConfig(memory=1 << 47, block_tokens=1 << 18, parallel=ParallelConfig(executor=executor))
    with pytest.raises(ConfigError, match=r"there is no room for a cache of .* on cpu: lower --memory"):
        build_engine(str(source), config)


def test_what_fails_while_costs_are_measured_keeps_its_words(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the device says no")

    monkeypatch.setattr("headway.engine.ranks.drafting.measure_costs", fail)
    config = EngineConfig(memory=8 << 20, draft="mtp")
    with pytest.raises(RuntimeError, match=r"^the device says no$"):
        build_engine(str(source), config)
    rank, mtp = Rank(0, "cpu"), DraftSource("mtp", None, "match")
    assert isinstance(answer(rank, load(source, mtp)).result, Loaded)
    assert answer(rank, ROOM).result == RankFault("RuntimeError", "the device says no")


def test_a_model_that_continues_by_single_tokens_is_not_shared_by_its_tokens(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = SelfCheck(Verdict.STEPS_ONLY, 32, 0.0, 9.0, 0.0, 0.0)
    monkeypatch.setattr(RankedExecutor, "load", lambda _: [Loaded(8 << 20, (1,), steps)] * 2)
    with pytest.raises(ConfigError, match=r"pcp=2: model .* cannot continue by several tokens .* leave --pcp out"):
        build_engine(str(source), EngineConfig(parallel=ParallelConfig(pcp=2)))


def test_what_ranks_fail_with_while_they_make_room_keeps_its_words(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("rank 1: ValueError: the drafter says no")

    sound = SelfCheck(Verdict.SOUND, 32, 0.0, 0.0, 0.0, 0.0)
    monkeypatch.setattr(RankedExecutor, "load", lambda _: [Loaded(8 << 20, (1,), sound)])
    monkeypatch.setattr(RankedExecutor, "prepare", fail)
    with pytest.raises(RuntimeError, match=r"^rank 1: ValueError: the drafter says no$"):
        build_engine(str(source), EngineConfig(parallel=ParallelConfig(executor="processes")))
