"""The command `headway advise`: the runs that matter for a decision, in four rounds.

1. Every decode-context-parallel size that the model allows. A layout that refuses requests is none while another
   serves them. Of the others the *layout* taken is the smallest one within half a point of compute of the best:
   splitting tokens costs communication that a replay does not see.
2. On that layout, other placements (without the kinds that do not pay, and with a grid where states were missing) and
   plain LRU. They cost nothing and change no answer, so the best is taken if it gains half a point.
3. From there, one change at a time: half and twice the memory, the memory that serves all, and fewer bytes a number for
   entries and states where there are fewer. Fewer bytes change what the model computes, so they are offered, not taken.
   And lower tiers of memory, one more at a time.
4. Where this release imitates other engines: each as it comes, as it comes on the new layout, and with its own best
   split of memory. If the states of running requests take more than a quarter of the memory, with fewer of these too.

Rejected: a full grid. It runs ten times as long, and what it adds (two changes that only pay together) has not been
seen on the traces at hand.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from headway.cache import DEFAULT_PLACEMENT, Reason, Recurrent
from headway.errors import ConfigError
from headway.formats import Trace
from headway.formats.chat import ChatEntry
from headway.option_records import with_records
from headway.replay.ask import options as opt
from headway.replay.ask.folder import SweepFolder
from headway.replay.ask.grid import Point, points_of
from headway.replay.ask.lint import faults_of
from headway.replay.ask.model_files import is_model_files
from headway.replay.ask.options import ClockChoice
from headway.replay.ask.record import with_capacity
from headway.replay.ask.setting import Setting
from headway.replay.ask.sweep import draw, finish_points
from headway.replay.ask.workers import Workload
from headway.replay.config.presets import preset_name
from headway.sizes import format_bytes, parse_bytes
from headway.tell import RunRecord, compare, with_facts
from headway.tell.advice import Study, Variant, advice_text
from headway.tell.comparison import refusals
from headway.tell.engines import SLOTS, beside_running, fewer_running
from headway.tell.labels import tier_text

__all__ = ["ENGINES", "Question", "advise", "study"]

_EXAMPLE_MEMORY = "8GB"
ENGINES = ("vllm", "sglang")
"""Engines that are imitated, by the name of their preset."""
_RATIOS = (0.25, 0.5, 0.9, 2.0, 4.0)
"""Splits of SGLang's memory that are tried; 0.9 is what it does by itself."""
_ENOUGH = 0.005
_DROPPABLE = ("prompt_end", "answer_end", "boundary")
"""Kinds of checkpoint that a placement can do without; the others are where somebody comes back to, or asked for."""
_RARE, _POOR = 20, 0.2
"""A kind of which at least so many were taken and less than this share was reused is tried without."""
_GRIDS = (512, 4096)
"""Tokens between the checkpoints of a grid: one for prompts of a few thousand tokens, and one for long ones."""
_NONE = {"host_memory": "0", "disk": "0", "store": "0"}
"""Values of a setting without lower tiers."""
_USUAL_HOST, _USUAL_DISK = 4, 20
"""Bytes of host memory and of a disk, for each of the cache's own, that are tried where none are given."""


@dataclass(frozen=True)
class _Gpus(opt.Hardware):
    """The memory; the number of GPUs is also the default of --tp."""

    gpus: Annotated[int, opt.option("Memory", "GPUs for one copy of the model.")] = 0


@dataclass(frozen=True)
class _Where(opt.RunChoice):
    """Where runs are done; the folder gets the advice as well."""

    out: Annotated[Path, opt.option(opt.RUNNING, "Folder for runs, report and advice.")] = Path("headway-advice")


