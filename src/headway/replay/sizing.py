"""From what a user gives (a model or bytes, a layout, memory or GPUs) to what a trace is replayed against."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headway.cache import ComputeCost, FullAttention, LayerSpec, ParallelLayout, Recurrent, SlidingWindow
from headway.errors import ConfigError
from headway.replay.catalogue import Model, check_copies, draft_layers, draft_of, inspected_model, model_of
from headway.replay.gpus import gpu_of
from headway.replay.model_files import is_model_files, model_of_files

__all__ = [
    "Hardware",
    "ModelChoice",
    "checked_ranks",
    "format_size",
    "memory_of",
    "parse_size",
    "refuse_gpu_words",
    "sized_model",
    "weights_of",
    "with_active",
]

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_COUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmbt]?)\s*", re.IGNORECASE)
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)


@dataclass(frozen=True)
class ModelChoice:
    """How a user names the model.

    Attributes:
        name: A name of the catalogue, a checkpoint's folder, its config.json, or a file that `headway inspect MODEL
            --json` printed; None: bytes by hand.
        attention_bytes: By hand: full attention, one token, one rank, after tensor parallelism and before context
            parallelism.
        state_bytes: By hand: one recurrent state on one rank.
        windows: By hand: BYTES:TOKENS of each kind of sliding window.
        draft: See `draft_of`; None for none.
        kv_dtype: Data type of attention entries.
        state_dtype: Data type of recurrent states.
        kv_heads: By hand: key/value heads of the whole model, 1 for latent attention; 0: not known.
        active_parameters: Parameters that work on a token, as text such as `3B`; None: what is known of the model.
    """

    name: str | None = None
    attention_bytes: int = 0
    state_bytes: int = 0
    windows: Sequence[str] = ()
    draft: str | None = None
    kv_dtype: str = "bf16"
    state_dtype: str = "fp32"
    kv_heads: int = 0
    active_parameters: str | None = None

    @property
    def by_hand(self) -> bool:
        """Whether its bytes are given."""
        return bool(self.attention_bytes or self.state_bytes or self.windows)

    @property
    def has_dtypes(self) -> bool:
        """Whether its bytes follow from data types, and are not given by hand or fixed in a file."""
        return self.name is not None and (is_model_files(Path(self.name)) or not Path(self.name).is_file())


@dataclass(frozen=True)
class Hardware:
    """How a user names the memory.

    Attributes:
        memory: Bytes of one rank for the cache, as text such as 20GB; "endless" for no limit.
        gpu: Name of a GPU, instead.
        gpus: How many; 0: as many as the layout has ranks.
        weights: Bytes of the weights on all GPUs together, as text; None: two bytes a parameter.
        share: Share of a GPU's memory that weights and cache may take.
    """

    memory: str | None = None
    gpu: str | None = None
    gpus: int = 0
    weights: str | None = None
    share: float = 0.9


def parse_size(text: str) -> int:
    """Read a size such as `20GB`, `16 GiB` or `1000000`.

    Raises:
        ConfigError: Anything else.
    """
    match = _SIZE.fullmatch(text)
    size = int(float(match[1]) * (1024 if match[3] else 1000) ** _UNITS[match[2].lower()]) if match else 0
    if size <= 0:
        raise ConfigError(f"{text!r} is not a size: write it like 20GB, 16GiB or 1000000")
    return size


def format_size(size: float) -> str:
    """Write a size for people: `1.5 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


def sized_model(choice: ModelChoice, layout: ParallelLayout) -> Model:
    """The model's groups under a layout, the draft among them.

    Raises:
        ConfigError: Unknown, contradictory, or with options that would do nothing.
    """
    if choice.name is None and not choice.by_hand:
        raise ConfigError(
            "which model? Give --model NAME (of the catalogue, a checkpoint's folder, its config.json, or a file that "
            "`headway inspect MODEL --json` printed), or its bytes on one rank: --attention-bytes and --state-bytes"
        )
    if choice.name is not None and (choice.by_hand or choice.kv_heads):
        raise ConfigError("give --model or bytes by hand (and with these --kv-heads), not both")
    _refuse_idle_dtypes(choice)
    if choice.name is None:
        model = _by_hand(choice, layout)
    elif is_model_files(Path(choice.name)):
        model = model_of_files(Path(choice.name), layout, kv_dtype=choice.kv_dtype, state_dtype=choice.state_dtype)
    elif Path(choice.name).is_file():
        model = inspected_model(Path(choice.name), layout)
    else:
        model = model_of(choice.name, layout, kv_dtype=choice.kv_dtype, state_dtype=choice.state_dtype)
    if choice.state_dtype != ModelChoice.state_dtype and not any(isinstance(g, Recurrent) for g in model.groups):
        raise ConfigError(f"--state-dtype {choice.state_dtype}: {model.name} has no recurrent states: leave it out")
    model = with_active(model, choice.active_parameters)
    if choice.draft is None:
        return model
    draft = draft_of(choice.draft, choice.kv_dtype)
    layers = {**model.layers, draft.name: draft_layers(choice.draft)}
    return replace(model, groups=(*model.groups, draft), layers=layers)


