"""Facts as tables of text, for the terminal and the page alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway.sizes import counted, format_bytes
from headway.tell.comparison import Comparison, refusals
from headway.tell.facts import RunFacts
from headway.tell.latency import Latency
from headway.tell.run import Figures, ReplayResult
from headway.tell.sentences import format_seconds

__all__ = ["Table", "kinds", "latency", "prefixes", "rates", "reasons", "runs", "tiers", "waits", "waterfall"]


@dataclass(frozen=True)
class Table:
    """A table of text.

    Attributes:
        title: What it shows.
        head: Names of its columns.
        rows: Its cells.
        bold: Numbers of the rows that stand out.
        note: A line below it.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    bold: Sequence[int] = ()
    note: str = ""

    @property
    def left(self) -> list[bool]:
        """Which columns hold text and not figures: the first, those that explain, and a bar, which has no name."""
        return [number == 0 or name in ("", "why", "largest loss") for number, name in enumerate(self.head)]


def rates(result: ReplayResult, cache: str) -> Table:
    """How much is reused of a whole trace and of its second half, and how much could be."""
    rows = []
    halves = (
        ("whole trace", result.whole, result.clairvoyant),
        ("second half", result.second_half, result.second_half_clairvoyant),
    )
    for half, ours, future in halves:
        rows.append([f"{half}: {cache}", *_rates(ours)])
        if future is not None:
            rows.append([f"{half}: knowing the future", *_rates(future)])
        rows.append([f"{half}: endless memory", f"{ours.endless_hit_rate:.1%}", "", f"{ours.endless_compute:.1%}"])
    title = (
        f"{result.trace}: {counted(result.whole.requests, 'request')}, {counted(result.whole.prompt_tokens, 'token')}"
    )
    bold = [number for number, row in enumerate(rows) if row[0].endswith(f": {cache}")]
    return Table(title, ("", "tokens reused", "requests hit", "compute saved"), rows, bold)


def _rates(figures: Figures) -> list[str]:
    return [f"{rate:.1%}" for rate in (figures.token_hit_rate, figures.request_hit_rate, figures.compute_saved)]


def waterfall(facts: RunFacts) -> Table:
    """Where the prompt tokens went."""
    rows = [[line.name, f"{line.tokens:,}", f"{line.share:.1%}", line.meaning] for line in facts.waterfall]
    return Table("Where the prompt tokens went (whole trace)", ("line", "tokens", "share", "why"), rows)


def kinds(result: ReplayResult) -> Table:
    """What became of checkpoints."""
    head = ("kind", "taken", "reused at least once", "times resumed from", "evicted", "evicted unused")
    rows = [
        [name, *(f"{n:,}" for n in (kind.taken, kind.reused, kind.resumed, kind.evicted, kind.evicted_unused))]
        for name, kind in result.kinds.items()
    ]
    return Table("Checkpoints by kind of placement (whole trace)", head, rows)


def prefixes(facts: RunFacts, most: int) -> Table:
    """The stretches of shared prefixes that lose most."""
    found = facts.prefixes
    head = ("tokens of the prompt", "requests that pass", "first", "last", "computed again", "reused")
    rows = [
        [
            f"[{s.start:,}, {s.stop:,})",
            *(f"{n:,}" for n in (s.requests, s.first_request, s.last_request, s.lost_tokens, s.hit_tokens)),
        ]
        for s in found.worst[:most]
    ]
    title = f"Shared prefixes that lose most ({found.stretches:,} lose {counted(found.lost_tokens, 'token')} in all)"
    return Table(title, head, rows)


def tiers(result: ReplayResult) -> Table:
    """What each tier of lower memory gave, and what its moves took."""
    head = ("tier", "of one rank", "requests", "tokens read back", "read", "in", "written", "out", "not written")
    rows = []
    for tier in result.tiers:
        share = f"{tier.tokens / max(1, result.whole.prompt_tokens):.1%}"
        moves = [(tier.bytes_in, tier.seconds_in), (tier.bytes_out, tier.seconds_out)]
        told = [text for size, time in moves for text in (format_bytes(size, 1000), format_seconds(time))]
        counts = [f"{tier.requests:,}", f"{tier.tokens:,} ({share})", *told, f"{tier.skipped:,}"]
        rows.append([tier.name, format_bytes(tier.memory, 1000), *counts])
    declined = sum(tier.declined for tier in result.tiers)
    note = f"{counted(declined, 'request')} computed what a tier had: that was faster" if declined else ""
    return Table("Lower tiers of memory (whole trace, one rank)", head, rows, note=note)