@with_records
def advise(
    source: opt.TraceChoice,
    clock: opt.ClockChoice,
    model: opt.ModelChoice,
    hardware: _Gpus,
    where: _Where,
    tp: Annotated[int, opt.option("Model and layout", "Tensor-parallel size; 0: as many as --gpus.")] = 0,
    kv_dtype: opt.KvDtype = opt.RankChoice.kv_dtype,
    state_dtype: opt.StateDtype = opt.RankChoice.state_dtype,
    running: Annotated[int, opt.option("Memory", "Requests that run at once, for SGLang's state slots.")] = 16,
    as_json: opt.AsJson = False,
) -> None:
    """Say what to set for this traffic and model, what it gains, and what to watch.

    For example:

        headway advise trace.jsonl --model kimi-k3 --gpu b200 --gpus 16 --weights 1560GB

        headway advise trace.jsonl --model qwen3-next --tp 4 --memory 30GB

        headway advise trace.jsonl --model kimi-linear --gpu h200 --clock trace   # with times, as estimates

    It runs the sweep that matters (layouts, then one change at a time), and prints a short text with the command lines
    for Headway, vLLM and SGLang. The runs, `report.html` and `advice.md` stay in the folder `--out`; stopped, it goes
    on with the same command.

    Without arguments it advises on a generated workload, to show what it says.
    """
    console, gpus = Console(stderr=True), hardware.gpus
    ranks = opt.RankChoice(tp or gpus or 1, kv_dtype=kv_dtype, state_dtype=state_dtype)
    setting = Setting(model, ranks, replace(hardware, gpus=0), clock=clock, outputs=source.outputs)
    setting = setting.with_example(source, _EXAMPLE_MEMORY)
    if gpus and tp and gpus != tp:
        raise ConfigError(f"--gpus {gpus} and --tp {tp}: one copy of the model takes as many GPUs as --tp")
    if running < 0:
        raise ConfigError(f"--running is {running}: give a number of requests")
    entries: list[ChatEntry] = []
    requests = source.load(entries)
    folder, work = SweepFolder(where.out), Workload.of(requests, source.outputs)

    def run(points: Sequence[Point]) -> list[RunRecord]:
        return finish_points(work, points, folder, console, jobs=where.jobs, ray=where.ray)

    question = Question(setting, requests, running)
    found = study(question, run)
    focus = with_capacity(found.best.run, _point(found.best.values, question).config, requests)
    faults = faults_of(requests, entries, source.tokenizer, setting.configure()[0])
    found = replace(found, faults=faults, capacity=focus.result.capacity)
    share = hardware.gpu_share if hardware.gpu and hardware.memory is None else None
    checkpoint, draft = _checkpoint(model.model), model.draft is not None
    text = advice_text(found, share=share, running=running, checkpoint=checkpoint, draft=draft)
    (where.out / "advice.md").write_text(text, encoding="utf-8")
    if as_json:
        typer.echo(json.dumps({"advice": text, "runs": [with_facts(one.run) for one in found.variants]}, indent=2))
    else:
        Console().print(text, highlight=False, markup=False, soft_wrap=True)
    every = found.variants
    base = {id(one): found.layout.name for one in found.policies} | {
        id(one): found.best.name for one in (*found.changes, *found.lower)
    }
    labels = [f"{base[id(one)]}, {one.name}" if id(one) in base else one.name for one in every]
    runs, best = [one.run for one in every], every.index(found.best)
    runs[best] = focus
    draw(compare(runs, labels=labels, focus=best), folder, console)


def _checkpoint(model: str | None) -> str | None:
    """The folder of a model that was given as a path; None for one of the catalogue, or bytes."""
    if model is None or not is_model_files(Path(model)):
        return None
    return model if Path(model).is_dir() else str(Path(model).parent)


@dataclass(frozen=True)
class Question:
    """What advice is wanted for.

    Attributes:
        setting: The setting in use, without decode context parallelism. Imitated engines have no clock: their requests
            come one after another.
        trace: The trace.
        running: Requests that run at once; in SGLang their states come out of the memory of the cache.
    """

    setting: Setting
    trace: Trace
    running: int = 16


Runner = Callable[[Sequence[Point]], Sequence[RunRecord]]
_Variants = Callable[[Mapping[str, Mapping[str, Any]]], list[Variant]]


