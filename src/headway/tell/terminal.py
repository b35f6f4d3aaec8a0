"""Runs on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text

from headway.sizes import format_bytes
from headway.tell import tables
from headway.tell.comparison import Comparison
from headway.tell.facts import RunFacts, facts_of, hit_rates
from headway.tell.lower import on_lower, on_tiers
from headway.tell.prompt_faults import on_faults
from headway.tell.run import RunRecord
from headway.tell.sentences import on_making, on_refused, on_savings, on_waterfall

__all__ = ["rich_table", "rich_waterfall", "show", "show_runs"]

_BAR = 18
_MOMENTS = 24
_WORST = 5
_LEVELS = " ▁▂▃▄▅▆▇█"
_STYLES = {"new": "dim", "lost": "red", "loaded": "cyan", "reused": "green"}


def show(run: RunRecord, console: Console) -> None:
    """Print a run: below the waterfall what it says in words, and at the end how it was made."""
    facts, result = facts_of(run), run.result
    if facts.refused is not None:
        console.print(on_refused(facts.refused), "", sep="\n", style="bold red", markup=False, highlight=False)
    console.print(rich_table(tables.rates(result, result.preset.partition(",")[0] or "this cache")))
    if result.times is not None:
        console.print(on_savings(result.times), "", sep="\n", markup=False, highlight=False)
    console.print(rich_waterfall(facts))
    console.print(on_waterfall(facts), "", sep="\n", markup=False, highlight=False)
    for text in on_faults(facts.faults):
        console.print(text, "", sep="\n", style="bold red", markup=False, highlight=False)
    if result.kinds:
        console.print(rich_table(tables.kinds(result)))
    if facts.prefixes.worst:
        console.print(rich_table(tables.prefixes(facts, _WORST)))
    if result.tiers:
        console.print(rich_table(tables.tiers(result)))
        console.print(on_tiers(facts), "", sep="\n", markup=False, highlight=False)
    if result.latency is not None:
        console.print(rich_table(tables.latency(result.latency)))
    if result.memory:
        console.print(_memory(run, facts))
    if result.over_time:
        console.print(_over_time(run))
    speed = f"{result.requests_per_second:,.0f} requests per second of processor time"
    for note in (*on_making(run), f"The replay itself went through {speed}; that says nothing about the model."):
        console.print(f"[dim]- {escape(note)}[/]")


def show_runs(found: Comparison, console: Console) -> None:
    """Print runs side by side."""
    table = rich_table(tables.runs(found, brief=True))
    table.box = None
    console.print(table)
    if found.lower:
        console.print(on_lower(found.lower), markup=False, highlight=False)


def rich_table(table: tables.Table) -> RichTable:
    """A table of text as the terminal shows it."""
    made = RichTable(
        title=Text(table.title),
        caption=table.note or None,
        box=SIMPLE_HEAD,
        title_justify="left",
        title_style="bold",
        pad_edge=False,
    )
    for number, (name, left) in enumerate(zip(table.head, table.left, strict=True)):
        fixed = number == 0 and table.head[0] != "run"
        made.add_column(name, justify="left" if left else "right", no_wrap=fixed, overflow="fold")
    for number, row in enumerate(table.rows):
        made.add_row(*(Text(cell) for cell in row), style="bold" if number in table.bold else None)
    return made


def rich_waterfall(facts: RunFacts) -> RichTable:
    """The waterfall with a bar for each line."""
    table = tables.waterfall(facts)
    made = rich_table(tables.Table(table.title, (*table.head[:3], "", table.head[3]), ()))
    for column in made.columns[1:4]:  # on a narrow terminal it is the reason that takes several lines
        column.no_wrap = True
    made.columns[3].min_width = _BAR
    done = 0.0
    for line, row in zip(facts.waterfall, table.rows, strict=True):
        left, width = round(done * _BAR), max(1, round(line.share * _BAR)) if line.tokens else 0
        bar = Text(" " * min(left, _BAR - width) + "█" * width)
        made.add_row(*map(Text, row[:3]), bar, Text(row[3]), style=_STYLES[line.kind])
        done += line.share
    return made


def _over_time(run: RunRecord) -> str:
    shares = [share for _, share, _ in hit_rates(run.result.over_time, _MOMENTS)]
    return f"tokens reused over time:  |{_graph(shares)}| between {min(shares):.0%} and {max(shares):.0%}"


def _memory(run: RunRecord, facts: RunFacts) -> str:
    found, moments = facts.memory, run.result.memory
    size = found.limit or max(moment.used for moment in moments)
    graph = _graph([moment.used / max(1, size) for moment in moments[:: -(-len(moments) // _MOMENTS)]])
    limit = "endless" if found.limit is None else format_bytes(found.limit, 1000)
    held = f"{format_bytes(moments[-1].checkpoints, 1000)} of it in {found.checkpoints:,} checkpoints"
    used = format_bytes(found.used, 1000)
    return f"memory of one rank, in use over time: |{graph}| {used} of {limit} at the end, {held}"


def _graph(shares: Sequence[float]) -> str:
    return "".join(_LEVELS[round(share * (len(_LEVELS) - 1))] for share in shares)
