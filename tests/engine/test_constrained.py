"""Constrained answers are the same whatever runs beside them, is drafted, preempted, failed, or forgotten."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from tests.engine.ranks.rank_executor import ThreadRanks
from tests.engine.test_drafts_against_generate import Driver, texts
from tests.runtime.drafting.tiny_drafters import TOKENS, save_tiny
from tests.runtime.parallel.rank_threads import layout_of
from tests.runtime.tiny_models import tiny_model
from tests.server import tiny

from headway.cache import CacheConfig, PrefixCache
from headway.engine import DraftPlanner, EngineConfig, GenerationRequest, RunningRequest, Scheduler
from headway.runtime.drafting.acceptance import AcceptanceRule
from headway.runtime.drafting.drafter import Drafter
from headway.runtime.drafting.loading import load_drafter
from headway.runtime.forward.grammars import Grammars
from headway.runtime.interface import Constraint, SamplingParams
from headway.runtime.model.inspection import inspect_model

MODEL = "KimiLinear"
WORDS = tiny.tokenizer()
EOS = 0
"""The models know bytes alone: the first ends answers."""
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["colour", "n"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
FORMS: list[tuple[Constraint | None, str]] = [
    (Constraint("json", json.dumps(SCHEMA)), r'\{"colour":"(red|green)","n":[0-9]{1,2}\}'),
    (Constraint("choice", '["a long answer that is the only one", "another one that is as long"]'), "a.* (one|long)"),
    (Constraint("regex", "(abc|abd){4}[x-z]"), "(abc|abd){4}[x-z]"),
    (None, ".*"),
    (
        Constraint("grammar", 'start: "[" item ("," item)* "]"\nitem: /[0-9]{3}/'),
        r"\[([0-9]{3},)*([0-9]{0,3}|[0-9]{3}\])",
    ),
    (Constraint("json", '{"type": "string", "maxLength": 6}'), '".*"'),
]


def grammars() -> Grammars:
    return Grammars(WORDS, 256, [EOS], 4)


def request(driver: Driver, prompt: list[int], form: int, temperature: float) -> RunningRequest:
    order = len(driver.requests)
    params = SamplingParams(temperature=temperature)
    asked = GenerationRequest(np.array(prompt, dtype=np.int32), 50, params, constraint=FORMS[form][0])
    made = RunningRequest.start(asked, str(order), order, 0.0, eos=(EOS,))
    made.seed = 100 + form
    driver.requests.append(made)
    driver.scheduler.add(made)
    return made


def roughly(driver: Driver, rng: np.random.Generator) -> None:
    """Run to the end, with preemptions, failed steps, and ranks that know nothing any more."""
    steps = 0
    while True:
        steps += 1
        if steps % 6 == 0:
            driver.scheduler._starved = driver.scheduler.running[:1]
        scheduled = driver.scheduler.schedule()
        if scheduled is None:
            return
        answers = driver.executor.run(scheduled.work)
        if steps % 9 == 0:
            driver.scheduler.fail(scheduled, RuntimeError("after the tokens were chosen"))
        else:
            driver.scheduler.complete(scheduled, answers)
        assert driver.executor._grammars is not None
        if rng.random() < 0.1:
            driver.executor._grammars._places.clear()


def drafter_of(kind: str, folder: Path) -> Drafter:
    model = tiny_model(MODEL)
    return load_drafter(kind if kind == "lookup" else str(save_tiny(kind, model, folder)), model, None, TOKENS)


@pytest.mark.parametrize("kind", ["none", "lookup", "mtp", "dspark"])
def test_answers_are_those_of_a_quiet_engine_and_fit_their_forms(kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    prompts = [prompt for prompt, _ in texts(3)]
    said = [WORDS("a long answer that is the only one " * 2, add_special_tokens=False)["input_ids"], *prompts[1:]]
    expected = []
    for form, prompt in enumerate(said):
        quiet = Driver(MODEL, None, 2, EngineConfig(max_batched_tokens=300, max_running=1), grammars=grammars())
        asked = [request(quiet, prompt, form, temperature) for temperature in (0.0, 1.0)]
        quiet.run()
        expected += [one.answer.tolist() for one in asked]
    drafter = None if kind == "none" else drafter_of(kind, tmp_path / "draft")
    driver = Driver(MODEL, drafter, 5, EngineConfig(max_batched_tokens=64, max_running=4), grammars=grammars())
    asked = [request(driver, prompt, form, t) for form, prompt in enumerate(said) for t in (0.0, 1.0)]
    roughly(driver, rng)
    for one, right in zip(asked, expected, strict=True):
        assert one.answer.tolist() == right
        ended = one.finish_reason == "stop"
        assert ended == (right[-1] == EOS)
        text = WORDS.decode(right[:-1] if ended else right)
        assert re.fullmatch(FORMS[int(one.order) // 2][1], text, re.DOTALL) or not ended, text
    assert sum(one.finish_reason == "stop" for one in asked) >= 8
    counters = driver.scheduler.counters
    assert counters.preemptions > 0
    assert counters.failed_steps > 0
    if drafter is not None:
        assert 0 < counters.accepted_tokens <= counters.drafted_tokens


@pytest.mark.parametrize("rule", list(AcceptanceRule))
def test_two_ranks_say_what_one_says(rule: AcceptanceRule, tmp_path: Path) -> None:
    """Rank 0 alone knows of forms; what it chose goes to the others, and what it is asked comes as bytes."""
    found = []
    for ranks in (1, 2):
        model = tiny_model("Qwen3Next")
        source = str(save_tiny("mtp", model, tmp_path / str(ranks), seed=3))
        drafters = [load_drafter(source, model, None, TOKENS) for _ in range(ranks)][: 0 if rule == "match" else ranks]
        layout = inspect_model(model)
        groups = (*layout.groups, *(drafters[0].groups if drafters else ()))
        cache = PrefixCache(CacheConfig(groups, 2000, layout=layout_of(ranks, 4), block_tokens=16, cost=layout.cost))
        executor = ThreadRanks(model, cache.geometry, 2000, "a2a", drafters, rule, grammars=grammars())
        planner = DraftPlanner("mtp", TOKENS) if drafters else None
        scheduler = Scheduler(cache, EngineConfig(max_batched_tokens=64, max_running=4), planner=planner)
        asked = []
        for i, (form, _) in enumerate(FORMS):
            prompt = np.random.default_rng(i).integers(3, 256, 20 + i).astype(np.int32)
            asked.append(GenerationRequest(prompt, 40, SamplingParams(temperature=float(i % 2)), constraint=form))
        running = [RunningRequest.start(one, str(i), i, 0.0, eos=(EOS,)) for i, one in enumerate(asked)]
        for i, one in enumerate(running):
            one.seed = i
            scheduler.add(one)
        while (scheduled := scheduler.schedule()) is not None:
            scheduler.complete(scheduled, executor.run(scheduled.work))
        found.append([one.answer.tolist() for one in running])
        for one, (_, fits) in zip(running, FORMS, strict=True):
            text = WORDS.decode(one.answer[: -1 if one.finish_reason == "stop" else None].tolist())
            assert re.fullmatch(fits, text, re.DOTALL) or one.finish_reason == "length", text
    assert found[0] == found[1]
