"""From what a user gives (a model or bytes, a layout, memory or GPUs, a clock) to what a trace is replayed against."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from headway.cache import ComputeCost, FullAttention, LayerSpec, ParallelLayout, Recurrent, SlidingWindow
from headway.errors import ConfigError
from headway.replay.ask.catalogue import Model, check_copies, draft_layers, draft_of, inspected_model, model_of
from headway.replay.ask.model_files import is_model_files, model_of_files
from headway.replay.ask.options import ClockChoice, Hardware, ModelChoice, RankChoice
from headway.replay.config import Roofline, Tier, Timing, gpu_of, link_of, roofline_of
from headway.replay.config.tiers import TIERS
from headway.sizes import format_bytes, parse_bytes

__all__ = [
    "checked_ranks",
    "known_roofline",
    "memory_of",
    "sized_model",
    "tiers_of",
    "timing_of",
    "weights_of",
    "with_active",
]

_COUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmbt]?)\s*", re.IGNORECASE)
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def sized_model(choice: ModelChoice, ranks: RankChoice) -> Model:
    """The model's groups on ranks of a layout, in their data types, the draft among them.

    Raises:
        ConfigError: Unknown, contradictory, or with options that would do nothing.
    """
    layout, dtypes = ranks.layout(), {"kv_dtype": ranks.kv_dtype, "state_dtype": ranks.state_dtype}
    if choice.model is None and not choice.by_hand:
        raise ConfigError(
            "which model? Give --model NAME (of the catalogue, a checkpoint's folder, its config.json, or a file that "
            "`headway inspect MODEL --json` printed), or its bytes on one rank: --attention-bytes and --state-bytes"
        )
    if choice.model is not None and (choice.by_hand or choice.kv_heads):
        raise ConfigError("give --model or bytes by hand (and with these --kv-heads), not both")
    _refuse_idle_dtypes(choice, ranks)
    if choice.model is None:
        model = _by_hand(choice, layout)
    elif is_model_files(Path(choice.model)):
        model = model_of_files(Path(choice.model), layout, **dtypes)
    elif Path(choice.model).is_file():
        model = inspected_model(Path(choice.model), layout)
    else:
        model = model_of(choice.model, layout, **dtypes)
    if ranks.state_dtype != RankChoice.state_dtype and not any(isinstance(g, Recurrent) for g in model.groups):
        raise ConfigError(f"--state-dtype {ranks.state_dtype}: {model.name} has no recurrent states: leave it out")
    model = with_active(model, choice.active_parameters)
    if choice.draft is None:
        return model
    draft = draft_of(choice.draft, ranks.kv_dtype)
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


def memory_of(hardware: Hardware, model: Model, layout: ParallelLayout) -> int | None:
    """Bytes of one rank for the cache; None for endless.

    Args:
        hardware: What the user gave.
        model: The model.
        layout: The parallel layout.

    Raises:
        ConfigError: Neither memory nor GPU, unknown weights, or nothing left beside them.
    """
    if hardware.memory is not None:
        return None if hardware.memory == "endless" else parse_bytes(hardware.memory, "--memory")
    if hardware.gpu is None:
        raise ConfigError("how much memory? Give --memory, of one rank (20GB, or endless), or --gpu NAME")
    checked_ranks(hardware, layout)
    held = weights_of(hardware, model) / layout.tp  # prefill context parallelism has all of them again
    total = gpu_of(hardware.gpu).memory_bytes
    left = int(total * hardware.gpu_share - held)
    if left <= 0:
        raise ConfigError(
            f"{format_bytes(held, 1000)} of weights a rank leave nothing of {format_bytes(total, 1000)} x "
            f"{hardware.gpu_share:g} for a cache: take more GPUs (a larger --tp), or --weights for smaller weights"
        )
    return left


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
    """Bytes of the weights, each counted once: as given, or two a parameter.

    Raises:
        ConfigError: Neither is known.
    """
    if hardware.weights is not None:
        return parse_bytes(hardware.weights, "--weights")
    if not model.parameters:
        raise ConfigError(
            f"how many parameters {model.name} has is not known here: give --weights, the bytes of its weights on all "
            f"GPUs together (such as the size of the checkpoint); or without a clock, --memory of one rank instead"
        )
    return 2 * model.parameters


def timing_of(choice: ClockChoice, hardware: Hardware, model: Model, layout: ParallelLayout) -> Timing | None:
    """The clock, or None for "order".

    Raises:
        ConfigError: An unknown clock, options of the other clock, or a model or GPU of which too little is known.
    """
    if choice.clock == "order":
        if replace(choice, efficiency=ClockChoice.efficiency) != ClockChoice():
            raise ConfigError("--speed, --max-running, --step-tokens and --wait-tokens need --clock trace")
        if choice != ClockChoice() and hardware.gpu is None:
            raise ConfigError("--efficiency is a share of what a GPU can do: name it, such as --gpu h200")
        return None
    if choice.clock != "trace":
        raise ConfigError(f"clock {choice.clock!r}: use 'order' or 'trace'")
    if hardware.gpu is None:
        raise ConfigError("--clock trace estimates how long steps take: name the GPU, such as --gpu h200")
    if not model.cost_source:
        raise ConfigError(
            f"how much {model.name} computes for a token is not known here: give --active-parameters, such as 3B"
        )
    checked_ranks(hardware, layout)
    roofline = _roofline(choice, hardware.gpu, weights_of(hardware, model), model, layout)
    return Timing(roofline, choice.speed, choice.max_running, choice.step_tokens, choice.wait_tokens)


def tiers_of(hardware: Hardware, layout: ParallelLayout) -> tuple[Tier, ...]:
    """The tiers below the memory of a rank, the fastest first.

    Raises:
        ConfigError: A size or link that cannot be read.
    """
    links = TIERS if hardware.gpu is None else TIERS | {"host": gpu_of(hardware.gpu).link}
    given = {name: getattr(hardware, f"{name}_link") or links[name] for name in hardware.lower}
    options = {"host": "--host-memory"}
    sizes = {name: parse_bytes(size, options.get(name, f"--{name}")) for name, size in hardware.lower.items()}
    return tuple(link_of(name, link, sizes[name], layout.tp * layout.pcp) for name, link in given.items())


def known_roofline(choice: ClockChoice, hardware: Hardware, model: Model, layout: ParallelLayout) -> Roofline | None:
    """What steps cost; None where no GPU is named, or too little is known of the model.

    Raises:
        ConfigError: An unknown GPU, or shares of its rates that cannot be.
    """
    weights = hardware.weights is not None or model.parameters
    if hardware.gpu is None or not model.cost_source or not weights:
        return None
    return _roofline(choice, hardware.gpu, weights_of(hardware, model), model, layout)


def _roofline(choice: ClockChoice, gpu: str, weights: int, model: Model, layout: ParallelLayout) -> Roofline:
    return roofline_of(
        model.groups,
        layout,
        model.cost,
        gpu_of(gpu),
        parameters=model.parameters or weights / 2,
        weight_bytes=weights,
        reached=_shares(choice.efficiency),
    )


def _refuse_idle_dtypes(choice: ModelChoice, ranks: RankChoice) -> None:
    """Refuse data types that would change nothing."""
    if choice.has_dtypes:
        return
    named_draft = choice.draft is not None and not choice.draft[:1].isdigit()
    given = {"--kv-dtype": ranks.kv_dtype != RankChoice.kv_dtype and not named_draft}
    given |= {"--state-dtype": ranks.state_dtype != RankChoice.state_dtype}
    if wrong := [option for option, value in given.items() if value]:
        fixed = "bytes given by hand" if choice.model is None else f"the bytes that stand in {choice.model}"
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
    for number, text in enumerate(choice.window or ()):
        size, _, tokens = text.partition(":")
        if not (size.isdigit() and tokens.isdigit()):
            raise ConfigError(f"window {text!r}: write bytes of one token and tokens of the window, such as 4096:128")
        groups.append(SlidingWindow(f"window{number}", int(size), int(tokens)))
    if choice.state_bytes:
        groups.append(Recurrent("state", choice.state_bytes))
    kinds = {"attention": "mla"} if choice.kv_heads == 1 else {}
    return Model("bytes by hand", tuple(groups), ComputeCost(), "", 0, "given by hand", kinds=kinds)


def _shares(text: str) -> tuple[float, float]:
    try:
        flops, bandwidth = (float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--efficiency {text!r}: write two shares of the peak rates, such as 0.5,0.7") from None
    return flops, bandwidth