def latency(found: Latency) -> Table:
    """What requests wait for, in percentiles."""
    times = {
        "in the queue": found.queue,
        "for the first token": found.first_token,
        "for each further token": found.each_token,
        "for the whole answer": found.total,
    }
    rows = [
        [name, *(format_seconds(seconds) for seconds in (t.p50, t.p90, t.p95, t.p99, t.mean))]
        for name, t in times.items()
    ]
    note = (
        f"{found.computed_tokens:,.0f} tokens computed and {found.answer_tokens:,.0f} answered a second, busy "
        f"{found.busy:.0%} of {format_seconds(found.seconds)}; {counted(found.preemptions, 'preemption')}; "
        f"{counted(found.waits, 'request')} waited for another's prefill, which saved "
        f"{counted(found.waited_tokens, 'token')}"
    )
    title = f"What requests would wait for, estimated ({counted(found.requests, 'request')})"
    return Table(title, ("", "half", "90%", "95%", "99%", "mean"), rows, note=note)


def runs(found: Comparison, *, brief: bool = False) -> Table:
    """Runs side by side, the best of them bold; `brief` leaves out what a terminal has no room for."""
    times = ("first token: half", "95%", "answer tokens per second") if found.timed else ()
    rates = ["tokens reused", "requests hit", "compute saved", "knowing the future", "endless memory"]
    rows, some = [], any(facts.refused for facts in found.facts)
    for run, facts, label in zip(found.runs, found.facts, found.labels, strict=True):
        future = "" if facts.future is None else f"{facts.future:.1%}"
        refused = [f"{refusals(facts):,} of {facts.requests + refusals(facts):,}"] if some else []
        cells = [label, *refused, *_rates(run.result.whole), future, f"{facts.endless:.1%}"]
        rows.append([*cells, *(_times(run.result.latency) if times else ()), _largest_loss(facts)])
    head = ["run", *(["refused"] if some else []), *rates, *times, "largest loss"]
    if brief:
        for row in (head, *rows):
            del row[3 if some else 2]  # requests hit
    estimate = next((run.result.latency.estimate for run in found.runs if run.result.latency), "")
    note = f"times are estimates: {estimate}" if estimate else ""
    title = f"{found.runs[0].result.trace}: {counted(len(found.runs), 'run')}"
    return Table(title, head, rows, () if found.alone else (found.best,), note)


def _times(found: Latency | None) -> list[str]:
    if found is None:
        return ["", "", ""]
    first = found.first_token
    return [format_seconds(first.p50), format_seconds(first.p95), f"{found.answer_tokens:,.0f}"]


def _largest_loss(facts: RunFacts) -> str:
    return f"{facts.loss.name} {facts.loss.share:.1%}" if facts.loss else ""


def reasons(found: Comparison) -> Table:
    """What each run loses to each reason."""
    rows = []
    for facts, label in zip(found.facts, found.labels, strict=True):
        shares = {line.name: line.share for line in facts.waterfall}
        rows.append([label, f"{facts.reused:.1%}", *(f"{shares.get(name, 0.0):.1%}" for name in found.lines)])
    head = ("run", "reused", *(name.replace("_", " ") for name in found.lines))
    return Table("Tokens lost by reason", head, rows, (found.best,))


def waits(found: Comparison) -> Table:
    """What requests wait for in each run that has times."""
    rows = []
    for number in found.timed:
        latency = found.runs[number].result.latency
        assert latency is not None
        first, queue, each = latency.first_token, latency.queue, latency.each_token
        times = (first.p50, first.p95, first.p99, queue.p95, each.p50)
        speeds = (f"{latency.answer_tokens:,.0f}", f"{latency.computed_tokens:,.0f}", f"{latency.busy:.0%}")
        seconds = (format_seconds(time) for time in times)
        rows.append([found.labels[number], *seconds, *speeds, f"{latency.preemptions:,}"])
    names = ("first token: half", "95%", "99%", "queue: 95%", "next tokens: half")
    bold = [found.timed.index(found.focus)] if found.focus in found.timed and len(rows) > 1 else []
    head = ("run", *names, "answered/s", "computed/s", "busy", "preempted")
    return Table("How long requests wait (estimates)", head, rows, bold)
