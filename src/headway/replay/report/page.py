"""The page: sections of a sentence, a figure and a table."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from headway import __version__
from headway.errors import ConfigError
from headway.replay import findings
from headway.replay.labels import memory_text, run_labels
from headway.replay.record import RunRecord
from headway.replay.report import figures
from headway.replay.result import LINES
from headway.replay.show import MEANING, format_seconds
from headway.replay.sizing import format_size

__all__ = ["report_page"]

_MOST_BARS = 24
_MOST_LINES = 6
_MOST_TIMES = 3
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #24292f; background: #fff; max-width: 60rem; margin: 2rem auto;
  padding: 0 1.2rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .3rem; border-top: 1px solid #e8eaed; padding-top: 1.2rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .2rem; }
p { max-width: 48rem; } p.finding { font-size: 1.05rem; }
p.about, footer { color: #57606a; font-size: .9rem; }
svg { max-width: 100%; height: auto; display: block; margin: .8rem 0; }
div.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; margin: .6rem 0; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #e8eaed; text-align: right; white-space: nowrap; }
th { color: #57606a; font-weight: 600; white-space: normal; vertical-align: bottom; }
td:first-child, th:first-child { text-align: left; }
tr.best td { font-weight: 600; background: #f1f8f4; }
td.text, th.text { text-align: left; white-space: normal; min-width: 6rem; }
code { background: #f3f4f6; padding: 0 .25rem; }
"""


def report_page(
    runs: Sequence[RunRecord],
    notes: Sequence[str] = (),
    *,
    names: Sequence[str] | None = None,
    focus: int | None = None,
) -> str:
    """An HTML page about runs of one or several traces, complete in itself.

    Args:
        runs: At least one.
        notes: Sentences on how the runs were made.
        names: What to call the runs; by default the settings in which they differ.
        focus: Number of the run that is shown in detail; by default the one that saves most compute.

    Raises:
        ConfigError: No runs.
        ModuleNotFoundError: Without the extra `report`.
    """
    if not runs:
        raise ConfigError("a report needs at least one run")
    labels = run_labels(runs) if names is None else names
    shown = _most_telling(runs, _MOST_BARS)
    best = findings.best_run(runs) if focus is None else focus
    sections = [_summary(runs, labels, shown)]
    if len(runs) > 1:
        sections.append(_reasons(runs, labels, shown))
    if any(run.result.latency for run in runs):
        sections.append(_waits(runs, labels, best))
    if figures.lines_over_memory(runs):
        sections.append(_section("Hit rate over memory", _sizes_text(runs, best), figures.memory_sizes(runs)))
    sections.append(_waterfall(runs[best], labels[best], alone=len(runs) == 1))
    sections.append(_timeline(runs, labels, best))
    if runs[best].result.prefixes.worst:
        sections.append(_prefixes(runs[best], labels[best], alone=len(runs) == 1))
    sections.append(_memory(runs[best], labels[best], alone=len(runs) == 1))
    sections.append(_made(runs[best], notes))
    title = f"Headway replay: {Path(runs[0].result.trace).name}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>\n'
        f"<body><h1>{escape(title)}</h1>\n{_about(runs)}\n{''.join(sections)}"
        f"<footer><p>Made by Headway {__version__}.</p></footer></body></html>\n"
    )


def _about(runs: Sequence[RunRecord]) -> str:
    whole, layout = runs[0].result.whole, runs[0].layout
    models = ", ".join(sorted({run.model.name for run in runs}))
    text = f"{whole.requests:,} requests, {whole.prompt_tokens:,} prompt tokens; model {models}"
    if len(runs) == 1:
        text += f", {', '.join(f'{k} {v}' for k, v in layout.items())}, {memory_text(runs[0])} a rank"
        text += f", preset {runs[0].policy['preset']}" if runs[0].policy.get("preset") else ""
        text += f", arrivals as recorded, {_clock_text(runs[0])}" if runs[0].policy.get("timing") else ""
    else:
        text += f"; {len(runs)} runs side by side"
    return f'<p class="about">{escape(text)}.</p>'


