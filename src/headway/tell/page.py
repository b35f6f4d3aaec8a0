"""One HTML page about one or several runs: figures, and above each of them what it says in words.

The page is one file without scripts: it can be mailed, attached to a ticket, printed, and opened without a network.
So figures are SVG drawings of matplotlib. Rejected: plotly, whose inlined library makes a page of 5 MB that a mail
filter may refuse, for values under the mouse that stand in the tables here.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headway import __version__
from headway.errors import ConfigError
from headway.sizes import counted
from headway.tell import sentences, tables
from headway.tell.comparison import Comparison
from headway.tell.labels import memory_text
from headway.tell.lower import on_lower, on_tiers
from headway.tell.prompt_faults import on_faults
from headway.tell.run import RunRecord

__all__ = ["has_report", "report_page", "require_report", "write_report"]

_MOST_BARS = 24
_MOST_LINES = 6
_MOST_TIMES = 3


@dataclass(frozen=True)
class _Section:
    """A part of the page: a sentence, drawings as SVG text, more sentences, a table."""

    title: str
    finding: str
    drawings: Sequence[str] = ()
    table: tables.Table | None = None
    texts: Sequence[str] = ()
    explained: bool = False


def has_report() -> bool:
    """Whether a report can be written: it needs the extra `report`."""
    return all(importlib.util.find_spec(name) is not None for name in ("matplotlib", "jinja2"))


def require_report(path: Path) -> None:
    """Notice before a long run that its report could not be written.

    Raises:
        ConfigError: There is no such folder, or the path is one.
        ModuleNotFoundError: Without the extra `report`.
    """
    _require_extra()
    if path.is_dir() or not path.parent.is_dir():
        wrong = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ConfigError(f"cannot write {path}: {wrong}")


def _require_extra() -> None:
    if not has_report():
        raise ModuleNotFoundError("a report needs matplotlib and jinja2", name="matplotlib")


def write_report(found: Comparison, path: Path) -> None:
    """Write a page about runs, whole or not at all.

    Raises:
        ConfigError: The file cannot be written.
        ModuleNotFoundError: Without the extra `report`.
    """
    text = report_page(found)
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def report_page(found: Comparison) -> str:
    """An HTML page about runs of one or several traces, complete in itself.

    Raises:
        ModuleNotFoundError: Without the extra `report`.
    """
    _require_extra()
    from jinja2 import Environment, PackageLoader, StrictUndefined  # only reports need it

    loader = PackageLoader("headway.tell")
    pages = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return pages.get_template("page.html").render(
        title=f"Headway replay: {Path(found.runs[0].result.trace).name}",
        about=_about(found.runs),
        sections=_sections(found),
        made=sentences.on_making(found.runs[found.focus]),
        version=__version__,
    )


def _about(runs: Sequence[RunRecord]) -> str:
    whole, layout = runs[0].result.whole, runs[0].layout
    models = ", ".join(sorted({run.model.name for run in runs}))
    requests, tokens = whole.requests + runs[0].result.refused, whole.prompt_tokens + runs[0].result.refused_tokens
    text = f"{counted(requests, 'request')}, {counted(tokens, 'prompt token')}; model {models}"
    if len(runs) > 1:
        return f"{text}; {len(runs)} runs side by side"
    text += f", {', '.join(f'{k} {v}' for k, v in layout.items())}, {memory_text(runs[0])} per rank"
    text += f", preset {runs[0].policy['preset']}" if runs[0].policy.get("preset") else ""
    clock = (runs[0].policy.get("timing") or {}).items()
    return text + (f", arrivals as recorded, {', '.join(f'{k} {v}' for k, v in clock)}" if clock else "")


def _sections(found: Comparison) -> list[_Section]:
    from headway.tell import drawings as draw  # it imports matplotlib, which only reports need

    run, facts = found.runs[found.focus], found.facts[found.focus]
    of = "" if found.alone else f": {found.labels[found.focus]}"
    bars = found.telling(_MOST_BARS)
    times = found.runs[found.best].result.times
    saved = [] if times is None else [sentences.on_savings(times)]
    figures = [draw.rates(found, bars)]
    sections = [_Section("What is reused", sentences.on_rates(found), figures, tables.runs(found), saved)]
    if not found.alone:
        table = tables.reasons(found)
        sections.append(_Section(table.title, sentences.on_reasons(found), [draw.reasons(found, bars)], table))
    if found.timed:
        sections.append(_waits(found, bars))
    if found.sizes:
        curve = [draw.memory_sizes(found)]
        sections.append(_Section("Hit rate over memory", sentences.on_memory_sizes(found), curve))
    if run.result.capacity:
        text, curve = sentences.on_capacity(run.result.capacity), [draw.capacity(run)]
        sections.append(_Section(f"What other sizes of memory reuse{of}", text, curve))
    table, drawing = tables.waterfall(facts), draw.waterfall(facts)
    told, faults = sentences.on_waterfall(facts), on_faults(facts.faults)
    sections.append(_Section(f"Where the tokens went{of}", told, [drawing], table, faults))
    if found.lower:
        sections.append(_Section("What lower tiers bring", on_lower(found.lower)))
    if run.result.tiers:
        table = tables.tiers(run.result)
        sections.append(_Section(f"Lower tiers of memory{of}", on_tiers(facts), [], table))
    over_time = [draw.timeline(found, found.telling(_MOST_LINES))]
    sections.append(_Section("Over time", sentences.on_time(facts), over_time))
    if facts.prefixes.worst:
        text, table = sentences.on_prefixes(facts), tables.prefixes(facts, len(facts.prefixes.worst))
        shown = [draw.prefixes(facts)]
        sections.append(_Section(f"Tokens lost by prefix{of}", text, shown, table, explained=True))
    texts = [sentences.on_checkpoints(facts)] if run.result.kinds else []
    curve, table = [draw.memory_curve(run)], tables.kinds(run.result)
    sections.append(_Section(f"What the memory holds{of}", sentences.on_memory(facts), curve, table, texts))
    return sections


def _waits(found: Comparison, bars: Sequence[int]) -> _Section:
    """Times of the runs that have any: of the one in focus in words, of all as figures."""
    from headway.tell import drawings as draw

    timed = found.timed
    focus = found.focus if found.focus in timed else timed[0]
    text = sentences.on_waits(found.runs[focus].result.latency, found.facts[focus].wait)
    lines = [i for i in found.telling(_MOST_TIMES) if i in timed] or timed[:1]
    drawings = [
        draw.waits(found, [i for i in bars if i in timed] or timed[:1]),
        draw.waits_over_time(found, lines),
    ]
    table = tables.waits(found)
    return _Section(table.title, text if found.alone else f"{found.labels[focus]}: {text}", drawings, table)
