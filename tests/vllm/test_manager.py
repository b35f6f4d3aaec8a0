"""The manager under an emulated worker: whatever is shared, preempted or rejected, every request reads its own."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.vllm.standin import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    Request,
    SlidingWindowSpec,
    StandInScheduler,
    planned,
    worker_groups,
)
from tests.vllm.worker import EmulatedWorker

from headway.cache import ParallelLayout
from headway.errors import ConfigError
from headway.vllm.groups import read_groups
from headway.vllm.manager import KVCacheManager
from headway.vllm.options import Options

FULL = FullAttentionSpec(block_size=8)
LAYOUTS: dict[str, Callable[[int], list[Any]]] = {
    "full": lambda drafts: [FULL],
    "hybrid": lambda drafts: [MLAAttentionSpec(block_size=8), *[MambaSpec(num_speculative_blocks=drafts)] * 3],
    "windows": lambda drafts: [*[SlidingWindowSpec(block_size=8, sliding_window=25)] * 2, FULL],
    "chunks": lambda drafts: [ChunkedLocalAttentionSpec(block_size=8, attention_chunk_size=32), FULL],
    "spans": lambda drafts: [FULL, FullAttentionSpec(block_size=4), SlidingWindowSpec(block_size=8, sliding_window=5)],
    "all": lambda drafts: [
        FULL,
        SlidingWindowSpec(block_size=8, sliding_window=9),
        MambaSpec(num_speculative_blocks=drafts),
    ],
}


@dataclass
class World:
    """A manager, a scheduler around it and a worker below it."""

    manager: KVCacheManager
    scheduler: StandInScheduler
    worker: EmulatedWorker
    rng: random.Random
    hits: int = 0

    @classmethod
    def make(
        cls, seed: int, layout: str, *, blocks: int, drafts: int = 0, ahead: bool = False, dcp: int = 1, **options: Any
    ) -> World:
        """A small world in which all is random."""
        rng, config = random.Random(seed), planned(*LAYOUTS[layout](drafts), blocks=blocks)
        groups = read_groups(config, ParallelLayout(tp=dcp, dcp=dcp), lookahead=int(drafts > 0))
        manager = KVCacheManager(
            groups,
            Options(check=True, **options),
            max_model_len=512,
            steps_in_flight=1 + ahead,
            slots_ahead=drafts,
            most_under_way=64 * (1 + ahead),
            new_copy=lambda source, destination: SimpleNamespace(src_block_id=source, dst_block_id=destination),
        )
        worker = EmulatedWorker(
            worker_groups(config, shards=dcp, drafts=drafts > 0),
            sample=lambda rid, position: rng.randrange(9),
            accept=lambda given: rng.randrange(given + 1),
            slots_ahead=drafts,
            max_model_len=512,
        )
        return cls(manager, StandInScheduler(manager, drafts=drafts, ahead=ahead), worker, rng)

    def run(self, requests: int) -> None:
        """Serve random requests that share, stop, are aborted and come back."""
        rng, scheduler = self.rng, self.scheduler
        said = [[rng.randrange(1000) for _ in range(rng.randrange(20, 200))] for _ in range(4)]
        pending: list[tuple[Any, Any]] = []
        while requests or scheduler.requests or pending:
            while requests and len(scheduler.requests) < rng.randrange(1, 9):
                requests -= 1
                scheduler.add_request(self._request(f"r{requests}", rng.choice(said[-20:])))
            if scheduler.requests and rng.random() < 0.03:
                request = rng.choice(list(scheduler.requests.values()))
                said.append(list(request._all_token_ids))
                scheduler.finish(request)
            if rng.random() < 0.01:
                self.manager.reset_prefix_cache()
            out = scheduler.schedule()
            self.hits += sum(new.num_computed_tokens for new in out.scheduled_new_reqs)
            pending.append((out, self.worker.run(out)))
            while len(pending) > scheduler.ahead or (pending and not out.num_scheduled_tokens):
                said += [list(one._all_token_ids) for one in scheduler.update_from_output(*pending.pop(0))]
        self.worker.run(scheduler.schedule())  # the last exports are copied
        assert self.manager.cache.leases == self.manager.cache.stats().leased == 0

    def _request(self, name: str, base: list[int]) -> Request:
        rng = self.rng
        shared = len(base) if rng.random() < 0.4 else rng.randrange(1, len(base) + 1)
        tokens = base[:shared] + [rng.randrange(1000) for _ in range(rng.randrange(30))]
        stop, salt = rng.choice([-1, 5]), rng.choice([None, None, "s"])
        return Request(name, tokens[:400], rng.randrange(1, 25), cache_salt=salt, stop=stop)


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_request_reads_its_own_prefix(layout: str, drafts: int, ahead: bool) -> None:
    """Random sharing, chunks, small pools, preemption, aborts, drafts and one step of delay."""
    hits = 0
    for blocks in (300, 90):
        seed = int(np.random.default_rng().integers(1 << 30))
        print(f"seed {seed}, {blocks} blocks")
        world = World.make(seed, layout, blocks=blocks, drafts=drafts, ahead=ahead)
        world.run(30)
        assert world.worker.checked > 50
        hits += world.hits
    assert hits > 0


def test_tokens_split_over_ranks() -> None:
    """With decode context parallelism a page of attention covers more tokens."""
    world = World.make(1, "hybrid", blocks=150, dcp=2)
    world.run(40)
    assert world.hits > 0


def _served(world: World, name: str, tokens: list[int], answer: int = 4, **more: Any) -> tuple[Request, int]:
    """Serve one request alone. Returns it and its hit."""
    before, request = world.hits, Request(name, list(tokens), answer, **more)
    world.scheduler.add_request(request)
    while name in world.scheduler.requests:
        out = world.scheduler.schedule()
        world.hits += sum(new.num_computed_tokens for new in out.scheduled_new_reqs)
        world.scheduler.update_from_output(out, world.worker.run(out))
    return request, world.hits - before


def test_a_hit_reaches_the_last_token() -> None:
    """States are restored at any token; an answer is reused as far as it was computed."""
    world, prompt = World.make(0, "hybrid", blocks=200), list(range(100, 199))
    first, hit = _served(world, "first", prompt)
    assert hit == 0
    assert _served(world, "again", prompt)[1] == 98
    assert _served(world, "next", [*first._all_token_ids, 7, 8])[1] == 102
    assert _served(world, "salted", prompt, cache_salt="x")[1] == 0
    assert _served(world, "unread", prompt, skip_reading_prefix_cache=True)[1] == 0


def test_images_and_adapters_keep_prompts_apart() -> None:
    """The same placeholders with other content, and the same tokens under another adapter, are another prompt."""
    world, prompt = World.make(0, "full", blocks=200), [1, 2, *[9] * 50, 3, 4]

    def image(content: str) -> list[Any]:
        return [SimpleNamespace(mm_position=SimpleNamespace(offset=2, length=50), identifier=content)]

    def adapter(path: str) -> Any:
        return SimpleNamespace(lora_name="a", lora_int_id=1, lora_path=path)

    assert _served(world, "a", prompt, mm_features=image("cat"))[1] == 0
    assert _served(world, "b", prompt, mm_features=image("dog"))[1] == 2
    assert _served(world, "c", prompt, mm_features=image("cat"))[1] == 53
    assert _served(world, "d", prompt, lora_request=adapter("1"))[1] == 0
    assert _served(world, "e", prompt, lora_request=adapter("2"))[1] == 0
    assert _served(world, "f", prompt, lora_request=adapter("1"))[1] == 53
    assert _served(world, "g", prompt, prompt_embeds=object())[1] == 0


def test_a_request_is_told_what_became_of_its_wishes() -> None:
    """Pins, breakpoints and reasons go with the last output, in full to those who have a salt."""
    world, prompt = World.make(0, "hybrid", blocks=200), list(range(100, 160))
    asked = SimpleNamespace(extra_args={"kv_transfer_params": {"headway": {"pin": 40, "explain": True, "pni": 1}}})
    told: list[Any] = []
    free = world.manager.free
    world.manager.free = lambda request: (told.append(world.manager.explain(request)), free(request))[1]  # type: ignore[method-assign,func-returns-value]
    _served(world, "a", prompt, sampling_params=asked)
    _served(world, "b", prompt, sampling_params=SimpleNamespace(extra_args={"headway_explain": 1}), cache_salt="x")
    _served(world, "c", prompt)
    _served(world, "d", prompt, sampling_params=SimpleNamespace(extra_args={"headway_pin": 30}), cache_salt="x")
    _served(world, "e", prompt, sampling_params=SimpleNamespace(extra_args={"headway_pin": -3}), cache_salt="x")
    first, second, third, fourth, fifth = told
    assert first["wishes"] == [{"kind": "pin", "asked": 40, "outcome": "kept"}]
    assert first["losses"][0]["reason"] == "not_told"
    assert first["refused"] == ["unknown: pni; there are pin, pin_seconds, breakpoints, no_store, explain, dry_run"]
    assert second["losses"][0]["reason"] == "nothing_matched"
    assert third is fourth is None
    assert fifth == {"refused": ["pin must be true or a number of tokens up to 60, not -3"]}


def test_a_hit_on_a_state_that_is_not_written_yet_copies_its_source() -> None:
    """A checkpoint is written with the next step's copies; who resumes in that very step copies what it will be."""
    world, prompt = World.make(0, "hybrid", blocks=200), list(range(100, 107))  # shorter than a page
    scheduler = world.scheduler
    scheduler.add_request(Request("first", list(prompt)))
    out = scheduler.schedule()
    scheduler.update_from_output(out, world.worker.run(out))
    scheduler.add_request(Request("second", list(prompt)))
    out = scheduler.schedule()
    assert out.scheduled_new_reqs[0].num_computed_tokens == 6
    sources = [copy.src_block_id for copy in out.kv_cache_block_copies]
    assert len(set(sources)) == len(sources) - 3  # of each group of states one page is copied twice
    world.worker.run(out)