def study(question: Question, run: Runner) -> Study:
    """Do the runs that matter.

    Args:
        question: What advice is wanted for.
        run: Does the runs.

    Raises:
        ConfigError: A model or memory that cannot work.
    """
    ranks = question.setting.ranks
    base: dict[str, Any] = {"tp": ranks.tp, "kv_dtype": ranks.kv_dtype, "state_dtype": ranks.state_dtype}
    base |= _named(question.setting.hardware.lower)

    def variants(wanted: Mapping[str, Mapping[str, Any]]) -> list[Variant]:
        settings = {name: base | dict(change) for name, change in wanted.items()}
        points = [_point(values, question) for values in settings.values()]
        return [Variant(n, v, r) for (n, v), r in zip(settings.items(), run(points), strict=True)]

    sizes, refused = _allowed(question)
    layouts = variants({f"dcp {dcp}": {"dcp": dcp} for dcp in sizes})
    fewest = min(refusals(variant.facts) for variant in layouts)
    serving = [variant for variant in layouts if refusals(variant.facts) == fewest]
    layout = _smallest_good(serving)
    policies = variants(_policies(layout))
    best = max([layout, *policies], key=lambda one: (-refusals(one.facts), one.facts.compute_saved))
    if best.facts.compute_saved < layout.facts.compute_saved + _ENOUGH:
        best = layout
    changes = variants(_changes(best, question.setting))
    lower = variants(_lower(best, question.setting))
    engines: dict[str, list[Variant]] = {}
    absent: dict[str, str] = {}
    for name in ENGINES:
        try:
            engines[name] = _engine(name, best, question, variants)
        except ConfigError as error:  # the preset cannot hold this model
            absent[name] = str(error)
    return Study(layouts[0], layouts, layout, policies, best, changes, engines, refused, absent, lower=lower)


def _smallest_good(layouts: Sequence[Variant]) -> Variant:
    most = max(variant.facts.compute_saved for variant in layouts)
    return next(variant for variant in layouts if variant.facts.compute_saved >= most - _ENOUGH)


def _point(values: Mapping[str, Any], question: Question) -> Point:
    setting = question.setting
    if values.get("preset"):
        setting, values = setting.changed(clock=ClockChoice()), {**values, **_NONE}
    return points_of(setting, {name: (value,) for name, value in values.items()}, question.trace)[0]


def _allowed(question: Question) -> tuple[list[int], str]:
    """Divisors of tp that work as decode-context-parallel size, and why the first other one does not; 1 must work."""
    sizes, refused, tp = [], "", question.setting.ranks.tp
    for dcp in (size for size in range(1, tp + 1) if tp % size == 0):
        try:
            question.setting.changed(dcp=dcp).configure()
            sizes.append(dcp)
        except ConfigError as error:
            if dcp == 1:
                raise
            refused = refused or str(error)
    return sizes, refused


def _policies(layout: Variant) -> dict[str, dict[str, Any]]:
    """Placements and evictions worth a try on a layout, by what the kinds of checkpoint paid there."""
    run, dcp = layout.run, {"dcp": layout.values["dcp"]}
    wanted: dict[str, dict[str, Any]] = {"plain LRU": dcp | {"eviction": "lru"}} if run.memory is not None else {}
    if not run.checkpoint_bytes:
        return wanted
    poor = [
        name
        for name, kind in run.result.kinds.items()
        if name in _DROPPABLE and kind.taken >= _RARE and kind.reused < _POOR * kind.taken
    ]
    drops = [(name,) for name in poor] + ([tuple(poor)] if len(poor) > 1 else [])
    for drop in drops:
        kept = ",".join(kind for kind in DEFAULT_PLACEMENT if kind not in drop)
        wanted[f"drop {' and '.join(drop)}"] = dcp | {"placement": kept}
    never = next((line.share for line in layout.facts.lost if line.name == Reason.STATE_NEVER_TAKEN.value), 0.0)
    if never >= _ENOUGH:
        for grid in (f"interval:{tokens}" for tokens in _GRIDS):
            wanted[f"add {grid}"] = dcp | {"placement": ",".join((*DEFAULT_PLACEMENT, grid))}
    return wanted


