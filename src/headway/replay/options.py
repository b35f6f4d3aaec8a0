"""The options of `headway replay`, `sweep`, `advise` and `explain`, in the records in which they belong together.

What each means is its help text. A record hands on what it was told as the choices that the rest works with, so no
command repeats another's options, nor what is made of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.cache import DEFAULT_PLACEMENT, ParallelLayout
from headway.replay.catalogue import KV_DTYPES, STATE_DTYPES, catalogue
from headway.replay.generate import WORKLOADS
from headway.replay.inputs import EXAMPLE_MODEL, TraceChoice, load_trace, require_trace
from headway.replay.presets import PRESETS
from headway.replay.readers import FORMATS
from headway.replay.sizing import Hardware, ModelChoice
from headway.replay.timing import ClockChoice
from headway.replay.trace import Trace

__all__ = [
    "RUNNING",
    "AsJson",
    "ClockFlags",
    "GpuFlags",
    "Html",
    "KvDtype",
    "LayoutFlags",
    "ListModels",
    "MaxAnswer",
    "MemoryFlags",
    "ModelFlags",
    "Pcp",
    "PolicyFlags",
    "Preset",
    "RunFlags",
    "StateDtype",
    "Tp",
    "TraceFlags",
    "example_memory",
    "option",
]


def option(panel: str | None, text: str, *names: str, **more: Any) -> Any:
    """An option of a panel."""
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


def _list_models(asked: bool) -> None:
    if asked:
        for name, entry in catalogue()["models"].items():
            others = ", ".join(entry.get("aliases", ()))
            typer.echo(f"{name}  (also {others})" if others else name)
        raise typer.Exit


RUNNING = "Running"
"""Panel of the options that say where runs are done and kept."""
_TRACE, _MODEL, _MEMORY, _POLICY = "Trace", "Model and layout", "Memory", "Policies"
_CLOCK = "Clock (estimates of time, with --gpu)"
_TRACE_HELP = "A trace: a file (plain, .gz or .zst) or a folder. Nothing: a generated one."
_FORMAT_HELP = (
    "Who wrote the trace; auto tells it from the first object. "
    + "; ".join(f"{name}: {form.summary}" for name, form in FORMATS.items())
    + "."
)


@dataclass(frozen=True)
class TraceFlags:
    """The trace, and how it is read."""

    trace: Annotated[Path | None, typer.Argument(help=_TRACE_HELP)] = None
    format: Annotated[str, option(_TRACE, _FORMAT_HELP)] = TraceChoice.format
    workload: Annotated[str, option(_TRACE, f"What to generate without a trace: {', '.join(WORKLOADS)}.")] = (
        TraceChoice.workload
    )
    seed: Annotated[int, option(_TRACE, "Seed of the generated workload.")] = TraceChoice.seed
    limit: Annotated[int | None, option(_TRACE, "Requests to replay: all of a trace, 3,000 generated ones.")] = None
    block_tokens: Annotated[int | None, option(_TRACE, "Tokens in a block of the trace, if not the usual.")] = None
    tokenizer: Annotated[str | None, option(_TRACE, "For chat logs: a folder, a hub id, or bytes.")] = None
    outputs: Annotated[
        str | None,
        option(_TRACE, "Whether prompts contain earlier answers, if the trace does not say: never or continuation."),
    ] = None

    def load(self) -> Trace:
        """Read or generate it.

        Raises:
            TraceError: A file that cannot be read as a trace.
            ConfigError: What `load_trace` refuses.
        """
        return load_trace(
            TraceChoice(
                self.trace, self.format, self.workload, self.seed, self.limit, self.block_tokens, self.tokenizer
            )
        )


@dataclass(frozen=True)
class ClockFlags:
    """Arrival times and the speed of steps."""

    clock: Annotated[str, option(_CLOCK, "order: each request ends before the next. trace: arrivals as recorded.")] = (
        ClockChoice.clock
    )
    speed: Annotated[float, option(_CLOCK, "Compress arrivals: 2 is twice the traffic.")] = ClockChoice.speed
    max_running: Annotated[int, option(_CLOCK, "Most requests that run at once.")] = ClockChoice.max_running
    step_tokens: Annotated[int, option(_CLOCK, "Most tokens of one step.")] = ClockChoice.step_tokens
    efficiency: Annotated[str, option(_CLOCK, "Shares of the GPU's peak FLOP/s and bandwidth that are reached.")] = (
        ClockChoice.efficiency
    )

    def choice(self) -> ClockChoice:
        """The clock."""
        return ClockChoice(self.clock, self.speed, self.max_running, self.step_tokens, self.efficiency)


@dataclass(frozen=True)
class ModelFlags:
    """The model, by name or by its bytes."""

    model: Annotated[
        str | None,
        option(
            _MODEL, "A name such as kimi-k3, a checkpoint's folder, a config.json, or what `headway inspect` printed."
        ),
    ] = None
    attention_bytes: Annotated[
        int,
        option(
            _MODEL,
            "By hand, instead of --model: bytes of a token's attention on one rank, before --dcp.",
            show_default="none",
        ),
    ] = 0
    state_bytes: Annotated[
        int, option(_MODEL, "By hand: bytes of one recurrent state on one rank.", show_default="none")
    ] = 0
    window: Annotated[list[str] | None, option(_MODEL, "By hand: BYTES:TOKENS of a sliding window.")] = None
    kv_heads: Annotated[
        int,
        option(
            _MODEL,
            "By hand: key/value heads of the whole model, 1 for latent attention; --dcp needs to know.",
            show_default="not known",
        ),
    ] = 0
    draft: Annotated[str | None, option(_MODEL, "Draft: kimi-k3-mla, or BYTES[:LOOKAHEAD[:replicated]].")] = None
    active_parameters: Annotated[str | None, option(_MODEL, "Parameters that work on a token, if not known: 3B.")] = (
        None
    )

    @property
    def named(self) -> bool:
        """Whether there is a model, by name or by hand."""
        return bool(self.model or self.attention_bytes or self.state_bytes or self.window)

    def choice(self, kv_dtype: str = ModelChoice.kv_dtype, state_dtype: str = ModelChoice.state_dtype) -> ModelChoice:
        """The model in these data types."""
        return ModelChoice(
            self.model,
            self.attention_bytes,
            self.state_bytes,
            tuple(self.window or ()),
            self.draft,
            kv_dtype,
            state_dtype,
            self.kv_heads,
            self.active_parameters,
        )


Tp = Annotated[int, option(_MODEL, "Tensor-parallel size.")]
Pcp = Annotated[int, option(_MODEL, "Prefill-context-parallel size.")]
KvDtype = Annotated[str, option(_MODEL, f"Attention entries: {', '.join(KV_DTYPES)}.")]
StateDtype = Annotated[str, option(_MODEL, f"Recurrent states: {', '.join(STATE_DTYPES)}.")]


@dataclass(frozen=True)
class LayoutFlags:
    """One parallel layout and the data types of one run."""

    tp: Tp = 1
    dcp: Annotated[int, option(_MODEL, "Decode-context-parallel size; divides --tp.")] = 1
    pcp: Pcp = 1
    kv_dtype: KvDtype = ModelChoice.kv_dtype
    state_dtype: StateDtype = ModelChoice.state_dtype

    def layout(self) -> ParallelLayout:
        """The layout.

        Raises:
            ConfigError: Sizes that do not go together.
        """
        return ParallelLayout(tp=self.tp, dcp=self.dcp, pcp=self.pcp)


@dataclass(frozen=True)
class GpuFlags:
    """The GPUs, and what the weights take of them."""

    gpu: Annotated[str | None, option(_MEMORY, "Instead: a GPU such as h200; weights are taken off.")] = None
    gpus: Annotated[
        int,
        option(
            _MEMORY, "How many GPUs you have, to check the layout: it takes --tp x --pcp.", show_default="not checked"
        ),
    ] = 0
    weights: Annotated[str | None, option(_MEMORY, "Bytes of the weights on all GPUs together.")] = None
    gpu_share: Annotated[float, option(_MEMORY, "Share of a GPU for weights and cache.")] = Hardware.share


@dataclass(frozen=True)
class _MemorySize:
    memory: Annotated[str | None, option(_MEMORY, "Of one rank, for the cache: 20GB, 16GiB, or endless.")] = None


@dataclass(frozen=True)
class MemoryFlags(GpuFlags, _MemorySize):
    """The memory of one rank, as bytes or by the GPU: fields of the second base come first."""

    def hardware(self) -> Hardware:
        """Both ways to say it, as they were given."""
        return Hardware(self.memory, self.gpu, self.gpus, self.weights, self.gpu_share)


@dataclass(frozen=True)
class PolicyFlags:
    """What the cache keeps and drops."""

    placement: Annotated[
        str, option(_POLICY, "Positions that get a checkpoint, with commas; interval:N for a grid.")
    ] = ",".join(DEFAULT_PLACEMENT)
    eviction: Annotated[str, option(_POLICY, "value, lru or greedy-dual.")] = "value"
    alignment: Annotated[int, option(_POLICY, "States can be exported at multiples of that many tokens.")] = 1

    @property
    def kinds(self) -> list[str]:
        """The kinds of position."""
        return [kind.strip() for kind in self.placement.split(",") if kind.strip()]


@dataclass(frozen=True)
class RunFlags:
    """Where many runs are done, and where they are kept."""

    out: Annotated[Path, option(RUNNING, "Folder for finished runs and the report.")] = Path("headway-sweep")
    jobs: Annotated[int, option(RUNNING, "Processes; 0: one a processor.")] = 0
    ray: Annotated[bool, option(RUNNING, "Run on a Ray cluster (RAY_ADDRESS, or the one here).", "--ray")] = False


MaxAnswer = Annotated[int | None, option(_TRACE, "Cut answers to that many tokens.")]
Preset = Annotated[
    str | None,
    option(_POLICY, f"Imitate another engine: {', '.join(PRESETS)}; with settings as in vllm,running=32."),
]
Html = Annotated[Path | None, option(None, "Write a report with figures to this file.", "--html")]
ListModels = Annotated[
    bool,
    typer.Option("--models", callback=_list_models, is_eager=True, help="List the models that --model knows."),
]
AsJson = Annotated[bool, option(None, "Print one JSON object.", "--json")]


def example_memory(
    trace: TraceFlags, model: ModelFlags, memory: str | None, gpu: str | None, usual: str
) -> tuple[ModelFlags, str | None]:
    """Model and memory: what was given, or those of the example where neither a trace nor a model was.

    Args:
        trace: The trace, which must be there if it is named.
        model: The model.
        memory: The memory, if it was given.
        gpu: The GPU, if it was given.
        usual: Memory of the example.

    Raises:
        TraceError: There is no such trace. It is told before a model is asked for, and before a long run.
    """
    require_trace(trace.trace)
    if trace.trace is not None or model.named:
        return model, memory
    return replace(model, model=EXAMPLE_MODEL), memory or (None if gpu else usual)