def test_states_inside_answers_are_refused_with_drafts() -> None:
    """A state after accepted drafts lies in pages that the worker alone knows."""
    World.make(0, "full", blocks=100, drafts=2, placement=["interval:7"])
    World.make(0, "hybrid", blocks=100, placement=["interval:7"])
    with pytest.raises(ConfigError, match="interval:N"):
        World.make(0, "hybrid", blocks=100, drafts=2, placement=["interval:7"])


def test_a_request_that_never_fits_is_named() -> None:
    """The scheduler ends it; nothing waits for it for ever."""
    world = World.make(0, "full", blocks=10)
    world.scheduler.add_request(Request("big", list(range(200))))
    world.scheduler.schedule()
    assert "needs 25 blocks" in world.manager.unservable["big"]


def test_a_step_that_never_came_back_counts_for_nothing() -> None:
    """Its requests can only be ended; what they had before stays."""
    world, prompt = World.make(0, "full", blocks=100), list(range(100))
    world.scheduler.add_request(request := Request("a", prompt, 3))
    out = world.scheduler.schedule()
    world.scheduler.update_from_output(out, world.worker.run(out))
    world.scheduler.schedule()  # lost
    later = world.scheduler.schedule()
    world.manager.commit(later, {}, [])
    assert world.manager.allocate_slots(request, 1) is None
    world.scheduler.finish(request)
    assert world.manager.cache.leases == 0
    assert _served(world, "b", prompt)[1] == 64


