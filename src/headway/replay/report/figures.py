"""The figures of a report, as SVG text."""

from __future__ import annotations

import io
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from headway.replay.details import Span
from headway.replay.findings import losses
from headway.replay.labels import names_of, settings
from headway.replay.record import RunRecord
from headway.replay.result import LINES, REFUSED, Memory
from headway.replay.show import UNSAVABLE, format_seconds
from headway.replay.sizing import format_size

__all__ = [
    "lines_over_memory",
    "memory_curve",
    "memory_sizes",
    "prefixes",
    "rates",
    "reasons",
    "timeline",
    "waits",
    "waits_over_time",
    "waterfall",
]

_REUSED, _NEVER, _FUTURE, _INK = "#2a9d5c", "#c9ccd1", "#6a4fb3", "#24292f"
_LOST = ("#c8443c", "#e58a3a", "#efc14a", "#b05c8c", "#7a6a5c", "#4f86b8", "#8fb0cc", "#a03030", "#5a5a5a", "#d0a0a0")
_COLOURS = dict(zip((name for name in LINES if name not in (*UNSAVABLE, REFUSED)), _LOST, strict=False))
_REFUSED = "#5a5a5a"
_LINES = ("#2a6fb3", "#e07b2e", "#2a9d5c", "#b8405e", "#6a4fb3", "#7a6a5c", "#1b998b", "#c99a1a")
_WIDTH = 9.0
_LEAST = 0.0005
"""Lines of the waterfall below this share are in the table alone."""
_POINTS = 30
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": _INK,
    "axes.edgecolor": "#9aa0a6",
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e8eaed",
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "headway",
}
_PERCENT = FuncFormatter(lambda share, _: f"{100 * share:.3g}%")
_ID = re.compile(r'(\bid="|url\(#|href="#)')


