"""What `headway replay`, `sweep`, `advise` and `explain` are asked: the options of a command line as records.

Each field is an option, and its help text says what it means. The rest of this room works with these records as they
are: `Setting` has all of them that one run is made with.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.cache import DEFAULT_PLACEMENT, ParallelLayout
from headway.engine import DEFAULT_WAIT_TOKENS
from headway.errors import ConfigError, TraceError
from headway.formats import FORMATS, Trace
from headway.formats.chat import ChatEntry
from headway.progress import lasting
from headway.replay.ask.catalogue import KV_DTYPES, STATE_DTYPES, catalogue
from headway.replay.ask.model_files import is_model_files
from headway.replay.ask.rendering import read_trace
from headway.replay.config import LINKS, PRESETS
from headway.replay.config.tiers import TIERS
from headway.replay.trace.generate import WORKLOADS, generate

__all__ = [
    "GRID",
    "RUNNING",
    "AsJson",
    "ClockChoice",
    "Hardware",
    "Html",
    "KvDtype",
    "ListModels",
    "MaxAnswer",
    "ModelChoice",
    "Pcp",
    "PolicyChoice",
    "Preset",
    "RankChoice",
    "RunChoice",
    "StateDtype",
    "Tp",
    "TraceChoice",
    "option",
]

_EXAMPLE_REQUESTS = 3000
"""Requests of a generated trace, unless somebody says otherwise."""


def option(panel: str | None, text: str, *names: str, **more: Any) -> Any:
    """An option of a panel."""
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


def _list_models(wanted: bool) -> None:
    if wanted:
        for name, entry in catalogue()["models"].items():
            others = ", ".join(entry.get("aliases", ()))
            typer.echo(f"{name}  (also {others})" if others else name)
        raise typer.Exit


RUNNING, GRID = "Running", "Grid"
"""Panels of the options that say where runs are done and kept, and which."""
_TRACE, _MODEL, _MEMORY, _POLICY = "Trace", "Model and layout", "Memory", "Policies"
_LOWER = "Lower tiers of memory"
_CLOCK = "Clock (estimates of time, with --gpu)"
_TRACE_HELP = "A trace: a file (plain, .gz or .zst) or a folder. Nothing: a generated one."
_FORMAT_HELP = (
    "Who wrote the trace; auto tells it from the first object. "
    + "; ".join(f"{name}: {form.summary}" for name, form in FORMATS.items())
    + "."
)


@dataclass(frozen=True)
class TraceChoice:
    """The trace, and how it is read."""

    trace: Annotated[Path | None, typer.Argument(help=_TRACE_HELP)] = None
    format: Annotated[str, option(_TRACE, _FORMAT_HELP)] = "auto"
    workload: Annotated[str, option(_TRACE, f"What to generate without a trace: {', '.join(WORKLOADS)}.")] = "mixed"
    seed: Annotated[int, option(_TRACE, "Seed of the generated workload.")] = 0
    limit: Annotated[int | None, option(_TRACE, "Requests to replay: all of a trace, 3,000 generated ones.")] = None
    block_tokens: Annotated[int | None, option(_TRACE, "Tokens in a block of the trace, if not the usual.")] = None
    tokenizer: Annotated[str | None, option(_TRACE, "For chat logs: a folder, a hub id, or bytes.")] = None
    skip_bad: Annotated[int, option(_TRACE, "Damaged lines that may be left out.", min=0)] = 0
    spread: Annotated[
        float | None,
        option(_TRACE, "Hours over which sessions start, evenly, where a trace holds whole sessions.", min=0),
    ] = None
    outputs: Annotated[
        str | None,
        option(_TRACE, "Whether prompts contain earlier answers, if the trace does not say: never or continuation."),
    ] = None

    def require(self) -> None:
        """Notice a mistyped trace before anything else is asked for.

        Raises:
            TraceError: There is no such file or folder.
        """
        if self.trace is not None and not self.trace.exists():
            raise TraceError(
                f"{self.trace}: there is no such file or folder; without a trace, a generated one is replayed"
            )

    def load(self, entries: list[ChatEntry] | None = None) -> Trace:
        """Read or generate the trace, and tell on stderr what there is to know of how it was read.

        Args:
            entries: Where the requests of a chat log are kept, in the order of the file.

        Raises:
            TraceError: A file that cannot be read as a trace.
            ConfigError: An unknown format or workload, a tokenizer that is missing, a limit below 1, or options that
                would do nothing.
        """
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"--limit {self.limit}: give a number of requests, 1 or more")
        self._refuse_idle()
        if self.trace is None:
            requests = self.limit or _EXAMPLE_REQUESTS
            block = 64 if self.block_tokens is None else self.block_tokens
            return generate(self.workload, requests, seed=self.seed, block_tokens=block)
        with lasting(f"reading {self.trace}"):
            trace = read_trace(
                self.trace,
                format=self.format,
                block_tokens=self.block_tokens,
                tokenizer=self.tokenizer,
                limit=self.limit,
                skip_bad=self.skip_bad,
                spread=None if self.spread is None else 3600 * self.spread,
                entries=entries,
            )
        for note in trace.notes:
            typer.echo(f"headway: {note}", err=True)
        return trace

    def _refuse_idle(self) -> None:
        """Refuse what says how to generate a trace beside a trace, and how to read one where there is none."""
        names = ("format", "tokenizer", "skip_bad", "spread") if self.trace is None else ("workload", "seed")
        wrong = ", ".join(
            f"--{name.replace('_', '-')}" for name in names if getattr(self, name) != getattr(TraceChoice, name)
        )
        if wrong and self.trace is None:
            raise ConfigError(f"{wrong}: says how a trace is read, and none is given: name its file or folder")
        if wrong:
            raise ConfigError(f"{wrong}: is for a generated trace, and {self.trace} is replayed: leave it out")


@dataclass(frozen=True)
class ClockChoice:
    """Arrival times and the speed of steps."""

    clock: Annotated[str, option(_CLOCK, "order: each request ends before the next. trace: arrivals as recorded.")] = (
        "order"
    )
    speed: Annotated[float, option(_CLOCK, "Compress arrivals: 2 is twice the traffic.")] = 1.0
    max_running: Annotated[int, option(_CLOCK, "Most requests that run at once.")] = 64
    step_tokens: Annotated[int, option(_CLOCK, "Most tokens of one step.")] = 8192
    wait_tokens: Annotated[
        int,
        option(
            _CLOCK, "A request waits where a running one is about to compute so many of its tokens; 0: never.", min=0
        ),
    ] = DEFAULT_WAIT_TOKENS
    efficiency: Annotated[
        str, option(_CLOCK, "Shares of the GPU's peak FLOP/s and bandwidth that are reached; also without the clock.")
    ] = "0.5,0.7"

    @property
    def timed(self) -> bool:
        """Whether arrival times count."""
        return self.clock == "trace"


@dataclass(frozen=True)
class ModelChoice:
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
    def by_hand(self) -> bool:
        """Whether its bytes are given."""
        return bool(self.attention_bytes or self.state_bytes or self.window)

    @property
    def has_dtypes(self) -> bool:
        """Whether its bytes follow from data types, and are not given by hand or fixed in a file."""
        return self.model is not None and (is_model_files(Path(self.model)) or not Path(self.model).is_file())


Tp = Annotated[int, option(_MODEL, "Tensor-parallel size.")]
Pcp = Annotated[
    int,
    option(_MODEL, "Prefill-context-parallel size: ranks that share the tokens of a prompt, with all weights each."),
]
KvDtype = Annotated[str, option(_MODEL, f"Attention entries: {', '.join(KV_DTYPES)}.")]
StateDtype = Annotated[str, option(_MODEL, f"Recurrent states: {', '.join(STATE_DTYPES)}.")]


@dataclass(frozen=True)
class RankChoice:
    """How ranks hold the model: one parallel layout, and the data types."""

    tp: Tp = 1
    dcp: Annotated[int, option(_MODEL, "Decode-context-parallel size; divides --tp.")] = 1
    pcp: Pcp = 1
    kv_dtype: KvDtype = "bf16"
    state_dtype: StateDtype = "fp32"

    def layout(self) -> ParallelLayout:
        """The layout.

        Raises:
            ConfigError: Sizes that do not go together.
        """
        return ParallelLayout(tp=self.tp, dcp=self.dcp, pcp=self.pcp)


@dataclass(frozen=True)
class Hardware:
    """The memory of one rank, as bytes or by the GPU."""

    memory: Annotated[str | None, option(_MEMORY, "Of one rank, for the cache: 20GB, 16GiB, or endless.")] = None
    gpu: Annotated[
        str | None,
        option(
            _MEMORY, "A GPU such as h200: its memory less the weights, instead of --memory; and times as estimates."
        ),
    ] = None
    gpus: Annotated[
        int,
        option(
            _MEMORY, "How many GPUs you have, to check the layout: it takes --tp x --pcp.", show_default="not checked"
        ),
    ] = 0
    weights: Annotated[str | None, option(_MEMORY, "Bytes of the weights on all GPUs together.")] = None
    gpu_share: Annotated[float, option(_MEMORY, "Share of a GPU for weights and cache.")] = 0.9
    host_memory: Annotated[
        str | None, option(_LOWER, "Host memory of one rank that takes what the cache has no room for: 80GB.")
    ] = None
    disk: Annotated[str | None, option(_LOWER, "Disk of one rank that takes what the tier above has no room for.")] = (
        None
    )
    store: Annotated[str | None, option(_LOWER, "A store behind the network, likewise: bytes for one rank.")] = None
    host_link: Annotated[
        str | None,
        option(
            _LOWER,
            f"How fast it is: one of {', '.join(LINKS)}, or 20GB/s of one rank (READ/s,WRITE/s).",
            show_default="by --gpu",
        ),
    ] = None
    disk_link: Annotated[str | None, option(_LOWER, "The same of the disk.", show_default=TIERS["disk"])] = None
    store_link: Annotated[str | None, option(_LOWER, "The same of the store.", show_default=TIERS["store"])] = None

    @property
    def lower(self) -> dict[str, str]:
        """Sizes of the tiers below the cache that there are, by name."""
        given: dict[str, str | None] = {"host": self.host_memory, "disk": self.disk, "store": self.store}
        return {name: size for name, size in given.items() if size not in (None, "0")}

    def check(self) -> None:
        """Refuse what would do nothing where memory is given in bytes.

        Raises:
            ConfigError: Names the options.
        """
        idle = [f"--{name}-link" for name in TIERS if getattr(self, f"{name}_link") and name not in self.lower]
        if idle:
            raise ConfigError(f"{', '.join(idle)}: says how fast a tier is that there is not: give its size as well")
        if self.memory is None:
            return
        given: dict[str, Any] = {} if self.gpu else {"--gpus": self.gpus, "--weights": self.weights}
        given |= {"--gpu-share": self.gpu_share != Hardware.gpu_share}
        if wrong := [name for name, value in given.items() if value]:
            raise ConfigError(
                f"{', '.join(wrong)}: go with --gpu, which says how much memory there is or how fast it is"
            )


@dataclass(frozen=True)
class PolicyChoice:
    """What the cache keeps and drops."""

    placement: Annotated[
        str, option(_POLICY, "Positions that get a checkpoint, with commas; interval:N for a grid.")
    ] = ",".join(DEFAULT_PLACEMENT)
    eviction: Annotated[str, option(_POLICY, "adaptive, value, shared-value, lru or greedy-dual.")] = "adaptive"
    alignment: Annotated[int, option(_POLICY, "States can be exported at multiples of that many tokens.")] = 1

    @property
    def kinds(self) -> list[str]:
        """The kinds of position."""
        return [kind.strip() for kind in self.placement.split(",") if kind.strip()]


@dataclass(frozen=True)
class RunChoice:
    """Where many runs are done, and where they are kept."""

    out: Annotated[Path, option(RUNNING, "Folder for finished runs and the report.")] = Path("headway-sweep")
    jobs: Annotated[int, option(RUNNING, "Processes; 0: one per processor.")] = 0
    ray: Annotated[bool, option(RUNNING, "Run on a Ray cluster (RAY_ADDRESS, or the one here).", "--ray")] = False


MaxAnswer = Annotated[int | None, option(_TRACE, "Cut answers to that many tokens.")]
Preset = Annotated[
    str | None,
    option(
        _POLICY,
        f"Imitate another engine: {', '.join(PRESETS)} (without a version, the newest); with settings as in "
        f"vllm,running=32.",
    ),
]
Html = Annotated[Path | None, option(None, "Write a report with figures to this file.", "--html")]
ListModels = Annotated[
    bool,
    typer.Option("--models", callback=_list_models, is_eager=True, help="List the models that --model knows."),
]
AsJson = Annotated[bool, option(None, "Print one JSON object.", "--json")]
