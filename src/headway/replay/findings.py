"""What the figures say, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from headway.cache import Reason
from headway.replay.clock.latency import Latency
from headway.replay.labels import memory_text
from headway.replay.record import RunRecord
from headway.replay.result import FORGOTTEN, REFUSED
from headway.replay.show import MEANING, UNSAVABLE, format_seconds
from headway.replay.sizing import format_size

__all__ = [
    "REMEDIES",
    "best_run",
    "losses",
    "on_checkpoints",
    "on_memory",
    "on_memory_sizes",
    "on_prefixes",
    "on_rates",
    "on_reasons",
    "on_refused",
    "on_time",
    "on_waits",
    "on_waterfall",
    "waits",
    "waits_growth",
]

REMEDIES = {
    Reason.EVICTED.value: "give more memory, split the attention over more ranks (--dcp), or make states smaller",
    FORGOTTEN: "give more memory: these prefixes come back long after they had to go",
    Reason.STATE_NEVER_TAKEN.value: "add interval:N to --placement, or mark breakpoints in requests",
    Reason.LOOKAHEAD.value: "use a draft whose entries do not look ahead (DFlash, DSpark)",
    Reason.STILL_COMPUTING.value: "send what shares a prefix a little apart, or all of it to one server",
    REFUSED: "give at least the memory that the longest prompt needs",
}
"""What an operator can do about each line that a memory could save."""

_SMALL = 0.05
"""Percent of all tokens below which a loss is none to mend: it would be shown as 0.0."""
_FLAT = 0.02
_TREND = 5


def losses(run: RunRecord) -> list[tuple[str, int]]:
    """The lines that a cache could have saved, the largest first. What was refused is none of them: `on_refused`."""
    lines = [(name, n) for name, n in run.result.whole.lost.items() if name not in (*UNSAVABLE, REFUSED)]
    return sorted(lines, key=lambda line: -line[1])


def best_run(runs: Sequence[RunRecord]) -> int:
    """Which of the runs saves most compute; the first among equals."""
    return max(range(len(runs)), key=lambda i: (runs[i].result.whole.compute_saved, -i))


def on_rates(runs: Sequence[RunRecord], labels: Sequence[str]) -> str:
    """How much is reused, of what there is."""
    best = best_run(runs)
    whole, future = runs[best].result.whole, runs[best].result.clairvoyant
    share = whole.hit_tokens / max(1, whole.endless_tokens)
    who = _cache(runs[best]) if len(runs) == 1 else f"The best of {len(runs)} runs ({labels[best]})"
    text = (
        f"{who} reuses {whole.token_hit_rate:.1%} of the prompt tokens, which saves {whole.compute_saved:.1%} of the "
        f"prefill compute. An endless memory would reuse {whole.endless_hit_rate:.1%}, so {share:.0%} of what "
        f"this traffic has to give is taken."
    )
    if future is not None:
        text += f" A cache of the same size that knows the future reaches {future.token_hit_rate:.1%}."
    if len(runs) > 1:
        low = min(runs, key=lambda run: run.result.whole.compute_saved)
        text += f" The worst run reuses {low.result.whole.token_hit_rate:.1%}."
    return text


def on_waterfall(run: RunRecord) -> str:
    """Where the tokens of a run went, and what to do about the largest loss."""
    whole, lost = run.result.whole, losses(run)
    total = max(1, whole.prompt_tokens)
    never = sum(tokens for name, tokens in whole.lost.items() if name in UNSAVABLE)
    text = f"Of 100 prompt tokens, {100 * never / total:.1f} were new: no cache can save them."
    text += f" {on_refused(run)}" if run.result.refused else ""
    if not lost:
        return f"{text} All others were reused." if whole.hit_tokens else text
    name, tokens = lost[0]
    if 100 * tokens / total < _SMALL:
        return f"{text} Hardly any other token was lost."
    text += f" The largest loss is {name}, {100 * tokens / total:.1f} of 100: {MEANING[name]}."
    fixed = name == Reason.STATE_NEVER_TAKEN.value and run.policy.get("preset")
    return text if fixed or name not in REMEDIES else f"{text} To mend it: {REMEDIES[name]}."


def on_refused(run: RunRecord) -> str:
    """What became of requests that the memory could never hold; empty where there were none."""
    refused, whole = run.result.refused, run.result.whole
    if not refused:
        return ""
    share = 100 * whole.lost.get(REFUSED, 0) / max(1, whole.prompt_tokens)
    who = "request was" if refused == 1 else "requests were"
    return (
        f"{refused:,} of {whole.requests:,} {who} refused, with {share:.1f} of 100 tokens: larger than the memory. "
        f"{REMEDIES[REFUSED].capitalize()}."
    )


def waits(latency: Latency) -> str:
    """What requests waited for, in a line."""
    first = latency.first_token
    return (
        f"first token within {format_seconds(first.p50)} for half and {format_seconds(first.p95)} for 95% of the "
        f"requests; {latency.answer_tokens:,.0f} tokens answered a second"
    )


def on_waits(run: RunRecord) -> str:
    """How long requests wait by the estimates, and whether the traffic is more than the ranks can compute."""
    latency = run.result.latency
    if latency is None:
        return "This run has no times: each request ended before the next began."
    first, queue = latency.first_token, latency.queue
    text = (
        f"By estimate, half of the requests have their first token within {format_seconds(first.p50)} and 95% within "
        f"{format_seconds(first.p95)}. In the queue, 95% wait for at most {format_seconds(queue.p95)}."
    )
    growth = waits_growth(latency)
    return f"{text} {growth}" if growth else text


def waits_growth(latency: Latency) -> str:
    """That requests come faster than they are computed, if they do; else empty."""
    spans, quarter = latency.over_time, len(latency.over_time) // 4
    if quarter < 2:
        return ""
    early, late = (
        sum(span.p50 * span.requests for span in part) / sum(span.requests for span in part)
        for part in (spans[:quarter], spans[-quarter:])
    )
    if late <= 2 * early or 2 * latency.queue.p50 < latency.first_token.p50:
        return ""
    return (
        f"Waits grow, from {format_seconds(early)} in the first quarter of the requests to {format_seconds(late)} in "
        f"the last: requests come faster than they are computed. Then times follow from the length of the trace: more "
        f"ranks, or less traffic (--speed), say more."
    )


def on_reasons(runs: Sequence[RunRecord], labels: Sequence[str]) -> str:
    """What moves between the lines from run to run."""
    best = best_run(runs)
    worst = min(range(len(runs)), key=lambda i: runs[i].result.whole.compute_saved)
    first, last = dict(losses(runs[worst])), dict(losses(runs[best]))
    moved = {
        name: _share(runs[worst], tokens) - _share(runs[best], last.get(name, 0)) for name, tokens in first.items()
    }
    if best == worst or not moved:
        return "All runs lose the same."
    name = max(moved, key=lambda line: moved[line])
    return (
        f"From the worst run ({labels[worst]}) to the best ({labels[best]}), {name} falls by "
        f"{100 * moved[name]:.1f} points: {MEANING[name]}."
    )


def on_memory_sizes(runs: Sequence[RunRecord]) -> str:
    """What more memory buys, among runs that differ in nothing else."""
    limited = sorted((run for run in runs if run.memory), key=lambda run: run.memory or 0)
    if len(limited) < 2:
        return "Only one size of memory was tried."
    least, most = limited[0], limited[-1]
    gained = most.result.whole.token_hit_rate - least.result.whole.token_hit_rate
    text = (
        f"From {memory_text(least)} to {memory_text(most)} a rank, the hit rate goes from "
        f"{least.result.whole.token_hit_rate:.1%} to {most.result.whole.token_hit_rate:.1%}."
    )
    left = most.result.whole.endless_hit_rate - most.result.whole.token_hit_rate
    if gained < _FLAT:
        return text + " More memory hardly helps: what is lost is lost for other reasons."
    return text + f" {100 * left:.1f} points are left up to an endless memory that keeps every position."


def on_time(run: RunRecord) -> str:
    """Whether the hit rate still rises at the end."""
    spans = run.result.over_time
    if len(spans) < 2 * _TREND:
        return "The trace is short: the hit rate has no trend yet."
    first, last = (
        sum(s.hit_tokens for s in part) / max(1, sum(s.prompt_tokens for s in part))
        for part in (spans[: len(spans) // _TREND], spans[-(len(spans) // _TREND) :])
    )
    told = f"{first:.1%} of the tokens in the first fifth of the requests and {last:.1%} in the last"
    if last > first + _FLAT:
        return f"The hit rate rises: {told}. The memory was empty at first; trust the later figures more."
    if last < first - _FLAT:
        return f"The hit rate falls: {told}. The traffic outgrows the memory, or changes."
    return f"The hit rate is steady: {told}."


def on_prefixes(run: RunRecord) -> str:
    """Whether few prefixes lose much."""
    found = run.result.prefixes
    if not found.worst:
        return "No shared prefix lost anything."
    top = found.worst[:10]
    share = sum(stretch.lost_tokens for stretch in top) / max(1, found.lost_tokens)
    worst = top[0]
    text = (
        f"{found.lost_tokens:,} tokens of shared prefixes were computed again, in {found.stretches:,} stretches; the "
        f"{len(top)} worst are {share:.0%} of it. The worst is [{worst.start:,}, {worst.stop:,}), which "
        f"{worst.requests:,} requests pass: {worst.lost_tokens:,} tokens."
    )
    if share > 0.5:
        return f"{text} A few prefixes lose most: pin them, or mark their ends as breakpoints."
    return f"{text} The loss is spread: no single prompt is worth special care."


def on_memory(run: RunRecord) -> str:
    """What a checkpoint weighs, and what the memory is full of."""
    moments, text = run.result.memory, ""
    if run.checkpoint_bytes and run.token_bytes:
        equal = run.checkpoint_bytes / run.token_bytes
        text = (
            f"One checkpoint takes {format_size(run.checkpoint_bytes)} of a rank, as much as the attention of "
            f"{equal:,.0f} tokens. "
        )
    if not moments or not moments[-1].used:
        return text + "Nothing was kept."
    last = moments[-1]
    share = last.checkpoints / last.used
    return (
        f"{text}At the end {share:.0%} of the memory in use is checkpoints ({last.count:,} of them) and "
        f"{1 - share:.0%} is attention."
    )


def on_checkpoints(run: RunRecord) -> str:
    """Which kinds pay."""
    kinds = run.result.kinds
    taken = sum(kind.taken for kind in kinds.values())
    if not taken:
        return "This model needs no checkpoints: it can resume anywhere."
    unused = sum(kind.evicted_unused for kind in kinds.values())
    rates = {name: kind.reused / kind.taken for name, kind in kinds.items() if kind.taken >= 20}
    text = f"{taken:,} checkpoints were taken; {unused / taken:.0%} of them were evicted before anybody used them."
    if len(rates) < 2:
        return text
    best, worst = max(rates, key=lambda n: rates[n]), min(rates, key=lambda n: rates[n])
    return f"{text} {best} pays best ({rates[best]:.0%} reused), {worst} least ({rates[worst]:.0%})."


def _cache(run: RunRecord) -> str:
    preset = run.policy.get("preset")
    return f"The preset {preset}" if preset else "This cache"


def _share(run: RunRecord, tokens: int) -> float:
    return tokens / max(1, run.result.whole.prompt_tokens)