def with_active(model: Model, active: str | None) -> Model:
    """The model with its compute from the parameters that work on a token, given as text such as `3B`.

    Attention keeps what is known of it; otherwise it is taken to cost as much as the rest at 100k tokens.

    Raises:
        ConfigError: Not a number.
    """
    if active is None:
        return model
    match = _COUNT.fullmatch(active)
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"--active-parameters {active!r}: write it like 3B or 780M")
    linear = 2 * float(match[1]) * _COUNTS[match[2].lower()]
    assumed = ComputeCost()
    quadratic = model.cost.quadratic if model.cost_source else linear * assumed.quadratic / assumed.linear
    source = f"2 x {active} active parameters, as given"
    return replace(model, cost=ComputeCost(linear, quadratic), cost_source=source)


def memory_of(hardware: Hardware, model: Model, layout: ParallelLayout, *, timed: bool = False) -> int | None:
    """Bytes of one rank for the cache; None for endless.

    Args:
        hardware: What the user gave.
        model: The model.
        layout: The parallel layout.
        timed: The GPU is named for its speed as well, so memory may be given beside it.

    Raises:
        ConfigError: Neither memory nor GPU, memory with what only a GPU needs, unknown weights, or nothing left
            beside them.
    """
    if hardware.memory is not None:
        refuse_gpu_words(hardware, timed=timed)
        return None if hardware.memory == "endless" else parse_size(hardware.memory)
    if hardware.gpu is None:
        raise ConfigError("how much memory? Give --memory, of one rank (20GB, or endless), or --gpu NAME")
    ranks, weights = checked_ranks(hardware, layout), weights_of(hardware, model)
    total = gpu_of(hardware.gpu).memory_bytes
    left = int(total * hardware.share - weights / ranks)
    if left <= 0:
        raise ConfigError(
            f"{format_size(weights / ranks)} of weights a rank leave nothing of {format_size(total)} x "
            f"{hardware.share:g} for a cache: take more GPUs (a larger --tp), or --weights for smaller weights"
        )
    return left


def refuse_gpu_words(hardware: Hardware, *, timed: bool = False) -> None:
    """Refuse what would do nothing where memory is given in bytes: without a clock, all that is about a GPU.

    Raises:
        ConfigError: Names the options.
    """
    if hardware.gpu is not None and not timed:
        raise ConfigError("give --memory or --gpu, not both")
    given: dict[str, Any] = {} if timed else {"--gpus": hardware.gpus, "--weights": hardware.weights}
    given |= {"--gpu-share": hardware.share != Hardware.share}
    if wrong := [option for option, value in given.items() if value]:
        raise ConfigError(f"{', '.join(wrong)}: go with --gpu, not with --memory")


def checked_ranks(hardware: Hardware, layout: ParallelLayout) -> int:
    """Ranks of the layout, a GPU each.

    Raises:
        ConfigError: Another number of GPUs was named.
    """
    ranks = layout.tp * layout.pcp
    if hardware.gpus not in (0, ranks):
        raise ConfigError(
            f"--gpus {hardware.gpus} for tp={layout.tp}, pcp={layout.pcp}: the layout takes tp x pcp = {ranks}; for "
            f"several copies of the model, replay one copy's share of the traffic"
        )
    return ranks


def weights_of(hardware: Hardware, model: Model) -> int:
    """Bytes of the weights on all ranks together: as given, or two a parameter.

    Raises:
        ConfigError: Neither is known.
    """
    if hardware.weights is not None:
        return parse_size(hardware.weights)
    if not model.parameters:
        raise ConfigError(
            f"how many parameters {model.name} has is not known here: give --weights, the bytes of its weights on all "
            f"GPUs together (such as the size of the checkpoint); or without a clock, --memory of one rank instead"
        )
    return 2 * model.parameters


def _refuse_idle_dtypes(choice: ModelChoice) -> None:
    """Refuse data types that would change nothing."""
    if choice.has_dtypes:
        return
    named_draft = choice.draft is not None and not choice.draft[:1].isdigit()
    given = {"--kv-dtype": choice.kv_dtype != ModelChoice.kv_dtype and not named_draft}
    given |= {"--state-dtype": choice.state_dtype != ModelChoice.state_dtype}
    if wrong := [option for option, value in given.items() if value]:
        fixed = "bytes given by hand" if choice.name is None else f"the bytes that stand in {choice.name}"
        raise ConfigError(
            f"{', '.join(wrong)}: {fixed} do not change with a data type; give the bytes of that data type by hand, or "
            f"the model by its name or its config.json"
        )


def _by_hand(choice: ModelChoice, layout: ParallelLayout) -> Model:
    if layout.dcp > 1:
        if not choice.attention_bytes:
            raise ConfigError(f"dcp={layout.dcp}: it splits the tokens of full attention: give --attention-bytes")
        if not choice.kv_heads:
            raise ConfigError(
                f"dcp={layout.dcp}: only copies of key/value heads can be split by tokens, so give --kv-heads, those "
                f"of the whole model (1 for latent attention, MLA)"
            )
        check_copies("the model", choice.kv_heads, layout)
    groups: list[LayerSpec] = []
    if choice.attention_bytes:
        groups.append(FullAttention("attention", choice.attention_bytes))
    for number, text in enumerate(choice.windows):
        size, _, tokens = text.partition(":")
        if not (size.isdigit() and tokens.isdigit()):
            raise ConfigError(f"window {text!r}: write bytes of one token and tokens of the window, such as 4096:128")
        groups.append(SlidingWindow(f"window{number}", int(size), int(tokens)))
    if choice.state_bytes:
        groups.append(Recurrent("state", choice.state_bytes))
    return Model("bytes by hand", tuple(groups), ComputeCost(), "", 0, "given by hand")
