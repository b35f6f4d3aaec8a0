"""Facts in words, the same wherever they are told."""

from __future__ import annotations

from collections.abc import Sequence

from headway.sizes import counted, format_bytes
from headway.tell.comparison import Comparison, refusals
from headway.tell.facts import Refused, RunFacts, Trend
from headway.tell.labels import memory_text
from headway.tell.latency import Latency, TimeSaved
from headway.tell.run import CapacityPoint, RunRecord

__all__ = [
    "format_seconds",
    "on_capacity",
    "on_checkpoints",
    "on_growth",
    "on_making",
    "on_memory",
    "on_memory_sizes",
    "on_prefixes",
    "on_rates",
    "on_reasons",
    "on_refused",
    "on_savings",
    "on_time",
    "on_waits",
    "on_waterfall",
    "waits",
]

_SMALL = 0.0005
"""Share of all tokens below which a loss is none to mend: it would be shown as 0.0 percent."""
_FLAT = 0.02
_ANSWERS = {
    "never": "No prompt contains an earlier answer (--outputs continuation reads the trace the other way).",
    "continuation": "A prompt that goes on from the end of an earlier one is taken to contain its answer.",
    "recorded": "Answers are as the trace has them.",
}


def format_seconds(seconds: float) -> str:
    """Write a time for people: `1.5 s`, `12 ms`."""
    if seconds < 1.0:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 7200:
        return f"{seconds:,.3g} s" if seconds < 600 else f"{seconds / 60:,.0f} min"
    return f"{seconds / 3600:,.1f} h"


def on_rates(found: Comparison) -> str:
    """How much is reused, of what there is; what was refused comes first."""
    best = found.facts[found.best]
    who = f"The best of {len(found.runs)} runs ({found.labels[found.best]})"
    if found.alone:
        who = "This cache" if best.cache == "this cache" else f"The preset {best.cache}"
    text = on_refused(best.refused) + " " if best.refused else ""
    if not best.endless:
        return f"{text}No prompt begins like an earlier one: there is nothing to reuse, whatever the memory."
    text += (
        f"{who} reuses {best.reused:.1%} of the prompt tokens, which saves {best.compute_saved:.1%} of the prefill "
        f"compute. An endless memory would reuse {best.endless:.1%}, so {best.taken:.0%} of what this traffic has to "
        f"give is taken."
    )
    if best.future is not None and best.future > best.reused:
        text += f" A cache of the same size that knows the future reaches {best.future:.1%}."
    if found.worst != found.best and found.facts[found.worst].reused < best.reused:
        text += f" The worst run reuses {found.facts[found.worst].reused:.1%}."
    refusing = len(found.facts) - sum(refusals(facts) == refusals(best) for facts in found.facts)
    if refusing:
        text += f" {counted(refusing, 'run')} refused more requests, and cannot be compared."
    return text


def on_waterfall(facts: RunFacts) -> str:
    """Where the tokens of a run went, and what to do about the largest loss."""
    text = f"Of 100 prompt tokens, {100 * facts.new:.1f} were new"
    if facts.faults:
        text += (
            f" where they stand, but {100 * facts.faults[0].share:.1f} of these are known text behind one that changes."
        )
    else:
        text += ": no cache of prefixes can save them."
    loss = facts.loss
    if loss is None:
        if facts.lost or not facts.reused:
            return f"{text} Hardly any other token was lost."
        return f"{text} All others were reused."
    text += f" The largest loss is {loss.name}, {100 * loss.share:.1f} of 100: {loss.meaning}."
    return f"{text} To mend it: {loss.remedy}." if loss.remedy else text


def on_refused(refused: Refused) -> str:
    """That requests cannot be served, and with which memory they could."""
    who = "request needs" if refused.requests == 1 else "requests need"
    return (
        f"{refused.requests:,} of {refused.of:,} {who} more than the whole memory and would be refused "
        f"({refused.share:.1%} of the prompt tokens). With {format_bytes(refused.needed, 1000, up=True)} per rank, all "
        f"would be served. The figures are those of the others."
    )


def waits(latency: Latency) -> str:
    """What requests waited for, in a line."""
    first = latency.first_token
    return (
        f"first token within {format_seconds(first.p50)} for half and {format_seconds(first.p95)} for 95% of the "
        f"requests; {latency.answer_tokens:,.0f} tokens answered a second"
    )