def _section(title: str, finding: str, *parts: str) -> str:
    body = "\n".join(f'<div class="wide">{part}</div>' for part in parts)
    return f'<section><h2>{escape(title)}</h2>\n<p class="finding">{escape(finding)}</p>\n{body}</section>\n'


def _summary(runs: Sequence[RunRecord], labels: Sequence[str], shown: Sequence[int]) -> str:
    best = findings.best_run(runs)
    head = ("run", "tokens reused", "requests hit", "compute saved", "knowing the future", "endless memory")
    rows = []
    for run, label in zip(runs, labels, strict=True):
        whole, future = run.result.whole, run.result.clairvoyant
        rates = [f"{rate:.1%}" for rate in (whole.token_hit_rate, whole.request_hit_rate, whole.compute_saved)]
        rows.append([label, *rates, f"{future.token_hit_rate:.1%}" if future else "", f"{whole.endless_hit_rate:.1%}"])
    picture = figures.rates([runs[i] for i in shown], [labels[i] for i in shown])
    table = _table(head, rows, best if len(runs) > 1 else -1)
    return _section("What is reused", findings.on_rates(runs, labels), picture, table)


def _waits(runs: Sequence[RunRecord], labels: Sequence[str], best: int) -> str:
    """Times of the runs that have any: of the one in focus in words, of all as figures."""
    timed = [i for i, run in enumerate(runs) if run.result.latency]
    told = best if best in timed else timed[0]
    bars = [i for i in _most_telling(runs, _MOST_BARS) if i in timed] or timed[:1]
    lines = [i for i in _most_telling(runs, _MOST_TIMES) if i in timed] or timed[:1]
    names = ("first token: half", "95%", "99%", "queue: 95%", "next tokens: half")
    head = ("run", *names, "answered/s", "computed/s", "busy", "preempted")
    rows = []
    for i in timed:
        latency = runs[i].result.latency
        assert latency is not None
        first, queue, each = latency.first_token, latency.queue, latency.each_token
        seconds = [format_seconds(t) for t in (first.p50, first.p95, first.p99, queue.p95, each.p50)]
        rates = [f"{latency.answer_tokens:,.0f}", f"{latency.computed_tokens:,.0f}", f"{latency.busy:.0%}"]
        rows.append([labels[i], *seconds, *rates, f"{latency.preemptions:,}"])
    name = "" if len(runs) == 1 else f"{labels[told]}: "
    return _section(
        "How long requests wait (estimates)",
        name + findings.on_waits(runs[told]),
        figures.waits([runs[i] for i in bars], [labels[i] for i in bars]),
        figures.waits_over_time([runs[i] for i in lines], [labels[i] for i in lines]),
        _table(head, rows, timed.index(best) if best in timed and len(timed) > 1 else -1),
    )


def _reasons(runs: Sequence[RunRecord], labels: Sequence[str], shown: Sequence[int]) -> str:
    picture = figures.reasons([runs[i] for i in shown], [labels[i] for i in shown])
    lines = [name for name in LINES if any(name in run.result.whole.lost for run in runs)]
    rows = []
    for run, label in zip(runs, labels, strict=True):
        whole = run.result.whole
        shares = [whole.lost.get(name, 0) / max(1, whole.prompt_tokens) for name in lines]
        rows.append([label, f"{whole.token_hit_rate:.1%}", *(f"{share:.1%}" for share in shares)])
    table = _table(("run", "reused", *(name.replace("_", " ") for name in lines)), rows, findings.best_run(runs))
    return _section("Tokens lost by reason", findings.on_reasons(runs, labels), picture, table)


def _sizes_text(runs: Sequence[RunRecord], best: int) -> str:
    """About the line of the run in focus, or else about the first."""
    lines = list(figures.lines_over_memory(runs).values())
    return findings.on_memory_sizes(next((line for line in lines if any(run is runs[best] for run in line)), lines[0]))


def _waterfall(run: RunRecord, label: str, *, alone: bool) -> str:
    whole = run.result.whole
    total = max(1, whole.prompt_tokens)
    lines = [*whole.lost.items(), ("reused", whole.hit_tokens)]
    rows = [[name, f"{tokens:,}", f"{tokens / total:.1%}", MEANING.get(name, "")] for name, tokens in lines]
    title = "Where the tokens went" + ("" if alone else f": {label}")
    table = _table(("line", "tokens", "share", "why"), rows)
    return _section(title, findings.on_waterfall(run), figures.waterfall(run), table)


