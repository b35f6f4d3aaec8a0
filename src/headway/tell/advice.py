"""Advice: what to set for a trace and a model, why, what it gains, and what to watch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from headway.cache import DEFAULT_PLACEMENT
from headway.sizes import counted, format_bytes
from headway.tell.comparison import refusals
from headway.tell.engines import VERSIONS, WATCH, Setup, flags
from headway.tell.facts import RunFacts, facts_of
from headway.tell.labels import memory_text
from headway.tell.lower import lower_steps, on_lower
from headway.tell.prompt_faults import PromptFault, on_faults
from headway.tell.run import CapacityPoint, RunRecord
from headway.tell.sentences import (
    format_seconds,
    on_capacity,
    on_growth,
    on_memory,
    on_refused,
    on_savings,
    on_waterfall,
    waits,
)

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
        running: Requests that run at once, for engines whose running requests hold states; 0 where nobody asked.
    """

    name: str
    values: Mapping[str, Any]
    run: RunRecord
    running: int = 0

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
        layout: The layout taken.
        policies: Other placements and evictions on that layout. They cost nothing and change no answer.
        best: The layout with the policies that gain most there, or the layout as it is.
        changes: Changes of one other setting from there.
        engines: By engine: as it comes today, on the new layout, and with its best settings.
        refused: Why no larger decode-context-parallel size was run; empty where all were.
        absent: By engine that was not run: why not.
        faults: What in the prompts keeps known text from being reused.
        lower: Lower tiers of memory on that layout, one more at a time.
        capacity: What other sizes of memory reuse with the best settings; empty where nobody asked.
    """

    today: Variant
    layouts: Sequence[Variant]
    layout: Variant
    policies: Sequence[Variant]
    best: Variant
    changes: Sequence[Variant]
    engines: Mapping[str, Sequence[Variant]] = field(default_factory=dict)
    refused: str = ""
    absent: Mapping[str, str] = field(default_factory=dict)
    faults: Sequence[PromptFault] = ()
    lower: Sequence[Variant] = ()
    capacity: Sequence[CapacityPoint] = ()

    @property
    def variants(self) -> list[Variant]:
        """All runs, each once, the layouts first."""
        return [
            *self.layouts,
            *self.policies,
            *self.changes,
            *self.lower,
            *(variant for runs in self.engines.values() for variant in runs),
        ]


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
    parts = ["# Advice", "", *_now(found), ""]
    parts += ["## What to change in the prompts", "", *on_faults(list(found.faults)), ""] if found.faults else []
    parts += ["## What to set", "", *_layout(found), "", *_policies(found)]
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
    requests, tokens = facts.requests, run.result.whole.prompt_tokens + run.result.refused_tokens
    requests += refusals(facts)
    yield (
        f"{counted(requests, 'request')}, {counted(tokens, 'prompt token')}; {run.model.name}, tp {run.layout['tp']}, "
        f"{memory_text(run)} per rank for the cache."
    )
    yield ""
    if facts.refused is not None:
        yield f"Without context parallelism, {on_refused(facts.refused)}"
    if not facts.requests:
        return
    yield (
        f"Without context parallelism, {facts.reused:.1%} of the prompt tokens would be reused, which saves "
        f"{facts.compute_saved:.1%} of the prefill compute. An endless memory would reuse {facts.endless:.1%}."
    )
    yield on_waterfall(replace(facts, faults=list(found.faults)))


def _layout(found: Study) -> Iterator[str]:
    chosen = found.layout
    sizes = ", ".join(f"{variant.name}: {_rate(variant.facts)}" for variant in found.layouts)
    if len(found.layouts) == 1:
        why = f": {found.refused}" if found.refused else ""
        yield f"Layout: tp {chosen.values['tp']}. Its tokens cannot be split further over these ranks{why}."
    elif chosen is found.today:
        yield f"Layout: leave it. Splitting tokens over ranks gains less than half a point ({sizes})."
    else:
        serves = chosen.facts.refused is None
        gain = 100 * (chosen.facts.reused - found.today.facts.reused)
        points = "" if found.today.facts.refused else f": {gain:+.1f} points"
        split = f"tp {chosen.values['tp']} with decode context parallelism {chosen.values['dcp']}"
        yield f"Layout: {split}{points} ({sizes})."
        if serves and found.today.facts.refused:
            yield "Smaller sizes refuse requests: they are no layouts for this traffic."
        yield "It is the smallest within half a point of compute of the best" + (
            " that serves all requests." if serves and any(one.facts.refused for one in found.layouts) else "."
        )
    if chosen.facts.refused is not None:
        yield (
            f"No layout here serves all requests in {memory_text(chosen.run)} per rank. The commands below refuse "
            f"{refusals(chosen.facts):,} of {chosen.facts.refused.of:,}: give "
            f"{format_bytes(chosen.facts.refused.needed, 1000, up=True)} per rank instead."
        )


def _policies(found: Study) -> Iterator[str]:
    """Which checkpoints to take and what goes first."""
    if not found.policies:
        return
    base, rates = found.layout.facts, [f"{one.name}: {one.facts.compute_saved:.1%}" for one in found.policies]
    tried = f"compute saved {base.compute_saved:.1%} as it is; {', '.join(rates)}"
    if found.best is found.layout:
        yield f"Policies: leave them. None that was tried gains half a point ({tried})."
    else:
        gain = 100 * (found.best.facts.compute_saved - base.compute_saved)
        yield f"Policies: {found.best.name}{_why(found)}. That saves {gain:.1f} points more compute ({tried})."
    yield ""


def _why(found: Study) -> str:
    """How little the kinds of checkpoint pay that are dropped."""
    kept = str(found.best.values.get("placement", "")).split(",")
    kinds = found.layout.run.result.kinds
    dropped = [name for name in kinds if kept != [""] and name in DEFAULT_PLACEMENT and name not in kept]
    shares = [f"{name} pays {kinds[name].reused / max(1, kinds[name].taken):.0%}" for name in dropped]
    return f" ({', '.join(shares)}: that share of its checkpoints was ever reused)" if shares else ""


def _rate(facts: RunFacts) -> str:
    if facts.refused is not None:
        return f"refuses {facts.refused.requests:,} of {facts.refused.of:,} requests"
    return f"{facts.reused:.1%}"


def _commands(found: Study, share: float | None, running: int, checkpoint: str | None) -> Iterator[str]:
    best, run, ratio = found.best, found.best.run, _best_ratio(found)
    sizes = (run.state_bytes, run.token_bytes)
    limits = {name: _top(runs).running or running for name, runs in found.engines.items()}
    slots = limits.get("sglang", running)
    sequences = limits.get("vllm", running)
    fewer = sequences if sequences < running else 0
    setup = Setup(checkpoint or _UNNAMED, best.values, run.memory, share, *sizes, ratio, slots, fewer)
    for engine, command in flags(setup).items():
        yield f"{engine} ({VERSIONS[engine]}):"
        yield ""
        yield f"    {command}"
        yield ""
    if run.state_bytes:
        yield (
            f"Headway and vLLM keep states and attention in one pool: there is no split to set. SGLang has a pool for "
            f"each: slots for {counted(slots, 'running request')} come out of it, and the rest is split, states to "
            f"attention as {ratio:.2g} to 1."
        )
    if slots < running:
        yield f"With {running} running requests, SGLang's slots for them would take the memory of the cache."


def _top(runs: Sequence[Variant]) -> Variant:
    """The best run of an engine."""
    return max(runs, key=lambda one: (-refusals(one.facts), one.facts.compute_saved))


def _gains(found: Study) -> Iterator[str]:
    yield f"- Headway: {_step(found.today.facts, found.best.facts)}"
    for engine, name in _NAMES.items():
        runs = found.engines.get(name)
        if runs:
            top = _top(runs)
            yield f"- {engine}: {_step(runs[0].facts, top.facts)} ({top.name})"
        else:
            yield f"- {engine}: not computed: {found.absent.get(name, 'this release does not imitate it here')}"
    yield ""
    yield from _savings(found)
    yield from _waits(found)
    yield (
        "Requests are replayed one after another (vLLM's with 16 in flight where its line names no other number), on "
        "their real prompts: differences between settings are more to be trusted than each figure alone."
        if found.best.run.result.latency is None
        else "Headway's requests arrive as recorded; imitated engines have no clock, theirs come one after another. "
        "Differences between settings are more to be trusted than each figure alone."
    )


def _savings(found: Study) -> Iterator[str]:
    """What the advised setting saves in time."""
    before, after = found.today.run.result.times, found.best.run.result.times
    if after is None:
        return
    yield on_savings(after)
    if before is not None and found.best is not found.today:
        gain = f"throughput rises by {before.throughput_gain:.0%}"
        yield f"As it is, reuse saves {format_seconds(before.saved)} of prefill, and {gain}."
    yield f"From a {after.estimate}."
    yield ""


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
        latency = variant.run.result.latency
        times = f"; first token within {format_seconds(latency.first_token.p95)} for 95%" if latency else ""
        if refusals(variant.facts) != refusals(base):
            yield f"- {variant.name}: {_rate(variant.facts)}{times}{_remark(variant)}"
            continue
        points = 100 * (variant.facts.reused - base.reused)
        yield f"- {variant.name}: {variant.facts.reused:.1%} ({points:+.1f} points){times}{_remark(variant)}"
    if found.capacity:
        yield f"- {on_capacity(found.capacity)}"
    yield from _on_lower(found)
    if base.future is not None and base.future - base.reused >= _WORTH:
        points = 100 * (base.future - base.reused)
        yield f"- knowing the future: {base.future:.1%} ({points:+.1f} points): what better choices could win"


def _on_lower(found: Study) -> Iterator[str]:
    """What lower tiers of memory bring, one more at a time."""
    facts = [variant.facts for variant in (found.best, *found.lower)]
    if text := on_lower(lower_steps(facts, range(len(facts)))):
        yield f"- {text}"


def _remark(variant: Variant) -> str:
    if variant.name in ("fp8 attention entries", "bf16 states"):
        return "; changes what the model computes: check its quality first"
    return f"; {format_bytes(variant.run.memory, 1000)} per rank" if variant.run.memory else ""


def _watch(facts: RunFacts) -> Iterator[str]:
    line = f"Expect a hit rate of about {facts.reused:.0%}" if facts.endless else "Expect no hits"
    line += "." if facts.filled or not facts.memory.limit else "; the memory was not full for half of the trace."
    if facts.loss is not None:
        line += f" Most of what is lost is {facts.loss.name} ({facts.loss.share:.0%} of all tokens)."
    yield line
    for engine, metrics in WATCH.items():
        yield ""
        yield f"{engine}:"
        yield from (f"- {metric}" for metric in metrics)


def _best_ratio(found: Study) -> float:
    """SGLang's split: that of its best run where it was imitated, else what this cache settled at."""
    preset = str(_top(found.engines["sglang"]).values["preset"]) if found.engines.get("sglang") else ""
    ratio = preset.partition("memory_ratio=")[2]
    return float(ratio) if ratio else split_of(found.best.run)


def _step(before: RunFacts, after: RunFacts) -> str:
    if refusals(before) or refusals(after):
        return f"{_refusing(before)} -> {_refusing(after)}"
    points, compute = 100 * (after.reused - before.reused), 100 * (after.compute_saved - before.compute_saved)
    if abs(points) < 100 * _WORTH and abs(compute) < 100 * _WORTH:
        return f"{before.reused:.1%} of tokens as it is; nothing here changes that by half a point"
    return (
        f"{before.reused:.1%} -> {after.reused:.1%} of tokens ({points:+.1f} points), compute saved "
        f"{before.compute_saved:.1%} -> {after.compute_saved:.1%} ({compute:+.1f})"
    )


def _refusing(facts: RunFacts) -> str:
    if facts.refused is None:
        return f"serves all requests, {facts.reused:.1%} of tokens reused, compute saved {facts.compute_saved:.1%}"
    others = f", {facts.reused:.1%} of the tokens of the others reused" if facts.requests else ""
    return f"refuses {facts.refused.requests:,} of {facts.refused.of:,} requests{others}"