def on_savings(found: TimeSaved) -> str:
    """What reuse is worth in time: prefill saved, the first token, throughput."""
    first, before = found.first_token, found.first_token_before
    text = (
        f"By estimate, prefill takes {format_seconds(found.prefill)} without reuse, of which reuse saves "
        f"{format_seconds(found.saved)}. Alone on the ranks, half of the requests have their first token within "
        f"{format_seconds(first.p50)} instead of {format_seconds(before.p50)}, and 95% within "
        f"{format_seconds(first.p95)} instead of {format_seconds(before.p95)}. With {found.at_once} answers at once, "
        f"decoding takes {format_seconds(found.decoding)}, so throughput rises by {found.throughput_gain:.0%}"
    )
    if found.throughput_gain < 0.25 * found.saved / max(1e-12, found.prefill):
        return f"{text}: most of the time goes into answers, which no cache of prefixes shortens."
    return f"{text}."


def on_waits(latency: Latency | None, wait: Trend | None) -> str:
    """How long requests wait by the estimates, and whether the traffic is more than the ranks can compute."""
    if latency is None:
        return "This run has no times: each request ended before the next began."
    first, queue = latency.first_token, latency.queue
    text = (
        f"By estimate, half of the requests have their first token within {format_seconds(first.p50)} and 95% within "
        f"{format_seconds(first.p95)}. In the queue, 95% wait for at most {format_seconds(queue.p95)}."
    )
    return text if wait is None else f"{text} {on_growth(wait)}"


def on_growth(wait: Trend) -> str:
    """That requests come faster than they are computed."""
    return (
        f"Waits grow all along, from {format_seconds(wait.early)} in the first eighth of the requests to "
        f"{format_seconds(wait.late)} in the last: requests come faster than they are computed. Then times follow from "
        f"the length of the trace: more ranks, or less traffic (--speed), say more."
    )


def on_reasons(found: Comparison) -> str:
    """What moves between the lines from run to run."""
    if found.best == found.worst:
        return "No two runs that refuse equally few requests save different shares of the compute."
    if found.moved is None:
        return "No line of the best run is smaller than in the worst."
    line = found.moved.line
    return (
        f"From the worst run ({found.labels[found.worst]}) to the best ({found.labels[found.best]}), {line.name} falls "
        f"by {100 * found.moved.share:.1f} points: {line.meaning}."
    )


def on_memory_sizes(found: Comparison) -> str:
    """What more memory buys, among runs that differ in nothing else: those of the run in focus, or else the first."""
    lines = list(found.sizes.values())
    if not lines:
        return "Only one size of memory was tried."
    numbers = next((line for line in lines if found.focus in line), lines[0])
    small = [i for i in numbers if found.facts[i].refused]
    told = f"{memory_text(found.runs[small[-1]])} per rank does not serve all requests. " if small else ""
    numbers = [i for i in numbers if i not in small]
    if len(numbers) < 2:
        return f"{told}Fewer than two sizes of memory served all requests."
    least, most = found.facts[numbers[0]], found.facts[numbers[-1]]
    rates = [found.facts[i].reused for i in numbers]
    text = (
        f"{told}From {memory_text(found.runs[numbers[0]])} to {memory_text(found.runs[numbers[-1]])} per rank, the hit "
        f"rate goes from {least.reused:.1%} to {most.reused:.1%}."
    )
    if max(rates) - min(rates) < _FLAT and most.endless - most.reused >= _FLAT:
        return f"{text} More memory hardly helps: what is lost is lost for other reasons."
    left = most.endless - most.reused
    if left < _SMALL:
        return f"{text} That is all that an endless memory would reuse."
    return f"{text} {100 * left:.1f} points are left up to an endless memory that keeps every position."


_CAUSES = {
    "traffic": "What an endless memory would reuse goes the same way: it is the traffic that changes.",
    "filling": "The memory was not full at first: trust the later figures more.",
    "memory": "The memory is full, and most of what is lost was evicted: the traffic outgrows it.",
}


def on_capacity(curve: Sequence[CapacityPoint]) -> str:
    """The least memory of the curve that gives nearly what the most of it gives."""
    points = [(point.memory, point.lru_tokens if point.tokens is None else point.tokens) for point in curve]
    most = max(rate for _, rate in points)
    if not most:
        return f"Replayed in tokens alone, no size of memory up to {format_bytes(points[-1][0], 1000)} reuses anything."
    enough, rate = next((memory, rate) for memory, rate in points if rate >= 0.95 * most)
    return (
        f"Replayed in tokens alone, {format_bytes(enough, 1000)} per rank would reuse {rate:.1%} of the tokens, nearly "
        f"as much as {format_bytes(points[-1][0], 1000)} ({points[-1][1]:.1%}). A run at a size reuses within about a "
        f"point of its figure here."
    )


