"""The figures of a report, as SVG text. Those about several runs take the numbers of the runs to show."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from headway.sizes import format_bytes
from headway.tell.comparison import Comparison
from headway.tell.facts import RunFacts, hit_rates
from headway.tell.reasons import LINES, LOADED, UNSAVABLE
from headway.tell.run import RunRecord
from headway.tell.sentences import format_seconds

__all__ = [
    "capacity",
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
_COLOURS = dict(zip((name for name in LINES if name not in UNSAVABLE), _LOST, strict=False))
_LOADED = "#7fcfa3"
_COLOUR = {"new": _NEVER, LOADED: _LOADED, "reused": _REUSED}
"""Of a line of the waterfall by its kind; those of the kind "lost" have colours of their own."""
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
_WHOLE = FuncFormatter(lambda number, _: f"{number:,.0f}")
_SECONDS = FuncFormatter(lambda seconds, _: format_seconds(seconds) if seconds else "0")
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


def rates(found: Comparison, shown: Sequence[int]) -> str:
    """One bar a run: tokens reused, with marks for knowing the future and for an endless memory."""
    with _drawing("rates", 0.9 + 0.34 * len(shown)) as drawing:
        axes, facts = drawing.axes, [found.facts[i] for i in shown]
        axes.barh(range(len(facts)), [one.reused for one in facts], 0.62, color=_REUSED, label="reused")
        for row, one in enumerate(facts):
            marks = [(one.endless, _INK, "endless memory")]
            marks += [(one.future, _FUTURE, "knowing the future")] if one.future is not None else []
            for rate, colour, name in marks:
                _mark(axes, rate, row, colour, name)
            _beside(axes, one.reused, row, f"{one.reused:.1%}")
        _rows(axes, [found.labels[i] for i in shown])
        _percent(axes, "share of prompt tokens")
        axes.set_xlim(0, min(1.0, 1.12 * max(one.endless for one in facts) + 0.02))
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    return drawing.svg


def waterfall(facts: RunFacts) -> str:
    """From all prompt tokens down to those reused, one line of the waterfall a row."""
    rows = [line for line in facts.waterfall if line.share >= _LEAST or line.kind == "reused"]
    with _drawing("waterfall", 0.7 + 0.3 * len(rows)) as drawing:
        axes, left = drawing.axes, 1.0
        for row, line in enumerate(rows):
            left -= line.share
            axes.barh(row, line.share, 0.7, left=left, color=_COLOUR.get(line.kind) or _COLOURS[line.name])
            side = left - 0.008 if left > 0.08 else left + line.share + 0.008
            text = f"{line.share:.1%}"
            axes.text(side, row, text, va="center", ha="right" if left > 0.08 else "left", fontsize=8)
        axes.axvline(facts.endless, color=_INK, linewidth=1, linestyle=":")
        axes.text(facts.endless, -0.75, f"endless memory {facts.endless:.1%}", ha="center", fontsize=8)
        _rows(axes, [line.name.replace("_", " ") for line in rows])
        _percent(axes, "share of prompt tokens")
        axes.set_xlim(0, 1)
    return drawing.svg


def memory_sizes(found: Comparison) -> str:
    """Hit rate over memory, a line for each set of otherwise equal settings."""
    with _drawing("memory-sizes", 3.4) as drawing:
        axes, lines = drawing.axes, found.sizes
        for colour, (name, numbers) in zip(_LINES * (1 + len(lines) // len(_LINES)), lines.items(), strict=False):
            sizes = [found.runs[i].memory or 0 for i in numbers]
            axes.plot(sizes, [found.facts[i].reused for i in numbers], "o-", color=colour, label=name)
            future = [rate for i in numbers if (rate := found.facts[i].future) is not None]
            if len(future) == len(numbers) and len(lines) <= 3:
                axes.plot(sizes, future, "--", color=colour, alpha=0.6, label=f"{name}, knowing the future")
        ceiling = max(facts.endless for facts in found.facts)
        axes.axhline(ceiling, color=_INK, linewidth=1, linestyle=":", label="endless memory")
        axes.set_xscale("log")
        axes.set_xticks(sorted({run.memory for run in found.runs if run.memory}), minor=False)
        axes.set_xticks([], minor=True)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: format_bytes(size, 1000).replace(".0 ", " ")))
        axes.set_xlabel("memory of one rank")
        axes.yaxis.set_major_formatter(_PERCENT)
        axes.set_ylabel("tokens reused")
        axes.set_ylim(0, min(1.0, 1.15 * ceiling + 0.01))
        _legend(axes, len(lines))
    return drawing.svg


def capacity(run: RunRecord) -> str:
    """Hit rate over memory, for least recently used and for the default policy, with this run as a dot."""
    with _drawing("capacity", 3.4) as drawing:
        axes, points, whole = drawing.axes, run.result.capacity, run.result.whole
        sizes = [point.memory for point in points]
        axes.plot(sizes, [point.lru_tokens for point in points], "-", color=_LINES[1], label="least recently used")
        own = [point.tokens for point in points if point.tokens is not None]
        if len(own) == len(points):
            axes.plot(sizes, own, "-", color=_REUSED, label="adaptive, the default")
        axes.plot([run.memory or 0], [whole.token_hit_rate], "o", color=_INK, label="this run")
        ceiling = whole.endless_tokens / max(1, whole.prompt_tokens)
        axes.axhline(ceiling, color=_INK, linewidth=1, linestyle=":", label="endless memory")
        axes.set_xscale("log")
        axes.set_xticks(sizes[::2], minor=False)
        axes.set_xticks([], minor=True)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: format_bytes(size, 1000).replace(".0 ", " ")))
        axes.set_xlabel("memory of one rank")
        axes.yaxis.set_major_formatter(_PERCENT)
        axes.set_ylabel("tokens reused")
        axes.set_ylim(0, min(1.0, 1.15 * ceiling + 0.01))
        _legend(axes, 4)
    return drawing.svg


def timeline(found: Comparison, shown: Sequence[int]) -> str:
    """Hit rate over the trace."""
    with _drawing("timeline", 3.0) as drawing:
        axes, top = drawing.axes, 0.0
        for number, colour in zip(shown, _LINES, strict=False):
            points = hit_rates(found.runs[number].result.over_time, _POINTS)
            shares = [reused for _, reused, _ in points]
            axes.plot([stop for stop, _, _ in points], shares, color=colour, label=found.labels[number], linewidth=1.4)
            top = max(top, *shares, 0.0)
        points = hit_rates(found.runs[shown[0]].result.over_time, _POINTS)
        ceiling = [endless for _, _, endless in points]
        axes.plot([stop for stop, _, _ in points], ceiling, ":", color=_INK, linewidth=1, label="endless memory")
        axes.set_ylim(0, min(1.05, 1.1 * max((top, *ceiling)) + 0.01))
        axes.set_xlim(0, points[-1][0] if points else 1)
        axes.yaxis.set_major_formatter(_PERCENT)
        axes.xaxis.set_major_formatter(_WHOLE)
        axes.set_xlabel("requests")
        axes.set_ylabel("tokens reused")
        _legend(axes, len(shown))
    return drawing.svg


def waits(found: Comparison, shown: Sequence[int]) -> str:
    """Time to the first token: a bar up to 95% of the requests, marks at 50% and 99%; all runs shown have times."""
    times = [latency.first_token for i in shown if (latency := found.runs[i].result.latency)]
    with _drawing("waits", 0.9 + 0.34 * len(times)) as drawing:
        axes = drawing.axes
        axes.barh(range(len(times)), [t.p95 for t in times], 0.62, color=_FUTURE, alpha=0.45, label="95% within")
        for row, time in enumerate(times):
            _mark(axes, time.p50, row, _INK, "half within")
            _mark(axes, time.p99, row, "#c8443c", "99% within")
            _beside(axes, time.p99, row, f"{format_seconds(time.p95)} (95%)")
        _rows(axes, [found.labels[i] for i in shown])
        axes.set_xlabel("time to the first token, estimated")
        axes.xaxis.set_major_formatter(_SECONDS)
        axes.set_xlim(0, 1.15 * max(1e-9, *(t.p99 for t in times)))
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    return drawing.svg


def waits_over_time(found: Comparison, shown: Sequence[int]) -> str:
    """Time to the first token over the trace: what half (solid) and 95% (dotted) of the requests stay within."""
    with _drawing("waits-over-time", 3.0) as drawing:
        axes = drawing.axes
        for number, colour in zip(shown, _LINES, strict=False):
            latency, label = found.runs[number].result.latency, found.labels[number]
            points = latency.over_time if latency else []
            at = [point.time for point in points]
            axes.plot(at, [point.p50 for point in points], color=colour, linewidth=1.4, label=f"{label}, half")
            axes.plot(at, [point.p95 for point in points], ":", color=colour, linewidth=1.4, label=f"{label}, 95%")
        axes.set_xlabel("seconds since the first arrival")
        axes.set_ylabel("time to the first token")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(_SECONDS)
        axes.xaxis.set_major_formatter(_WHOLE)
        _legend(axes, 2 * len(shown))
    return drawing.svg


def reasons(found: Comparison, shown: Sequence[int]) -> str:
    """Stacked bars: what is reused, what is lost to each reason, what no cache could save."""
    lost = [name for name in found.lines if name not in UNSAVABLE]
    with _drawing("reasons", 1.0 + 0.34 * len(shown)) as drawing:
        axes, rows = drawing.axes, list(range(len(shown)))
        left, facts = [0.0] * len(shown), [found.facts[i] for i in shown]
        loads = [(LOADED, _LOADED)] if any(one.tiers for one in facts) else []
        parts = [("reused", _REUSED), *loads, *((name, _COLOURS[name]) for name in lost), ("new", _NEVER)]
        for name, colour in parts:
            widths = [sum(line.share for line in one.waterfall if name in (line.name, line.kind)) for one in facts]
            label = "new tokens" if name == "new" else name.replace("_", " ")
            axes.barh(rows, widths, 0.66, left=left, color=colour, label=label)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        _rows(axes, [found.labels[i] for i in shown])
        _percent(axes, "share of prompt tokens")
        axes.set_xlim(0, 1)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=min(5, len(parts)))
    return drawing.svg


def prefixes(facts: RunFacts) -> str:
    """The stretches of shared prefixes that lose most: what is reused of them and what is lost."""
    worst = facts.prefixes.worst
    with _drawing("prefixes", 0.9 + 0.3 * len(worst)) as drawing:
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


def memory_curve(run: RunRecord) -> str:
    """What the memory of a rank was full of: checkpoints and attention, over the trace."""
    moments = run.result.memory
    at = [moment.request for moment in moments]
    with _drawing("memory", 2.6) as drawing:
        axes = drawing.axes
        states = [moment.checkpoints for moment in moments]
        entries = [moment.used - moment.checkpoints for moment in moments]
        axes.stackplot(at, states, entries, colors=("#6a4fb3", "#8fb0cc"), labels=("checkpoints", "attention"))
        if run.result.blocks:
            size = run.result.blocks * run.result.block_bytes
            axes.axhline(size, color=_INK, linewidth=1, linestyle=":", label="limit")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda size, _: format_bytes(size, 1000)))
        axes.xaxis.set_major_formatter(_WHOLE)
        axes.set_xlim(0, max(1, at[-1]))
        axes.set_ylim(bottom=0)
        axes.set_xlabel("requests")
        _legend(axes, 1)
    return drawing.svg


def _mark(axes: Axes, value: float, row: int, colour: str, name: str) -> None:
    """A line across a bar; the legend names that of the first row."""
    label = name if row == 0 else None
    axes.plot([value, value], [row - 0.4, row + 0.4], color=colour, linewidth=2, label=label)


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