class _Drawing:
    """A figure being drawn; `svg` holds its text afterwards."""

    def __init__(self, name: str, figure: Figure) -> None:
        self.axes: Axes = figure.subplots()
        self.svg = ""
        self._name, self._figure = name, figure

    def finish(self) -> None:
        """Write the SVG. Its ids carry the figure's name, as several figures share one page."""
        out = io.StringIO()
        self._figure.savefig(out, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
        text = out.getvalue()
        self.svg = _ID.sub(lambda found: f"{found[1]}{self._name}-", text[text.index("<svg") :])


@contextmanager
def _drawing(name: str, height: float) -> Iterator[_Drawing]:
    with matplotlib.rc_context(_STYLE):
        drawing = _Drawing(name, Figure(figsize=(_WIDTH, height), layout="constrained"))
        yield drawing
        drawing.finish()


def rates(runs: Sequence[RunRecord], labels: Sequence[str]) -> str:
    """One bar a run: tokens reused, with marks for knowing the future and for an endless memory."""
    with _drawing("rates", 0.9 + 0.34 * len(runs)) as drawing:
        axes, rows = drawing.axes, range(len(runs))
        reused = [run.result.whole.token_hit_rate for run in runs]
        axes.barh(rows, reused, 0.62, color=_REUSED, label="reused")
        for row, run in enumerate(runs):
            found, future = run.result.whole, run.result.clairvoyant
            marks = [(found.endless_hit_rate, _INK, "endless memory")]
            marks += [(future.token_hit_rate, _FUTURE, "knowing the future")] if future else []
            for rate, colour, name in marks:
                label = name if row == 0 else None
                axes.plot([rate, rate], [row - 0.4, row + 0.4], color=colour, linewidth=2, label=label)
            _beside(axes, reused[row], row, f"{reused[row]:.1%}")
        _rows(axes, labels)
        _percent(axes, "share of prompt tokens")
        axes.set_xlim(0, min(1.0, 1.12 * max(run.result.whole.endless_hit_rate for run in runs) + 0.02))
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    return drawing.svg


def waterfall(run: RunRecord, name: str = "waterfall") -> str:
    """From all prompt tokens down to those reused, one line of the waterfall a row."""
    whole = run.result.whole
    total = max(1, whole.prompt_tokens)
    never = [(line, whole.lost[line], _NEVER) for line in UNSAVABLE if whole.lost.get(line)]
    lost = [(line, tokens, _COLOURS[line]) for line, tokens in losses(run)]
    reused = ("reused", whole.hit_tokens, _REUSED)
    refused = [("refused", whole.lost[REFUSED], _REFUSED)] if REFUSED in whole.lost else []
    rows = [row for row in (*refused, *never, *lost) if row[1] >= _LEAST * total] + [reused]
    with _drawing(name, 0.7 + 0.3 * len(rows)) as drawing:
        axes, left = drawing.axes, 1.0
        for row, (_, tokens, colour) in enumerate(rows):
            share = tokens / total
            left -= share
            axes.barh(row, share, 0.7, left=left, color=colour)
            side = left - 0.008 if left > 0.08 else left + share + 0.008
            axes.text(side, row, f"{share:.1%}", va="center", ha="right" if left > 0.08 else "left", fontsize=8)
        ceiling = whole.endless_hit_rate
        axes.axvline(ceiling, color=_INK, linewidth=1, linestyle=":")
        axes.text(ceiling, -0.75, f"endless memory {ceiling:.1%}", ha="center", fontsize=8)
        _rows(axes, [line.replace("_", " ") for line, _, _ in rows])
        _percent(axes, "share of prompt tokens")
        axes.set_xlim(0, 1)
    return drawing.svg


def memory_sizes(runs: Sequence[RunRecord]) -> str:
    """Hit rate over memory, a line for each set of otherwise equal settings."""
    lines = lines_over_memory(runs)
    with _drawing("memory-sizes", 3.4) as drawing:
        axes = drawing.axes
        for colour, (name, members) in zip(_LINES * (1 + len(lines) // len(_LINES)), lines.items(), strict=False):
            members.sort(key=lambda run: run.memory or 0)
            sizes = [run.memory or 0 for run in members]
            axes.plot(sizes, [r.result.whole.token_hit_rate for r in members], "o-", color=colour, label=name)
            future = [r.result.clairvoyant.token_hit_rate for r in members if r.result.clairvoyant]
            if len(future) == len(members) and len(lines) <= 3:
                axes.plot(sizes, future, "--", color=colour, alpha=0.6, label=f"{name}, knowing the future")
        ceiling = max(run.result.whole.endless_hit_rate for run in runs)
        axes.axhline(ceiling, color=_INK, linewidth=1, linestyle=":", label="endless memory")
        axes.set_xscale("log")
        axes.set_xticks(sorted({run.memory for run in runs if run.memory}), minor=False)
        axes.set_xticks([], minor=True)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: format_size(size).replace(".0 ", " ")))
        axes.set_xlabel("memory of one rank")
        axes.yaxis.set_major_formatter(_PERCENT)
        axes.set_ylabel("tokens reused")
        axes.set_ylim(0, min(1.0, 1.15 * ceiling + 0.01))
        _legend(axes, len(lines))
    return drawing.svg


def lines_over_memory(runs: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    """Runs that differ in their memory alone, by the settings in which the sets differ."""
    sets: dict[str, list[tuple[RunRecord, dict[str, Any]]]] = defaultdict(list)
    for run in runs:
        if run.memory:
            one = {key: value for key, value in settings(run).items() if key != "memory"}
            sets[str(one)].append((run, one))
    kept = [members for members in sets.values() if len(members) > 1]
    flat = [members[0][1] for members in kept]
    return {name: [run for run, _ in members] for name, members in zip(names_of(flat, "this cache"), kept, strict=True)}


def timeline(runs: Sequence[RunRecord], labels: Sequence[str]) -> str:
    """Hit rate over the trace."""
    with _drawing("timeline", 3.0) as drawing:
        axes, top = drawing.axes, 0.0
        for run, label, colour in zip(runs, labels, _LINES, strict=False):
            points = _pooled(run.result.over_time)
            shares = [reused for _, reused, _ in points]
            axes.plot([stop for stop, _, _ in points], shares, color=colour, label=label, linewidth=1.4)
            top = max(top, *shares, 0.0)
        points = _pooled(runs[0].result.over_time)
        ceiling = [endless for _, _, endless in points]
        axes.plot([stop for stop, _, _ in points], ceiling, ":", color=_INK, linewidth=1, label="endless memory")
        axes.set_ylim(0, min(1.05, 1.1 * max(top, *ceiling) + 0.01))
        axes.set_xlim(0, points[-1][0])
        axes.yaxis.set_major_formatter(_PERCENT)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:,.0f}"))
        axes.set_xlabel("requests")
        axes.set_ylabel("tokens reused")
        _legend(axes, len(runs))
    return drawing.svg


def waits(runs: Sequence[RunRecord], labels: Sequence[str]) -> str:
    """Time to the first token of each run that has times: a bar up to 95% of the requests, marks at 50% and 99%."""
    with _drawing("waits", 0.9 + 0.34 * len(runs)) as drawing:
        axes, times = drawing.axes, [run.result.latency.first_token for run in runs if run.result.latency]
        axes.barh(range(len(times)), [t.p95 for t in times], 0.62, color=_FUTURE, alpha=0.45, label="95% within")
        for row, time in enumerate(times):
            for seconds, colour, name in ((time.p50, _INK, "half within"), (time.p99, "#c8443c", "99% within")):
                label = name if row == 0 else None
                axes.plot([seconds, seconds], [row - 0.4, row + 0.4], color=colour, linewidth=2, label=label)
            _beside(axes, time.p99, row, f"{format_seconds(time.p95)} (95%)")
        _rows(axes, labels)
        axes.set_xlabel("time to the first token, estimated")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: format_seconds(seconds) if seconds else "0"))
        axes.set_xlim(0, 1.15 * max(1e-9, *(t.p99 for t in times)))
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    return drawing.svg


