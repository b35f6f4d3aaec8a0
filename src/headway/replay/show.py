"""A replay's result as tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headway.cache import Reason
from headway.replay.clock.latency import Latency
from headway.replay.result import FORGOTTEN, REFUSED, Figures, ReplayResult
from headway.replay.sizing import format_size

__all__ = ["MEANING", "UNSAVABLE", "format_seconds", "show"]

MEANING = {
    Reason.NOTHING_MATCHED.value: "no earlier prompt begins like this one",
    Reason.PARTED.value: "earlier prompts go on differently from here",
    Reason.LAST_TOKEN.value: "the last token is always computed",
    Reason.OTHER_NAMESPACE.value: "known under another model, adapter or salt",
    Reason.EVICTED.value: "was kept, and had to make room",
    FORGOTTEN: "so long gone that nothing of it is remembered",
    Reason.STATE_NEVER_TAKEN.value: "computed before, but no checkpoint was taken there",
    Reason.LOOKAHEAD.value: "a draft's entries depend on later tokens",
    Reason.STILL_COMPUTING.value: "a running request is computing it",
    Reason.TIER_MISSED.value: "no lower tier had it",
    Reason.TIER_FAILED.value: "a lower tier failed to load it",
    REFUSED: "the prompt is larger than the memory",
}
"""What each line of the waterfall means."""
UNSAVABLE = (Reason.NOTHING_MATCHED.value, Reason.PARTED.value, Reason.LAST_TOKEN.value, Reason.OTHER_NAMESPACE.value)
"""Lines that no memory could save."""
_BAR = 18
_MOMENTS = 24
_WORST = 5
_LEVELS = " ▁▂▃▄▅▆▇█"


def show(result: ReplayResult, console: Console, notes: Sequence[str] = (), finding: str = "") -> None:
    """Print a result, below the waterfall what it says in words, and at the end how it was made."""
    console.print(_rates(result))
    console.print(_waterfall(result.whole))
    if finding:
        console.print(finding, "", sep="\n", markup=False, highlight=False)
    if result.kinds:
        console.print(_kinds(result))
    if result.prefixes.worst:
        console.print(_prefixes(result))
    if result.latency is not None:
        console.print(_latency(result.latency))
    if result.memory:
        console.print(_memory(result))
    if result.over_time:
        console.print(_over_time(result))
    for note in notes:
        console.print(f"[dim]- {note}[/]")


def _rates(result: ReplayResult) -> Table:
    table = _table(f"{result.trace}: {result.whole.requests:,} requests, {result.whole.prompt_tokens:,} tokens")
    table.add_column("", no_wrap=True)
    for figure in ("tokens reused", "requests hit", "compute saved"):
        table.add_column(figure, justify="right")
    halves = (
        ("whole trace", result.whole, result.clairvoyant),
        ("second half", result.second_half, result.second_half_clairvoyant),
    )
    for half, ours, future in halves:
        who = result.preset.partition(",")[0] or "this cache"
        table.add_row(f"{half}: {who}", *_rate_cells(ours), style="bold")
        if future is not None:
            table.add_row(f"{half}: knowing the future", *_rate_cells(future))
        table.add_row(f"{half}: endless memory", f"{ours.endless_hit_rate:.1%}", "", f"{ours.endless_compute:.1%}")
    return table


def _table(title: str) -> Table:
    return Table(title=title, box=SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)


def _rate_cells(figures: Figures) -> tuple[str, ...]:
    rates = (figures.token_hit_rate, figures.request_hit_rate, figures.compute_saved)
    return tuple(f"{rate:.1%}" for rate in rates)


def _waterfall(figures: Figures) -> Table:
    """Where the tokens went: first refused, then what no memory could save, what this one lost, and what it reused."""
    table = _table("Where the prompt tokens went (whole trace)")
    for column, right in (("line", False), ("tokens", True), ("share", True), ("", False)):
        table.add_column(column, justify="right" if right else "left", no_wrap=True)
    table.add_column("why")
    total, done = max(1, figures.prompt_tokens), 0
    lines = [(name, figures.lost[name], "dim") for name in (REFUSED, *UNSAVABLE) if figures.lost.get(name)]
    lines += [(name, n, "red") for name, n in figures.lost.items() if name not in (REFUSED, *UNSAVABLE)]
    for name, tokens, style in [*lines, ("reused", figures.hit_tokens, "green")]:
        left, width = round(done / total * _BAR), max(1, round(tokens / total * _BAR)) if tokens else 0
        bar = Text(" " * min(left, _BAR - width) + "█" * width, style=style)
        table.add_row(name, f"{tokens:,}", f"{tokens / total:.1%}", bar, MEANING.get(name, ""), style=style)
        done += tokens
    return table


def _kinds(result: ReplayResult) -> Table:
    table = _table("Checkpoints by kind of placement (whole trace)")
    table.add_column("kind", no_wrap=True)
    for column in ("taken", "reused at least once", "times resumed from", "evicted", "evicted unused"):
        table.add_column(column, justify="right")
    for name, kind in result.kinds.items():
        figures = (kind.taken, kind.reused, kind.resumed, kind.evicted, kind.evicted_unused)
        table.add_row(name, *(f"{figure:,}" for figure in figures))
    return table


def _prefixes(result: ReplayResult) -> Table:
    found = result.prefixes
    table = _table(f"Shared prefixes that lose most ({found.stretches:,} lose {found.lost_tokens:,} tokens in all)")
    table.add_column("tokens of the prompt", no_wrap=True)
    for column in ("requests that pass", "first", "last", "computed again", "reused"):
        table.add_column(column, justify="right")
    for stretch in found.worst[:_WORST]:
        figures = (stretch.requests, stretch.first_request, stretch.last_request)
        counts = (*figures, stretch.lost_tokens, stretch.hit_tokens)
        table.add_row(f"[{stretch.start:,}, {stretch.stop:,})".replace("[", r"\["), *(f"{count:,}" for count in counts))
    return table


def _over_time(result: ReplayResult) -> str:
    spans = result.over_time
    each = -(-len(spans) // _MOMENTS)
    pools = [spans[i : i + each] for i in range(0, len(spans), each)]
    shares = [sum(s.hit_tokens for s in pool) / max(1, sum(s.prompt_tokens for s in pool)) for pool in pools]
    graph = "".join(_LEVELS[round(share * (len(_LEVELS) - 1))] for share in shares)
    return f"tokens reused over time:  |{graph}| {shares[0]:.0%} at first, {shares[-1]:.0%} at the end"


def _latency(latency: Latency) -> Table:
    table = _table(f"What requests would wait for, estimated ({latency.requests:,} requests)")
    table.add_column("", no_wrap=True)
    for column in ("half", "90%", "95%", "99%", "mean"):
        table.add_column(column, justify="right")
    rows = (
        ("in the queue", latency.queue),
        ("for the first token", latency.first_token),
        ("for each further token", latency.each_token),
        ("for the whole answer", latency.total),
    )
    for name, times in rows:
        table.add_row(name, *(format_seconds(t) for t in (times.p50, times.p90, times.p95, times.p99, times.mean)))
    table.caption = (
        f"{latency.computed_tokens:,.0f} tokens computed and {latency.answer_tokens:,.0f} answered a second, busy "
        f"{latency.busy:.0%} of {format_seconds(latency.seconds)}; {latency.preemptions:,} preemptions"
    )
    return table


def format_seconds(seconds: float) -> str:
    """Write a time for people: `1.5 s`, `12 ms`."""
    if seconds < 1.0:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:,.3g} s" if seconds < 600 else f"{seconds / 60:,.0f} min"


def _memory(result: ReplayResult) -> str:
    size = result.blocks * result.block_bytes or max(m.used for m in result.memory)
    moments = result.memory[:: -(-len(result.memory) // _MOMENTS)]
    graph = "".join(_LEVELS[round(m.used / max(1, size) * (len(_LEVELS) - 1))] for m in moments)
    last = result.memory[-1]
    limit = format_size(size) if result.blocks else "endless"
    held = f"{format_size(last.checkpoints)} of it in {last.count:,} checkpoints"
    return f"memory of one rank, in use over time: |{graph}| {format_size(last.used)} of {limit} at the end, {held}"
