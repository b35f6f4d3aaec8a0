"""Drafts between scheduler, cache and device: right answers, the hits of a run without drafts, nothing leaks.

The device is the fake one (see `fakes`), with a drafter that knows the right answer and spoils a token now and then. It
keeps to the contract of executors: a state that has absorbed a rejected token is not written back.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.engine.bench import WORLDS, Bench
from tests.engine.fakes import VOCAB, FakeDevice, expected_answer

from headway.cache import TableKind
from headway.engine import (
    DraftPlanner,
    EngineConfig,
    RanksLostError,
    RowAnswer,
    RunningRequest,
    Scheduler,
    StepCosts,
    StepWork,
)
from headway.tiers import TierConfig
from headway.tiers.memory import MemoryStore

MOST = 4


class DraftingDevice(FakeDevice):
    """A fake device whose drafts are right with probability `skill`."""

    skill = 0.7
    dice = np.random.default_rng(0)
    drafted = 0

    def run(self, work: StepWork) -> list[RowAnswer]:
        self.before_step(work)
        step = work.step
        self.steps.append([int(c) for c in step.counts])
        self._copy(step.copies[:, 0], step.copies[:, 1])
        answers = [self._draft_row(work, i) if count > 0 else RowAnswer() for i, count in enumerate(step.counts)]
        if self.fail_when(work):
            raise RuntimeError("the device says no")
        for export in step.exports:
            self._copy(export.source, export.destination)
        return answers

    def _draft_row(self, work: StepWork, i: int) -> RowAnswer:
        step, known, spec = work.step, work.tokens[i].tolist(), work.samples[i]
        tables = [table[int(step.rows[i])] for table in work.tables]
        start, fresh = int(step.starts[i]), int(step.rows[i]) in set(np.asarray(step.fresh).tolist())
        draft: list[int] = []
        if spec is not None and (room := int(step.counts[i]) - len(known)) > 0:
            draft = self._proposal([*spec.prompt.tolist(), *spec.output.tolist()], room)
            self.drafted += 1
        before = [(m, row, m[row].copy()) for m, row in self._states(tables)]
        said = [self._row(tables, start, np.array(known, dtype=np.int32), fresh)]
        for k, token in enumerate(draft):
            said.append(self._row(tables, start + len(known) + k, np.array([token], dtype=np.int32), False))
        if spec is None:
            return RowAnswer(kept=len(known))
        right = next((k for k, token in enumerate(draft) if token != said[k]), len(draft))
        answer = said[: right + 1]
        end = next((k + 1 for k, token in enumerate(answer) if token in spec.ends), len(answer))
        valid = len(known) + end - 1
        kept = valid
        if before and draft and (valid < len(known) + len(draft) or spec.revocable):
            kept = 0
            for memory, row, held in before:
                memory[row] = held
        return RowAnswer(tuple(answer[:end]), kept, proposed=len(draft), accepted=min(end, right))

    def _states(self, tables):
        for table, row, memory in zip(self._geometry.tables, tables, self._memory, strict=True):
            if table.kind is TableKind.STATE:
                yield memory, row[: table.state_blocks]

    def _proposal(self, tokens: list[int], room: int) -> list[int]:
        room = int(self.dice.integers(room + 1))
        right = expected_answer(self._geometry, tokens, room, ignore_eos=True) if room else []
        return [t if self.dice.random() < self.skill else int(self.dice.integers(VOCAB)) for t in right]


class DraftingBench(Bench):
    def make_device(self) -> FakeDevice:
        return DraftingDevice(self.cache.geometry, self.blocks, host_blocks=self.host_blocks)


def bench(world: str, seed: int = 0, drafts: bool = True, **options: object) -> Bench:
    made = (DraftingBench if drafts else Bench)(WORLDS[world], **options)  # type: ignore[arg-type]
    if drafts:
        made.device.dice = np.random.default_rng(seed)
        made.scheduler = Scheduler(made.cache, made.config, planner=DraftPlanner("test", MOST), lower=made.lower)
    return made


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, length).tolist()


CONFIG = EngineConfig(max_batched_tokens=40, max_running=4)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("seed", range(3))
def test_answers_are_right_under_pressure_and_failures(world: str, seed: int):
    blocks = {"full": 40, "hybrid": 46, "window": 60, "chunk": 60, "all": 80, "state": 8}[world]
    placement = ("prompt_end", "answer_end", "junction", "interval:7")
    made = bench(world, seed, blocks=blocks, config=replace(CONFIG, max_retries=9), placement=placement)
    dice = np.random.default_rng(seed)
    made.device.fail_when = lambda work: dice.random() < 0.03
    requests = []
    for i in range(10):
        text = prompt(int(dice.integers(2, 30)), i % 3) + prompt(int(dice.integers(1, 5)), 50 + i)
        requests.append(made.add(text, int(dice.integers(1, 30)), ignore_eos=bool(i % 2)))
        made.step()
    made.run()
    made.check_right(*requests)
    counters = made.scheduler.counters
    assert 0 < counters.accepted_tokens < counters.drafted_tokens
    assert counters.generated_tokens == sum(len(request.answer) for request in requests)
    made.check_nothing_leaks()


def test_t11_loads_that_need_a_block_more_for_drafts_do_not_hold_each_other_up():
    """The pool has room for one of them and what it drafts."""
    store, texts = MemoryStore(), [prompt(39, seed) for seed in range(4)]
    first = bench("hybrid", blocks=120, config=CONFIG, stores=[(TierConfig("disk"), store)])
    for text in texts:
        first.add(text, 1)
    first.run()
    first.lower.close(10)
    for blocks in range(15, 22):
        second = bench("hybrid", blocks=blocks, config=CONFIG, stores=[(TierConfig("disk"), store)])
        requests = [second.add(text, 8, ignore_eos=True) for text in texts]
        second.run()
        second.check_right(*requests)
        assert [request.cached_tokens for request in requests] == [38] * 4
        second.check_nothing_leaks()


@pytest.mark.parametrize("world", ["full", "hybrid"])
def test_t25_nothing_of_a_draft_is_counted_for_who_was_loaded_into_its_row(world: str):
    """Rows are used again at once, by requests that were loaded: each gets all of its answer, and no token more."""
    store, texts = MemoryStore(), [prompt(30, seed) for seed in range(8)]
    options = {"blocks": {"full": 40, "hybrid": 50}[world], "config": CONFIG, "host_blocks": 60}
    loaded: set[str] = set()
    for server in range(2):
        made = bench(world, server, stores=[(TierConfig("disk"), store)], **options)
        requests = []
        for turn in range(2):
            for seed in np.random.default_rng(turn).permutation(8).tolist():
                requests.append(made.add(texts[seed], 3 + seed, ignore_eos=True))
                made.step()
            made.run()
        made.check_right(*requests)
        loaded.update(*(request.loaded for request in requests))
        counters = made.scheduler.counters
        assert 0 < counters.accepted_tokens < counters.drafted_tokens
        assert counters.generated_tokens == sum(len(request.answer) for request in requests)
        made.lower.close(10)
        made.check_nothing_leaks()
    assert loaded == {"host", "disk"}, "the test has no point"


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stop", [(), ("4",), ("ab", "7")])
def test_what_is_kept_of_an_answer_is_the_same_as_without_drafts(world: str, stop: tuple[str, ...]):
    """Whatever ends it: its limit, an end token, a stop string in the middle of accepted drafts."""
    hits: list[list[int | None]] = []
    for drafts in (False, True):
        made = bench(world, 5, drafts, blocks=400, config=CONFIG)
        if drafts:
            made.device.skill = 0.95
        texts = [prompt(9 + i, i) for i in range(8)]
        decode = lambda tokens: "".join(chr(ord("0") + t) for t in tokens)  # noqa: E731
        first = []
        for i, text in enumerate(texts):
            request = made.request(text, 6 + i, ignore_eos=i % 2 == 0, stop=stop)
            request.text._decode = decode
            first.append(request)
            made.scheduler.add(request)
        made.run()
        later = [made.add([*r.tokens[: r.known].tolist(), *prompt(3, 70)], 2) for r in first]
        made.run()
        made.check_right(*later)
        hits.append([request.cached_tokens for request in later])
        hits.append([request.known for request in first])
    assert hits[:2] == hits[2:]
    assert min(hits[0]) >= 9


def test_pending_tokens_stay_within_the_width():
    made = bench("hybrid", 1, blocks=200, config=CONFIG)
    made.device.skill = 0.4
    requests = [made.add(prompt(6, i), 60, ignore_eos=True) for i in range(3)]
    planner = made.scheduler._planner
    most = 0
    while made.step():
        most = max(most, *(r.pending for r in made.scheduler.running), 0) if made.scheduler.running else most
    assert 1 < most <= planner.widest
    made.check_right(*requests)


def test_a_perfect_drafter_answers_in_as_few_steps_as_can_be():
    made = bench("hybrid", 1, blocks=200, config=CONFIG)
    made.device._proposal = lambda tokens, room: expected_answer(made.cache.geometry, tokens, room, ignore_eos=True)
    request = made.add(prompt(6), 1 + 5 * (MOST + 1), ignore_eos=True)
    made.run()
    made.check_right(request)
    assert made.scheduler.counters.steps == 2 + 5  # the prompt is computed in two steps, for its checkpoint
    assert (request.drafted, request.accepted) == (5 * MOST, 5 * MOST)


def _with_one_that_settles() -> tuple[Bench, RunningRequest, RunningRequest]:
    """A bench on which one request has answered and is to catch up, beside one that goes on.

    With a stop string a state that has absorbed a draft is never kept, so the answer ends with its last tokens pending.
    """
    made = bench("hybrid", blocks=200, config=CONFIG)
    made.device._proposal = lambda tokens, room: expected_answer(made.cache.geometry, tokens, room, ignore_eos=True)
    first = made.add(prompt(5), 9, ignore_eos=True, stop=("never said",))
    second = made.add(prompt(7, 2), 60, ignore_eos=True)
    while first.finish_reason is None:
        assert made.step()
    assert first.draining
    return made, first, second


def test_when_ranks_are_lost_a_request_that_only_catches_up_is_gone_with_the_others():
    """Its answer was sent; the step in which its state was to catch up has failed, so its lease can only be aborted."""
    made, first, second = _with_one_that_settles()
    scheduled = made.scheduler.schedule()
    assert scheduled is not None
    assert first in scheduled.requests
    made.cache.fail(scheduled.work.step)
    news = made.scheduler.reject_all(RanksLostError("rank 1 is gone"), waiting=False)
    assert [update.request for update in news if update.error is not None] == [second]
    assert made.scheduler.idle
    made.check_nothing_leaks()


def test_drafts_stay_within_the_budget_of_a_step():
    made = bench("full", 2, blocks=200, config=EngineConfig(max_batched_tokens=7, max_running=4))
    requests = [made.add(prompt(4, i), 20, ignore_eos=True) for i in range(4)]
    made.run()  # the bench checks every step's tokens
    made.check_right(*requests)


# The planner alone.


def costs(draft: float) -> StepCosts:
    """A forward takes 10 and 1 a token, whatever the rows: straight lines through two points each."""
    rows, counts = np.array([1, 2]), np.array([1, 2])
    return StepCosts(rows, counts, np.array([[11.0, 12.0], [12.0, 14.0]]), np.array([draft, draft]))


def answering(survival: list[float], pending: int = 1):
    request = bench("full", drafts=False).request(prompt(5), 50)
    for token in range(3):
        request.accept(RowAnswer((token + 1,)))
    request.computed, request.observed = request.known - pending, request.known - 1
    request.survival = np.array(survival, dtype=np.float32)
    return request


@pytest.mark.parametrize(
    ("survival", "draft", "expected"),
    [
        ([1.0, 1.0, 1.0, 1.0], 1.0, 4),  # 5 tokens in 16 against 1 in 11
        ([0.5, 0.05, 0.0, 0.0], 0.5, 1),  # 1.5 in 12.5 against 1 in 11 and 1.55 in 13.5
        ([0.05, 0.0, 0.0, 0.0], 1.0, 0),  # 1.05 in 13 is worse than 1 in 11
        ([0.9, 0.8, 0.7, 0.6], 40.0, 0),  # too dear
    ],
)
def test_a_draft_is_as_long_as_pays(survival: list[float], draft: float, expected: int):
    assert DraftPlanner("test", 4, costs(draft)).plan([answering(survival)], 100) == [1 + expected]


def test_rows_with_pending_tokens_draft_less_so_that_all_run_as_one_forward():
    rows = [answering([1.0] * 4, pending=1), answering([1.0] * 4, pending=3)]
    assert DraftPlanner("test", 4, costs(1.0)).plan(rows, 100) == [5, 5]
    assert DraftPlanner("test", 4).plan(rows, 100) == [5, 7]


def test_a_request_that_was_given_up_is_tried_again():
    request, planner = answering([0.01] * 4), DraftPlanner("test", 4, costs(1.0))
    tries = [planner.plan([request], 100)[0] for _ in range(60)]
    assert tries[0] == 1
    assert max(tries) > 1


def test_what_was_accepted_teaches():
    request, planner = answering([1.0] * 4), DraftPlanner("test", 4)
    for _ in range(40):
        planner.learn(request, 4, 2, None)
    assert request.survival[:2].min() > 0.99
    assert request.survival[2:].max() < 0.01
    planner.learn(request, 2, 0, np.array([0.5, 0.5, 0.5, 0.5], dtype=np.float32))
    assert request.survival.tolist() == [0.5, 0.25, 0.125, 0.0625]


def test_an_opinion_that_does_not_come_true_is_discounted():
    sure = np.array([0.9, 0.9, 0.9, 0.9], dtype=np.float32)
    request, planner = answering([0.9, 0.8, 0.7, 0.6]), DraftPlanner("test", 4, costs(3.0))
    assert planner.plan([request], 100) == [5]
    for _ in range(60):
        planner.learn(request, 4, 0, sure)
    assert planner.plan([request], 100) == [1]
    tries = [planner.plan([request], 100)[0] for _ in range(400)]
    assert max(tries) > 1, "it is tried again"