def _timeline(runs: Sequence[RunRecord], labels: Sequence[str], best: int) -> str:
    shown = _most_telling(runs, _MOST_LINES)
    picture = figures.timeline([runs[i] for i in shown], [labels[i] for i in shown])
    return _section("Over time", findings.on_time(runs[best]), picture)


def _prefixes(run: RunRecord, label: str, *, alone: bool) -> str:
    head = ("tokens", "requests that pass", "first", "last", "computed again", "reused")
    rows = [
        [
            f"[{s.start:,}, {s.stop:,})",
            *(f"{n:,}" for n in (s.requests, s.first_request, s.last_request, s.lost_tokens, s.hit_tokens)),
        ]
        for s in run.result.prefixes.worst[:10]
    ]
    title = "Tokens lost by prefix" + ("" if alone else f": {label}")
    note = "<p class='about'>Requests are counted from 0. <code>headway explain TRACE --request N</code> shows one.</p>"
    return _section(title, findings.on_prefixes(run), figures.prefixes(run), _table(head, rows), note)


def _memory(run: RunRecord, label: str, *, alone: bool) -> str:
    head = ("kind of checkpoint", "taken", "reused at least once", "times resumed from", "evicted", "evicted unused")
    rows = [
        [name, *(f"{n:,}" for n in (k.taken, k.reused, k.resumed, k.evicted, k.evicted_unused))]
        for name, k in run.result.kinds.items()
    ]
    title = "What the memory holds" + ("" if alone else f": {label}")
    more = [f"<p>{escape(findings.on_checkpoints(run))}</p>", _table(head, rows)] if rows else []
    return _section(title, findings.on_memory(run), figures.memory_curve(run), *more)


def _made(run: RunRecord, notes: Sequence[str]) -> str:
    sizes = ", ".join(f"{group.name} {format_size(group.bytes)}" for group in run.groups)
    told = [
        f"Bytes of one token or state on one rank, before context parallelism: {sizes} (source: {run.model.source}).",
        f"Answers were read as: {run.result.outputs}. Hits are whole blocks of {run.trace['block_tokens']} tokens.",
        f"Compute counts attention's quadratic part; its source: {run.cost['source']}.",
        *run.model.notes,
        *_clock(run),
        *notes,
    ]
    items = "".join(f"<li>{escape(text)}</li>" for text in told)
    return f"<section><h2>How this was made</h2><ul>{items}</ul></section>"


def _clock(run: RunRecord) -> list[str]:
    """Where the times of a run are from."""
    if run.result.latency is None:
        return []
    return [
        f"Times are estimates: {run.result.latency.estimate}. Communication and the host's work take no time.",
        f"Requests arrive as recorded: {_clock_text(run)}.",
    ]


def _clock_text(run: RunRecord) -> str:
    return ", ".join(f"{name} {value}" for name, value in (run.policy.get("timing") or {}).items())


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], best: int = -1) -> str:
    kinds = ["text" if name in ("why", "run") else "" for name in head]
    top = "".join(f'<th class="{kind}">{escape(name)}</th>' for name, kind in zip(head, kinds, strict=True))
    body = ""
    for number, row in enumerate(rows):
        cells = "".join(f'<td class="{kind}">{escape(cell)}</td>' for cell, kind in zip(row, kinds, strict=True))
        body += f'<tr class="best">{cells}</tr>' if number == best else f"<tr>{cells}</tr>"
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _most_telling(runs: Sequence[RunRecord], most: int) -> list[int]:
    """Numbers of at most `most` runs, in their order: all, or evenly from the best to the worst."""
    if len(runs) <= most:
        return list(range(len(runs)))
    ranked = sorted(range(len(runs)), key=lambda i: -runs[i].result.whole.compute_saved)
    return sorted({ranked[round(k * (len(ranked) - 1) / (most - 1))] for k in range(most)})