BREAKS: dict[str, Callable[[Any, pytest.MonkeyPatch], None]] = {
    "exports are never copied": lambda m, patch: patch.setattr(m, "take_kv_cache_block_copies", _without_exports(m)),
    "copies go to the wrong page": lambda m, patch: patch.setattr(m, "_new_copy", lambda s, d: _pair(s, d % 50 + 1)),
    "what a running state is after drafts is ignored": lambda m, patch: patch.setattr(
        type(m), "_commit", _trusting(type(m)._commit)
    ),
    "copies of a hit are left out": lambda m, patch: patch.setattr(m, "_copies", _Forgetful()),
}


class _Forgetful(dict[Any, Any]):
    """Takes anything and has nothing."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Nothing."""


def _without_exports(manager: Any) -> Callable[[], Any]:
    take = manager.take_kv_cache_block_copies

    def taken() -> Any:
        manager._late = []
        return take()

    return taken


def _pair(source: int, destination: int) -> Any:
    return SimpleNamespace(src_block_id=source, dst_block_id=destination)


def _trusting(commit: Callable[..., None]) -> Callable[..., None]:
    def always(self: Any, run: Any, tokens: Any) -> None:
        commit(self, run, tokens)
        run.whole = True

    return always


@pytest.mark.parametrize("broken", BREAKS)
def test_the_worker_sees_what_is_broken(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: each of these faults is found."""
    for seed in range(6):
        world = World.make(seed, "hybrid", blocks=200, drafts=2)
        BREAKS[broken](world.manager, monkeypatch)
        try:
            world.run(30)
        except AssertionError:
            return
    pytest.fail(f"nobody saw that {broken}")