def waits_over_time(runs: Sequence[RunRecord], labels: Sequence[str]) -> str:
    """Time to the first token over the trace: what half (solid) and 95% (dotted) of the requests stay within."""
    with _drawing("waits-over-time", 3.0) as drawing:
        axes = drawing.axes
        for run, label, colour in zip(runs, labels, _LINES, strict=False):
            points = run.result.latency.over_time if run.result.latency else []
            at = [point.time for point in points]
            axes.plot(at, [point.p50 for point in points], color=colour, linewidth=1.4, label=f"{label}, half")
            axes.plot(at, [point.p95 for point in points], ":", color=colour, linewidth=1.4, label=f"{label}, 95%")
        axes.set_xlabel("seconds since the first arrival")
        axes.set_ylabel("time to the first token")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: format_seconds(seconds) if seconds else "0"))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:,.0f}"))
        _legend(axes, 2 * len(runs))
    return drawing.svg


def reasons(runs: Sequence[RunRecord], labels: Sequence[str]) -> str:
    """Stacked bars: what is reused, what is lost to each reason, what no cache could save."""
    lines = [name for name in LINES if any(name in run.result.whole.lost for run in runs)]
    present = [name for name in lines if name not in (*UNSAVABLE, REFUSED)]
    with _drawing("reasons", 1.0 + 0.34 * len(runs)) as drawing:
        axes, rows = drawing.axes, list(range(len(runs)))
        left = [0.0] * len(runs)
        parts = [("reused", _REUSED), *((name, _COLOURS[name]) for name in present), ("new tokens", _NEVER)]
        parts += [(REFUSED, _REFUSED)] if REFUSED in lines else []
        for name, colour in parts:
            widths = [_part(run, name) for run in runs]
            axes.barh(rows, widths, 0.66, left=left, color=colour, label=name.replace("_", " "))
            left = [a + b for a, b in zip(left, widths, strict=True)]
        _rows(axes, labels)
        _percent(axes, "share of prompt tokens")
        axes.set_xlim(0, 1)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=min(5, len(parts)))
    return drawing.svg


def prefixes(run: RunRecord, name: str = "prefixes") -> str:
    """The ten stretches of shared prefixes that lose most: what is reused of them and what is lost."""
    worst = run.result.prefixes.worst[:10]
    with _drawing(name, 0.9 + 0.3 * len(worst)) as drawing:
        axes, rows = drawing.axes, list(range(len(worst)))
        lost = [stretch.lost_tokens for stretch in worst]
        axes.barh(rows, lost, 0.66, color=_COLOURS["evicted"], label="computed again")
        hit = [stretch.hit_tokens for stretch in worst]
        axes.barh(rows, hit, 0.66, left=lost, color=_REUSED, label="reused")
        _rows(axes, [f"[{s.start:,}, {s.stop:,}), {s.requests:,} requests" for s in worst])
        axes.xaxis.set_major_formatter(FuncFormatter(_short))
        axes.set_xlabel("tokens, over all requests")
        axes.grid(axis="y", visible=False)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    return drawing.svg


def memory_curve(run: RunRecord, name: str = "memory") -> str:
    """What the memory of a rank was full of: checkpoints and attention, over the trace."""
    moments: list[Memory] = run.result.memory
    at = [moment.request for moment in moments]
    with _drawing(name, 2.6) as drawing:
        axes = drawing.axes
        states = [moment.checkpoints for moment in moments]
        entries = [moment.used - moment.checkpoints for moment in moments]
        axes.stackplot(at, states, entries, colors=("#6a4fb3", "#8fb0cc"), labels=("checkpoints", "attention"))
        if run.result.blocks:
            size = run.result.blocks * run.result.block_bytes
            axes.axhline(size, color=_INK, linewidth=1, linestyle=":", label="limit")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda size, _: format_size(size)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:,.0f}"))
        axes.set_xlim(0, max(1, at[-1]))
        axes.set_ylim(bottom=0)
        axes.set_xlabel("requests")
        _legend(axes, 1)
    return drawing.svg


def _pooled(spans: Sequence[Span]) -> list[tuple[int, float, float]]:
    """At most 30 points: last request, share reused, share that an endless memory would reuse."""
    each = -(-len(spans) // _POINTS)
    pools = [spans[i : i + each] for i in range(0, len(spans), each)]
    points = []
    for pool in pools:
        total = max(1, sum(span.prompt_tokens for span in pool))
        hit, endless = sum(span.hit_tokens for span in pool), sum(span.endless_tokens for span in pool)
        points.append((pool[-1].stop, hit / total, endless / total))
    return points


def _part(run: RunRecord, name: str) -> float:
    whole = run.result.whole
    never = sum(whole.lost.get(line, 0) for line in UNSAVABLE)
    tokens = {"reused": whole.hit_tokens, "new tokens": never}.get(name, whole.lost.get(name, 0))
    return tokens / max(1, whole.prompt_tokens)


def _rows(axes: Axes, labels: Sequence[str]) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)


def _beside(axes: Axes, value: float, row: int, text: str) -> None:
    """A small text to the right of a bar or mark."""
    axes.annotate(text, (value, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)


def _percent(axes: Axes, label: str) -> None:
    axes.xaxis.set_major_formatter(_PERCENT)
    axes.set_xlabel(label)


def _legend(axes: Axes, lines: int) -> None:
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8 if lines > 4 else 9)


def _short(value: float, _: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
