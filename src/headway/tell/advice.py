"""Advice: what to set for a trace and a model, why, what it gains, and what to watch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from headway.sizes import counted, format_bytes
from headway.tell.engines import VERSIONS, WATCH, Setup, flags
from headway.tell.facts import RunFacts, facts_of
from headway.tell.labels import memory_text
from headway.tell.run import RunRecord
from headway.tell.sentences import format_seconds, on_growth, on_memory, on_waterfall, waits

__all__ = ["Study", "Variant", "advice_text", "split_of"]

_WORTH = 0.005
_NAMES = {"vLLM": "vllm", "SGLang": "sglang"}
_UNNAMED = "PATH_OR_HUB_ID"


@dataclass(frozen=True)
class Variant:
    """One set of settings and what it gave.

    Attributes:
        name: What is changed, for people.
        values: Its values of the grid.
        run: The run.
    """

    name: str
    values: Mapping[str, Any]
    run: RunRecord

    @cached_property
    def facts(self) -> RunFacts:
        """The facts of the run."""
        return facts_of(self.run)


@dataclass(frozen=True)
class Study:
    """What was found.

    Attributes:
        today: The given settings without context parallelism.
        layouts: A run for each decode-context-parallel size.
        best: The layout taken.
        changes: Changes of one setting on that layout.
        engines: By engine: as it comes today, on the new layout, and with its best settings.
        refused: Why no larger decode-context-parallel size was run; empty where all were.
        absent: By engine that was not run: why not.
    """

    today: Variant
    layouts: Sequence[Variant]
    best: Variant
    changes: Sequence[Variant]
    engines: Mapping[str, Sequence[Variant]] = field(default_factory=dict)
    refused: str = ""
    absent: Mapping[str, str] = field(default_factory=dict)

    @property
    def variants(self) -> list[Variant]:
        """All runs, each once, the layouts first."""
        return [*self.layouts, *self.changes, *(variant for runs in self.engines.values() for variant in runs)]


def advice_text(
    found: Study,
    *,
    share: float | None = None,
    running: int = 16,
    checkpoint: str | None = None,
    draft: bool = False,
) -> str:
    """What to set, why, what it gains, and what to watch: Markdown that reads well as plain text.

    Args:
        found: The runs.
        share: Share of the GPU's memory for weights and cache where that is how the memory was given, else None.
        running: Requests that run at once, for engines that give them slots.
        checkpoint: Path of the model's checkpoint, for the commands; None: a placeholder.
        draft: The runs have a draft, which the commands cannot name.
    """
    best = found.best
    parts = ["# Advice", "", *_now(found), "", "## What to set", "", *_layout(found), ""]
    parts += [f"Memory: {on_memory(best.facts)}", "", *_commands(found, share, running, checkpoint)]
    parts += ["The draft is not in these commands.", ""] if draft else [""]
    parts += ["## What it gains", "", *_gains(found), "", "## What more would bring", "", *_options(found), ""]
    parts += ["## What to watch", "", *_watch(best.facts), ""]
    return "\n".join(parts)


def split_of(run: RunRecord) -> float:
    """Memory of checkpoints over memory of attention that a run settled at: the mean over its second half."""
    moments = run.result.memory[len(run.result.memory) // 2 :]
    states = sum(moment.checkpoints for moment in moments)
    entries = sum(moment.used - moment.checkpoints for moment in moments)
    return states / entries if entries else 0.0


def _now(found: Study) -> Iterator[str]:
    run, facts = found.today.run, found.today.facts
    yield (
        f"{counted(facts.requests, 'request')}, {counted(run.result.whole.prompt_tokens, 'prompt token')}; "
        f"{run.model.name}, tp {run.layout['tp']}, {memory_text(run)} per rank for the cache."
    )
    yield ""
    yield (
        f"Without context parallelism, {facts.reused:.1%} of the prompt tokens would be reused, which saves "
        f"{facts.compute_saved:.1%} of the prefill compute. An endless memory would reuse {facts.endless:.1%}."
    )
    yield on_waterfall(facts)


def _layout(found: Study) -> Iterator[str]:
    best = found.best
    sizes = ", ".join(f"{variant.name}: {variant.facts.reused:.1%}" for variant in found.layouts)
    if len(found.layouts) == 1:
        why = f": {found.refused}" if found.refused else ""
        yield f"Layout: tp {best.values['tp']}. Its tokens cannot be split further over these ranks{why}."
        return
    if best is found.today:
        yield f"Layout: leave it. Splitting tokens over ranks gains less than half a point ({sizes})."
        return
    gain = 100 * (best.facts.reused - found.today.facts.reused)
    yield (
        f"Layout: tp {best.values['tp']} with decode context parallelism {best.values['dcp']}: {gain:+.1f} points "
        f"({sizes}). It is the smallest within half a point of compute of the best."
    )


def _commands(found: Study, share: float | None, running: int, checkpoint: str | None) -> Iterator[str]:
    best, run = found.best, found.best.run
    sizes = (run.state_bytes, run.token_bytes)
    setup = Setup(checkpoint or _UNNAMED, best.values, run.memory, share, *sizes, _best_ratio(found), running)
    for engine, command in flags(setup).items():
        yield f"{engine} ({VERSIONS[engine]}):"
        yield ""
        yield f"    {command}"
        yield ""
    if run.state_bytes:
        yield (
            f"Headway and vLLM keep states and attention in one pool: there is no split to set. SGLang has a pool for "
            f"each: slots for {running} running requests come out of it, and the rest is split, states to attention as "
            f"{_best_ratio(found):.2g} to 1."
        )


def _gains(found: Study) -> Iterator[str]:
    yield f"- Headway: {_step(found.today.facts, found.best.facts)}"
    for engine, name in _NAMES.items():
        runs = found.engines.get(name)
        if runs:
            top = max(runs, key=lambda variant: variant.facts.compute_saved)
            yield f"- {engine}: {_step(runs[0].facts, top.facts)} ({top.name})"
        else:
            yield f"- {engine}: not computed: {found.absent.get(name, 'this release does not imitate it here')}"
    yield ""
    yield from _waits(found)
    yield (
        "Requests are replayed one after another (vLLM's with 16 in flight), on their real prompts: differences "
        "between settings are more to be trusted than each figure alone."
        if found.best.run.result.latency is None
        else "Headway's requests arrive as recorded; imitated engines have no clock, theirs come one after another. "
        "Differences between settings are more to be trusted than each figure alone."
    )


def _waits(found: Study) -> Iterator[str]:
    """What requests wait for, before and after, where arrival times count."""
    before, after = found.today.run.result.latency, found.best.run.result.latency
    if before is None or after is None:
        return
    yield "Times, estimated:"
    yield ""
    for name, one in (
        (("as it is", before), ("as advised", after)) if found.best is not found.today else (("", before),)
    ):
        yield f"- {name + ': ' if name else ''}{waits(one)}"
    yield ""
    yield f"From a {after.estimate}. Communication and the host's work take no time."
    if found.best.facts.wait is not None:
        yield on_growth(found.best.facts.wait)
    yield ""


def _options(found: Study) -> Iterator[str]:
    base = found.best.facts
    for variant in found.changes:
        points = 100 * (variant.facts.reused - base.reused)
        latency = variant.run.result.latency
        times = f"; first token within {format_seconds(latency.first_token.p95)} for 95%" if latency else ""
        yield f"- {variant.name}: {variant.facts.reused:.1%} ({points:+.1f} points){times}{_remark(variant)}"
    if base.future is not None:
        points = 100 * (base.future - base.reused)
        yield f"- knowing the future: {base.future:.1%} ({points:+.1f} points): what better choices could win"


def _remark(variant: Variant) -> str:
    if variant.name in ("fp8 attention entries", "bf16 states"):
        return "; changes what the model computes: check its quality first"
    if variant.name == "plain LRU":
        return "; what eviction by value is worth here, with the sign turned"
    return f"; {format_bytes(variant.run.memory, 1000)} per rank" if variant.run.memory else ""


def _watch(facts: RunFacts) -> Iterator[str]:
    line = f"Expect a hit rate of about {facts.reused:.0%}, once the memory has filled."
    if facts.loss is not None:
        line += f" Most of what is lost is {facts.loss.name} ({facts.loss.share:.0%} of all tokens)."
    yield line
    for engine, metrics in WATCH.items():
        yield ""
        yield f"{engine}:"
        yield from (f"- {metric}" for metric in metrics)


def _best_ratio(found: Study) -> float:
    """SGLang's split: that of its best run where it was imitated, else what this cache settled at."""
    runs = [v for v in found.engines.get("sglang", ()) if "memory_ratio=" in str(v.values.get("preset"))]
    if not runs:
        return split_of(found.best.run)
    top = max(runs, key=lambda variant: variant.facts.compute_saved)
    return float(str(top.values["preset"]).partition("memory_ratio=")[2])


def _step(before: RunFacts, after: RunFacts) -> str:
    points, compute = 100 * (after.reused - before.reused), 100 * (after.compute_saved - before.compute_saved)
    if abs(points) < 100 * _WORTH and abs(compute) < 100 * _WORTH:
        return f"{before.reused:.1%} of tokens as it is; nothing here changes that by half a point"
    return (
        f"{before.reused:.1%} -> {after.reused:.1%} of tokens ({points:+.1f} points), compute saved "
        f"{before.compute_saved:.1%} -> {after.compute_saved:.1%} ({compute:+.1f})"
    )
