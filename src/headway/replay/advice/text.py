"""The advice in words."""

from __future__ import annotations

from collections.abc import Iterator

from headway.replay.advice.engines import VERSIONS, WATCH, Setup, flags
from headway.replay.advice.study import Study, Variant
from headway.replay.findings import losses, on_memory, on_waterfall, waits, waits_growth
from headway.replay.labels import memory_text
from headway.replay.record import RunRecord
from headway.replay.result import Figures
from headway.replay.show import format_seconds
from headway.replay.sizing import Hardware, format_size

__all__ = ["advice_text", "split_of"]

_WORTH = 0.005
_NAMES = {"vLLM": "vllm", "SGLang": "sglang"}


_UNNAMED = "PATH_OR_HUB_ID"


def advice_text(
    found: Study, hardware: Hardware, *, running: int = 16, checkpoint: str | None = None, draft: bool = False
) -> str:
    """What to set, why, what it gains, and what to watch: Markdown that reads well as plain text.

    Args:
        found: The runs.
        hardware: How the memory was given.
        running: Requests that run at once, for engines that give them slots.
        checkpoint: Path of the model's checkpoint, for the commands; None: a placeholder.
        draft: The runs have a draft, which the commands cannot name.
    """
    best = found.best
    parts = ["# Advice", "", *_now(found), "", "## What to set", "", *_layout(found), ""]
    parts += [f"Memory: {on_memory(best.run)}", "", *_commands(found, hardware, running, checkpoint)]
    parts += ["The draft is not in these commands.", ""] if draft else [""]
    parts += ["## What it gains", "", *_gains(found), "", "## What more would bring", "", *_options(found), ""]
    parts += ["## What to watch", "", *_watch(best.run), ""]
    return "\n".join(parts)


def split_of(run: RunRecord) -> float:
    """Memory of checkpoints over memory of attention that a run settled at: the mean over its second half."""
    moments = run.result.memory[len(run.result.memory) // 2 :]
    states = sum(moment.checkpoints for moment in moments)
    entries = sum(moment.used - moment.checkpoints for moment in moments)
    return states / entries if entries else 0.0


def _now(found: Study) -> Iterator[str]:
    run, whole = found.today.run, found.today.run.result.whole
    yield (
        f"{whole.requests:,} requests, {whole.prompt_tokens:,} prompt tokens; {run.model.name}, tp {run.layout['tp']}, "
        f"{memory_text(run)} a rank for the cache."
    )
    yield ""
    yield (
        f"Without context parallelism, {whole.token_hit_rate:.1%} of the prompt tokens would be reused, which saves "
        f"{whole.compute_saved:.1%} of the prefill compute. An endless memory would reuse {whole.endless_hit_rate:.1%}."
    )
    yield on_waterfall(run)


def _layout(found: Study) -> Iterator[str]:
    best, whole = found.best, found.best.run.result.whole
    sizes = ", ".join(f"{v.name}: {v.run.result.whole.token_hit_rate:.1%}" for v in found.layouts)
    if len(found.layouts) == 1:
        why = f": {found.refused}" if found.refused else ""
        yield f"Layout: tp {best.values['tp']}. Its tokens cannot be split further over these ranks{why}."
        return
    if best is found.today:
        yield f"Layout: leave it. Splitting tokens over ranks gains less than half a point ({sizes})."
        return
    gain = 100 * (whole.token_hit_rate - found.today.run.result.whole.token_hit_rate)
    yield (
        f"Layout: tp {best.values['tp']} with decode context parallelism {best.values['dcp']}: {gain:+.1f} points "
        f"({sizes}). It is the smallest within half a point of compute of the best."
    )


def _commands(found: Study, hardware: Hardware, running: int, checkpoint: str | None) -> Iterator[str]:
    best, run = found.best, found.best.run
    share = None if hardware.gpu is None else hardware.share
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
    before, after = found.today.run.result.whole, found.best.run.result.whole
    yield f"- Headway: {_step(before, after)}"
    for engine, name in _NAMES.items():
        runs = found.engines.get(name)
        if runs:
            top = max(runs, key=lambda v: v.run.result.whole.compute_saved)
            yield f"- {engine}: {_step(runs[0].run.result.whole, top.run.result.whole)} ({top.name})"
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
    if growth := waits_growth(after):
        yield growth
    yield ""


def _options(found: Study) -> Iterator[str]:
    base = found.best.run.result.whole
    for variant in found.changes:
        whole = variant.run.result.whole
        points = 100 * (whole.token_hit_rate - base.token_hit_rate)
        latency = variant.run.result.latency
        times = f"; first token within {format_seconds(latency.first_token.p95)} for 95%" if latency else ""
        yield f"- {variant.name}: {whole.token_hit_rate:.1%} ({points:+.1f} points){times}{_remark(variant)}"
    future = found.best.run.result.clairvoyant
    if future is not None:
        points = 100 * (future.token_hit_rate - base.token_hit_rate)
        yield f"- knowing the future: {future.token_hit_rate:.1%} ({points:+.1f} points): what better choices could win"


def _remark(variant: Variant) -> str:
    if variant.name in ("fp8 attention entries", "bf16 states"):
        return "; changes what the model computes: check its quality first"
    if variant.name == "plain LRU":
        return "; what eviction by value is worth here, with the sign turned"
    return f"; {format_size(variant.run.memory)} a rank" if variant.run.memory else ""


def _watch(run: RunRecord) -> Iterator[str]:
    expected, lost = run.result.whole.token_hit_rate, losses(run)
    line = f"Expect a hit rate of about {expected:.0%}, once the memory has filled."
    if lost:
        share = lost[0][1] / max(1, run.result.whole.prompt_tokens)
        line += f" Most of what is lost is {lost[0][0]} ({share:.0%} of all tokens)."
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
    top = max(runs, key=lambda v: v.run.result.whole.compute_saved)
    return float(str(top.values["preset"]).partition("memory_ratio=")[2])


def _step(before: Figures, after: Figures) -> str:
    points = 100 * (after.token_hit_rate - before.token_hit_rate)
    compute = 100 * (after.compute_saved - before.compute_saved)
    if abs(points) < 100 * _WORTH and abs(compute) < 100 * _WORTH:
        return f"{before.token_hit_rate:.1%} of tokens as it is; nothing here changes that by half a point"
    return (
        f"{before.token_hit_rate:.1%} -> {after.token_hit_rate:.1%} of tokens ({points:+.1f} points), compute saved "
        f"{before.compute_saved:.1%} -> {after.compute_saved:.1%} ({compute:+.1f})"
    )
