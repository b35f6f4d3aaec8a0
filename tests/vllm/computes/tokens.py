"""Answers with a prefix cache against answers without one, under random batching, sharing, preemption and small pools.

The same requests run three times: with no cache, with vLLM's own and with Headway's. Each answer is held against
transformers, which computes the whole text in one forward, and its tokens against those of the run without a cache.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.vllm.computes.models import OPTIONS, log_probabilities
from tests.vllm.computes.requests import Plan, plan_requests

__all__ = ["Outcome", "Run", "compare_caches", "table"]

_REQUESTS = 80
_MOST_AT_ONCE = 6


@dataclass(frozen=True)
class Run:
    """One cell.

    Attributes:
        family: The model.
        dtype: What it is computed in.
        near: Log-probabilities that differ by less are equal.
        cache: "none", "vllm", "headway", or "broken": Headway's with the worker told of no copies, which must be seen.
        blocks: Pages of the pool.
        chunk: Tokens per step.
        seed: Of the requests.
    """

    family: str
    dtype: str
    near: float
    cache: str
    blocks: int
    chunk: int
    seed: int


@dataclass(frozen=True)
class Outcome:
    """What a cell showed.

    Attributes:
        answers: Requests that ended.
        prompt: Tokens of their prompts.
        cached: Those of them that were not computed.
        preemptions: Requests preempted.
        gap: Largest difference of a token's log-probability from transformers.
        wrong: Tokens that are not the best by transformers, and by more than rounding.
        ties: Tokens that are not the best, by rounding.
    """

    answers: int
    prompt: int
    cached: int
    preemptions: int
    gap: float
    wrong: int
    ties: int


def compare_caches(run: Run, folder: Path, log: Path) -> tuple[Outcome, dict[str, list[int]]]:
    """Run a cell and judge it. Returns the tokens of each answer too.

    Raises:
        RuntimeError: The engine failed.
    """
    from tests.vllm.computes.engine import apart

    preemptions, answers = apart(_run, run, folder, log=log)
    outcome = Outcome(**apart(_judge, folder, run.near, preemptions, answers, log=log))
    return outcome, {name: answer["tokens"] for name, answer in answers.items()}


def _run(run: Run, folder: Path) -> tuple[int, dict[str, Any]]:
    from tests.vllm.computes.engine import Engine

    broken = run.cache == "broken"
    engine = Engine(
        folder,
        "headway" if broken else run.cache,
        max_num_seqs=_MOST_AT_ONCE,
        max_num_batched_tokens=run.chunk,
        num_gpu_blocks_override=run.blocks,
        dtype=run.dtype,
        **OPTIONS.get(run.family, {}),
    )
    if broken:
        take = engine.scheduler.kv_cache_manager.take_kv_cache_block_copies
        engine.scheduler.kv_cache_manager.take_kv_cache_block_copies = lambda: ([], take()[1])
    answers = _drive(engine, plan_requests(run.seed, _REQUESTS))
    return engine.preemptions, {name: asdict(answer) for name, answer in answers.items()}


def _drive(engine: Any, plans: list[Plan]) -> dict[str, Any]:
    """Ask as planned, each as soon as what it continues is known, and step until all have ended."""
    prompts: dict[int, list[int]] = {}
    done: dict[str, Any] = {}
    left, aborts, step = dict(enumerate(plans)), {}, 0
    while left or engine.busy:
        for i, plan in list(left.items()):
            prompt = _prompt(plan, prompts, done) if plan.arrives <= step else None
            if prompt is None:
                continue
            prompts[i] = prompt
            engine.ask(str(i), prompt, plan.length)
            del left[i]
            if plan.aborts:
                aborts[str(i)] = step + plan.aborts
        if engine.busy:
            done.update(engine.step())
        step += 1
        for name in [name for name, when in aborts.items() if when <= step]:
            del aborts[name]
            if name not in done:
                engine.abort(name)
    return done


def _prompt(plan: Plan, prompts: dict[int, list[int]], done: dict[str, Any]) -> list[int] | None:
    if plan.parent < 0:
        return plan.tail
    parent = prompts.get(plan.parent)
    if parent is None or (plan.turn and str(plan.parent) not in done):
        return None
    kept = parent + done[str(plan.parent)].tokens if plan.turn else parent[: plan.keep]
    return kept + plan.tail


def _judge(folder: Path, near: float, preemptions: int, answers: dict[str, Any]) -> dict[str, Any]:
    gap, wrong, ties = 0.0, 0, 0
    for answer in answers.values():
        text = answer["prompt"] + answer["tokens"]
        right = log_probabilities(folder, text)[len(answer["prompt"]) - 1 : -1]
        told = right[range(len(answer["tokens"])), answer["tokens"]]
        gap = max(gap, *(abs(a - b) for a, b in zip(told.tolist(), answer["logs"], strict=True)))
        behind = right.max(-1).values - told
        wrong += int((behind > 2 * near).sum())
        ties += int(((behind > 0) & (behind <= 2 * near)).sum())
    return {
        "answers": len(answers),
        "prompt": sum(len(answer["prompt"]) for answer in answers.values()),
        "cached": sum(answer["cached"] for answer in answers.values()),
        "preemptions": preemptions,
        "gap": gap,
        "wrong": wrong,
        "ties": ties,
    }


def table(found: dict[Run, Outcome]) -> str:
    """Cells as a table of Markdown, one row per family and cache."""
    lines = [
        "| family | cache | answers | prompts cached | preempted | largest difference | wrong tokens |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for key in dict.fromkeys((run.family, run.cache) for run in found):
        cells = [outcome for run, outcome in found.items() if (run.family, run.cache) == key]
        share = sum(one.cached for one in cells) / sum(one.prompt for one in cells)
        ties = sum(one.ties for one in cells)
        lines.append(
            f"| {key[0]} | {key[1]} | {sum(one.answers for one in cells)} | {share:.1%} "
            f"| {sum(one.preemptions for one in cells)} | {max(one.gap for one in cells):.1e} "
            f"| {sum(one.wrong for one in cells)}{f' and {ties} near ties' if ties else ''} |"
        )
    return "\n".join(lines)