def on_time(facts: RunFacts) -> str:
    """How the hit rate goes over the whole trace."""
    trend = facts.hit_rate
    if trend is None:
        return "The trace is short: the hit rate has no trend yet."
    if trend.direction in ("rises", "falls"):
        text = (
            f"The hit rate {trend.direction}, from {trend.early:.1%} of the tokens in the first tenth of the requests "
            f"to {trend.late:.1%} in the last."
        )
        return f"{text} {_CAUSES[trend.cause]}" if trend.cause else text
    how = "is steady" if trend.direction == "steady" else "goes up and down"
    return f"The hit rate {how}: between {trend.low:.1%} and {trend.high:.1%} in every tenth of the requests."


def on_prefixes(facts: RunFacts) -> str:
    """Whether few prefixes lose much."""
    found = facts.prefixes
    if not found.worst:
        return "No shared prefix lost anything."
    worst = found.worst[0]
    text = (
        f"{counted(found.lost_tokens, 'token')} of shared prefixes were computed again, in "
        f"{counted(found.stretches, 'place')}. The worst is [{worst.start:,}, {worst.stop:,}), which "
        f"{worst.requests:,} requests pass: {counted(worst.lost_tokens, 'token')}."
    )
    if found.few:
        return (
            f"{text} The {len(found.worst)} worst are {found.share:.0%} of it, and many requests pass them: pin them, "
            f"or mark their ends as breakpoints."
        )
    return text


def on_memory(facts: RunFacts) -> str:
    """What a checkpoint weighs, and what the memory is full of."""
    found, text = facts.memory, ""
    if found.checkpoint_bytes and found.checkpoint_tokens:
        text = (
            f"One checkpoint takes {format_bytes(found.checkpoint_bytes, 1000)} of a rank, as much as the attention of "
            f"{found.checkpoint_tokens:,.0f} tokens. "
        )
    if not found.used:
        return text + "Nothing was kept."
    return (
        f"{text}At the end {found.checkpoint_share:.0%} of the memory in use is checkpoints ({found.checkpoints:,} of "
        f"them) and {1 - found.checkpoint_share:.0%} is attention."
    )


def on_checkpoints(facts: RunFacts) -> str:
    """Which kinds pay."""
    found = facts.checkpoints
    if not found.taken:
        return "This model needs no checkpoints: it can resume anywhere."
    text = (
        f"{found.taken:,} checkpoints were taken; {found.unused_share:.0%} of them were evicted before anybody used "
        f"them."
    )
    if found.best is None or found.worst is None or found.best.share == found.worst.share:
        return text
    return (
        f"{text} {found.best.name} pays best ({found.best.share:.0%} reused), {found.worst.name} least "
        f"({found.worst.share:.0%})."
    )


def on_making(run: RunRecord) -> list[str]:
    """How a run was made: what its figures rest on."""
    result, layout = run.result, ", ".join(f"{name} {size}" for name, size in run.layout.items())
    sizes = ", ".join(f"{group.name} {format_bytes(group.bytes, 1000)}" for group in run.groups)
    compute = f"Compute counts attention's quadratic part; its source: {run.cost['source']}."
    if run.cost["source"] == "assumed":
        compute = "This model's compute is not known: attention is taken to cost as much as the rest at 100k tokens."
    return [
        f"{run.model.name}, {layout}; bytes of one token or state on one rank, before context parallelism: {sizes} "
        f"(source: {run.model.source}).",
        *run.model.notes,
        _ANSWERS.get(result.outputs, f"Answers were read as: {result.outputs}."),
        f"Hits are whole blocks of {counted(run.trace['block_tokens'], 'token')} ({run.trace['format']}).",
        *_on_clock(run),
        compute,
    ]


def _on_clock(run: RunRecord) -> list[str]:
    if run.result.preset:
        return [f"Imitates {run.result.preset}; what is modelled and what is not: docs/replay.md."]
    clock, latency = run.policy.get("timing"), run.result.latency
    if latency is None:
        told = ["Requests end before the next begins."]
        return [*told, f"Times are estimates: {run.result.times.estimate}."] if run.result.times else told
    told = [f"Times are estimates: {latency.estimate}. Communication and the host's work take no time."]
    if clock:
        speed, most = clock["speed"].removeprefix("x"), clock["at once"]
        told.append(f"Arrivals are at {speed} x the recorded rate, at most {most} requests run at once.")
    return told