def _changes(best: Variant, setting: Setting) -> dict[str, dict[str, Any]]:
    base = {name: best.values[name] for name in ("dcp", "placement", "eviction") if name in best.values}
    memory, wanted = best.run.memory, dict[str, dict[str, Any]]()
    if memory is not None:
        if best.facts.refused is not None:
            wanted["memory for every request"] = base | {"memory": str(best.facts.refused.needed)}
        wanted["half the memory"] = base | {"memory": str(memory // 2)}
        wanted["twice the memory"] = base | {"memory": str(memory * 2)}
    if setting.model.has_dtypes:
        if setting.ranks.kv_dtype in ("bf16", "fp32"):
            wanted["fp8 attention entries"] = base | {"kv_dtype": "fp8"}
        if setting.ranks.state_dtype == "fp32" and any(group.kind == Recurrent.__name__ for group in best.run.groups):
            wanted["bf16 states"] = base | {"state_dtype": "bf16"}
    return wanted


def _lower(best: Variant, setting: Setting) -> dict[str, dict[str, Any]]:
    """Lower tiers of memory on that layout, one more at a time: those that are given, else some that are usual."""
    base = {name: best.values[name] for name in ("dcp", "placement", "eviction") if name in best.values}
    memory = setting.configure()[0].memory
    if memory is None:
        return {}
    given = dict(setting.hardware.lower)
    wanted = given or {"host": str(_USUAL_HOST * memory), "disk": str(_USUAL_DISK * memory)}
    found: dict[str, dict[str, Any]] = {"no lower tiers": dict(_NONE)} if given else {}
    sizes: dict[str, str] = {}
    for name, size in wanted.items():
        sizes[name] = size
        told = " and ".join(f"{_size(value)} of {tier_text(key)}" for key, value in sizes.items())
        found[told] = _NONE | _named(sizes)
    return {name: base | values for name, values in found.items()}


def _named(sizes: Mapping[str, str]) -> dict[str, str]:
    """Sizes of tiers by the names of their options."""
    return {"host_memory" if name == "host" else name: size for name, size in sizes.items()}


def _size(text: str) -> str:
    return format_bytes(parse_bytes(text), 1000).replace(".0 ", " ")


def _engine(name: str, best: Variant, question: Question, variants: _Variants) -> list[Variant]:
    """Runs of an imitated engine: with `question.running` requests at once, and with fewer if their states are large.

    Raises:
        ConfigError: The preset cannot hold this model, or its running requests leave nothing even with one of them.
    """
    memory, states = best.run.memory, best.run.state_bytes
    running = [question.running]
    if memory is not None and states and question.running:
        fewer = fewer_running(memory, question.running, states, SLOTS[name])
        running += [fewer] if fewer < question.running else []
    found: list[Variant] = []
    for number in running:
        try:
            wanted = _sglang(best, number) if name == "sglang" else _vllm(best, number, question.running)
        except ConfigError:
            if number == running[-1]:
                raise
            continue
        found += [replace(variant, running=number) for variant in variants(wanted)]
    return found


def _vllm(best: Variant, running: int, usual: int) -> dict[str, dict[str, Any]]:
    dcp, shown = best.values["dcp"], preset_name("vllm")
    if running != usual:
        fewer = {"preset": f"vllm,running={running}", "dcp": dcp}
        return {f"{shown}, dcp {dcp}, {running} running": fewer}
    wanted: dict[str, dict[str, Any]] = {f"{shown} today": {"preset": "vllm", "dcp": 1}}
    return wanted | ({f"{shown}, dcp {dcp}": {"preset": "vllm", "dcp": dcp}} if dcp > 1 else {})


def _sglang(best: Variant, running: int) -> dict[str, dict[str, Any]]:
    """In what its running requests leave of the memory."""
    dcp, shown, memory = best.values["dcp"], preset_name("sglang"), best.run.memory
    split = {f"{shown}, dcp {dcp}, ratio {r:g}": f"sglang,memory_ratio={r}" for r in _RATIOS}
    wanted: dict[str, dict[str, Any]] = {f"{shown} today": {"preset": "sglang", "dcp": 1}}
    wanted |= {text: {"preset": preset, "dcp": dcp} for text, preset in split.items()}
    if memory is None:
        return wanted
    left = str(beside_running(memory, running, best.run.state_bytes))
    return {f"{text}, {running} running": change | {"memory": left} for text, change in wanted.items()}
