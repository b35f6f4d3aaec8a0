"""Loads a model and its tokenizer: a directory, a hub id, or the small model that comes with Headway.

Every failure to load is a `ModelError` of one sentence; the cause stays attached for those who debug.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import CONFIG_NAME
from transformers.utils import logging as transformers_logging
from transformers.utils.quantization_config import Mxfp4Config

import headway.models.kimi_k3  # noqa: F401  (makes the Auto classes know it)
from headway.errors import ConfigError, ModelError
from headway.runtime.model.inspection import inspect_model
from headway.runtime.model.layout import ModelLayout
from headway.runtime.parallel.communicator import Rehearsal
from headway.runtime.parallel.distributed import TorchCommunicator
from headway.runtime.parallel.tensor_parallel import layout_of_share, rules_of_reading, split_model
from headway.runtime.sources import BUILTIN, head_weights, require_served_format, require_served_weights, resolve_source

__all__ = [
    "BUILTIN",
    "DTYPES",
    "LoadedModel",
    "end_tokens",
    "layout_of_rank",
    "layout_without_weights",
    "load_model",
    "load_tokenizer",
    "read_device",
    "resolve_device",
    "resolve_dtype",
    "resolve_source",
]

logger = logging.getLogger(__name__)

_HUB_SECONDS = 10.0
_NAMED = 5
"""Weights that are named where a checkpoint does not fit its config."""
_MEDIA = r"(visual|vision_\w+|audio_\w+|multi_modal_projector|mm_projector|embed_vision|embed_audio)"
_LEFT = re.compile(rf"rotary_emb\.inv_freq$|position_ids$|(^|\.){_MEDIA}\.")
"""Weights that a text model may leave, besides heads for drafts: computed buffers, and the parts for other media."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Types of weights and cache entries by the name that options use; `auto` is fp32 on the CPU, else bf16."""


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run.

    Attributes:
        name: What to call it: `headway-builtin`, the directory's name, or the hub id.
        model: The transformers model, on its device, in evaluation mode.
        tokenizer: Its tokenizer.
        layout: What it stores.
        folder: The directory that it was loaded from; None for a hub id.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    layout: ModelLayout
    folder: Path | None = None


def load_model(
    source: str | None = None, device: str = "cpu", dtype: str = "auto", ranks: TorchCommunicator | None = None
) -> LoadedModel:
    """Load a model with its tokenizer and read its layout.

    Args:
        source: A directory in Hugging Face form, a hub id, or None or `builtin` for the model that comes with Headway.
        device: `cpu`, `cuda`, `cuda:1`, ...
        dtype: `auto`, `fp32` or `bf16`.
        ranks: The ranks that share the weights, all of the process group; they load at the same time. None for a rank
            that has all of the weights. The layout is that of tensor parallelism alone (see `ModelLayout.over`).

    Raises:
        ModelError: There is no such model, it cannot be loaded, or it cannot be served.
        ConfigError: An unknown device or dtype, or more ranks than the model can be shared among.
    """
    target = resolve_device(device)
    weights = resolve_dtype(dtype, target)
    name, path = resolve_source(source)
    _require_reachable(path)
    config = _load_config(name, path)
    require_served_weights(name, config.to_dict())
    tokenizer = _tokenizer_of(name, path)
    if not sys.stderr.isatty():  # in a file or a pipe the bar is a heap of lines
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    whole: ModelLayout | None = None
    if ranks is None:
        model = _text_alone(_load_weights(name, _class_for(config), path, config, weights))
    else:
        model, whole = _load_share(name, path, config, weights, ranks)
    try:
        model = model.to(target).eval()
    except torch.OutOfMemoryError as error:
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        raise ModelError(
            f"model {name!r} needs {size / 1024**3:.1f} GiB for its weights, {device} has not that much free"
        ) from error
    _refuse_nan(name, model)
    folder = Path(path) if Path(path).is_dir() else None
    layout = inspect_model(model) if ranks is None or whole is None else layout_of_share(whole, model, ranks.size)
    return LoadedModel(name, model, tokenizer, layout, folder)


def _load_share(
    name: str, path: str, config: Any, dtype: torch.dtype, ranks: TorchCommunicator
) -> tuple[PreTrainedModel, ModelLayout]:
    """Load this rank's share of a model, once it is known to be one that can be shared; with the whole one's layout."""
    with _shapes_alone(name, path, dtype) as shapes:
        whole, rules = inspect_model(shapes), rules_of_reading(shapes)
        split_model(shapes, Rehearsal(ranks.size))
        kind = type(shapes)
    with _quiet():
        model, shares = _read_share(name, kind, path, config, dtype, ranks, rules)
    split_model(_text_alone(model), ranks, shares)
    return model, whole


def _load_weights(
    name: str, kind: Any, path: str, config: Any, dtype: torch.dtype, quiet: bool = False, **more: Any
) -> Any:
    """A model of a class with the weights of its checkpoint: all of them, and no others.

    transformers fills what is missing with random numbers, and says so in a report that nobody need read. What may be
    left is told, unless `quiet`.

    Raises:
        ModelError: A weight is missing, has another shape, or is left over; the message names some.
    """
    if getattr(config, "quantization_config", None):
        more["quantization_config"] = Mxfp4Config(dequantize=True)
    with _quiet():  # the report is told as one line
        model, told = _load(
            name,
            "weights",
            lambda: kind.from_pretrained(
                path,
                config=config,
                dtype=dtype,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **more,
            ),
        )
    if not quiet and any(re.search(rf"(^|\.){_MEDIA}\.", key) for key in told["unexpected_keys"]):
        logger.warning(
            "model %r also takes images or sound: that part of its weights is not read, it serves text", name
        )
    heads = head_weights(config.get_text_config(decoder=True))
    left = [key for key in told["unexpected_keys"] if not (_LEFT.search(key) or heads.search(key))]
    other = [f"{key} {list(theirs)} for {list(ours)}" for key, theirs, ours in told["mismatched_keys"]]
    for what, keys in (
        ("lacks weights", told["missing_keys"]),
        ("has weights of other shapes than its config says", other),
        ("has weights that its config knows nothing of", left),
    ):
        if keys:
            more_of_them = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
            raise ModelError(
                f"the checkpoint of model {name!r} {what}: {', '.join(sorted(keys)[:_NAMED])}{more_of_them}; it is "
                f"damaged, or config.json is another model's"
            )
    return model


def _refuse_nan(name: str, model: PreTrainedModel) -> None:
    """Refuse weights that are NaN. Their sums show it in one pass; one that is not finite may just have overflowed."""
    suspect = ((key, weight) for key, weight in model.named_parameters() if not bool(weight.sum().isfinite()))
    broken = next((key for key, weight in suspect if bool(weight.isnan().any())), None)
    if broken is not None:
        raise ModelError(
            f"model {name!r} cannot be served: its weight {broken} has numbers that are NaN; get the checkpoint again"
        )


def _read_share(
    name: str,
    kind: Any,
    path: str,
    config: Any,
    dtype: torch.dtype,
    ranks: TorchCommunicator,
    rules: Mapping[str, str],
) -> tuple[PreTrainedModel, frozenset[str]]:
    """Read a rank's share of the weights, where transformers can cut while it reads; all ranks call this together.

    transformers reads from a file just the part of a weight that its plan gives to this rank. So a model that does not
    fit into one machine's memory as often as there are ranks can still be loaded on all of them. What it reads so is
    wrapped for training and hooked; both are taken off again, because Headway follows the plan itself
    (`headway.runtime.parallel.tensor_parallel`). Embeddings, the output head and recurrent mixers are read whole by
    every rank, and the mixers are cut afterwards.

    Args:
        name: What to call the model.
        kind: The model's class.
        path: The model, as for transformers.
        config: Its config.
        dtype: Type of the weights.
        ranks: The ranks that share it: consecutive ones of the default process group, all of which call this.
        rules: What to do otherwise than the model's plan says, by the plan's rules.

    Returns:
        The model, in host memory, and the names of the parameters that are this rank's share; the others are whole.
    """
    from torch.distributed import get_world_size  # these take a second, and are for ranks only
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.utils import TransformersDeviceMesh

    copies = get_world_size() // ranks.size  # groups of consecutive ranks that share the weights
    mesh = init_device_mesh("cpu", (1, copies, 1, ranks.size), mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp"))
    experts = init_device_mesh("cpu", (1, copies, ranks.size, 1), mesh_dim_names=("pp", "dp_replicate", "efsdp", "ep"))

    class Reader(kind):  # type: ignore[misc]
        """The model's class on the ranks that are there. Its own way to find them is for programs of torchrun."""

        @classmethod
        def prepare_distribute_model(cls, distributed_config: Any, device_map: Any = None) -> tuple[Any, Any, Any]:
            return distributed_config, device_map, TransformersDeviceMesh(mesh, experts)

    distributed = DistributedConfig(tp_size=ranks.size, tp_plan=dict(rules))
    model: Any = _load_weights(name, Reader, path, config, dtype, quiet=ranks.rank > 0, distributed_config=distributed)
    model.__class__ = kind
    return model, frozenset(_unwrapped(model))


def _unwrapped(model: PreTrainedModel) -> list[str]:
    """Take off what transformers put around weights and forwards; returns the names of what is a share."""
    from torch.distributed.tensor import DTensor, Replicate

    shares = []
    for path, module in model.named_modules():
        vars(module).pop("forward", None)
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                if not all(isinstance(placed, Replicate) for placed in parameter.placements):
                    shares.append(f"{path}.{name}" if path else name)
                module.register_parameter(name, torch.nn.Parameter(parameter.to_local(), requires_grad=False))
    return shares


def layout_without_weights(
    source: str | None, dtype: str = "auto", tp: int = 1, device: str = "cpu"
) -> tuple[str, ModelLayout]:
    """Read a model's layout off its config alone: its dry run has shapes but no numbers and takes no memory.

    Args:
        source: As for `load_model`.
        dtype: As for `load_model`; `auto` as it would be on `device`.
        tp: Tensor-parallel size that the sizes are for: of an engine that divides all heads and states by it. What
            ranks of Headway store says `layout_of_rank`.
        device: The device that the model would run on; it is not used.

    Returns:
        The model's name and its layout.

    Raises:
        ModelError: There is no such model, or it cannot be served.
        ConfigError: An unknown dtype, or a `tp` that does not fit the model.
    """
    name, path = resolve_source(source)
    weights = resolve_dtype(dtype, read_device(device))
    _require_reachable(path)
    with _shapes_alone(name, path, weights) as model:
        return name, inspect_model(model, tp)


def layout_of_rank(
    source: str | None, dtype: str = "auto", tp: int = 1, dcp: int = 1, device: str = "cpu"
) -> tuple[str, ModelLayout]:
    """What one of the ranks that serve a model stores, off its config alone, without any other rank.

    Args:
        source: As for `load_model`.
        dtype: As for `layout_without_weights`.
        tp: Ranks that share the weights; 1 where every rank has all of them.
        dcp: Ranks that split the tokens of full attention.
        device: As for `layout_without_weights`.

    Raises:
        ModelError: There is no such model, or it cannot be served on such ranks.
        ConfigError: An unknown dtype, or a `tp` that does not divide what it splits.
    """
    name, whole = layout_without_weights(source, dtype, device=device)
    path = resolve_source(source)[1]
    require_served_weights(name, _load_config(name, path).to_dict())
    if tp == 1:
        return name, whole
    with _shapes_alone(name, path, resolve_dtype(dtype, read_device(device))) as model:
        split_model(model, Rehearsal(tp))
        return name, layout_of_share(whole, model, tp).over(dcp)


@contextmanager
def _shapes_alone(name: str, path: str, dtype: torch.dtype) -> Iterator[PreTrainedModel]:
    """A model whose tensors have shapes and no numbers, for as long as no others are made."""
    config = _load_config(name, path)
    config._experts_implementation = "batched_mm"  # the default one looks at numbers, of which there are none
    build: Any = _class_for(config).from_config
    with torch.device("meta"), _quiet():
        yield _text_alone(_load(name, "config", lambda: build(config, dtype=dtype, trust_remote_code=False)))


def _class_for(config: Any) -> Any:
    """What builds a model of a config: one that takes images as well, where transformers has no other."""
    takes_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return (
        AutoModelForImageTextToText
        if takes_images and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
        else (AutoModelForCausalLM)
    )


def _text_alone(model: Any) -> Any:
    """The model without its parts for other media, of which nothing is computed. Returns it."""
    for module in list(model.modules()):
        for child in [child for child in module._modules if re.fullmatch(_MEDIA, child)]:
            setattr(module, child, None)
    return model


def load_tokenizer(source: str | None) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer alone; `source` as for `load_model`.

    Raises:
        ModelError: There is no such model, or it has no tokenizer that can be loaded.
    """
    name, path = resolve_source(source)
    _require_reachable(path)
    return _tokenizer_of(name, path)


def _tokenizer_of(name: str, path: str) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = _load(
            name, "tokenizer", lambda: AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        )
    except ModelError as error:
        if Path(path).is_dir() and not (Path(path) / "tokenizer.json").is_file():
            raise ModelError(
                f"model {name!r} has no tokenizer that is read here: put one of the library tokenizers into {path} "
                f"(tokenizer.json, with its tokenizer_config.json), such as that of another copy of the model"
            ) from error
        raise
    return tokenizer


def _load_config(name: str, path: str) -> Any:
    """A model's config, of a format that is served."""
    config = _load(name, "config", lambda: AutoConfig.from_pretrained(path, trust_remote_code=False))
    require_served_format(name, config.to_dict())
    return config


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from warning that kernels are slow, where nothing is computed."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def read_device(device: str) -> torch.device:
    """Read a device string, of a device that need not be here.

    Raises:
        ConfigError: It is none.
    """
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"{device!r} is not a device: write cpu, cuda or cuda:1") from error


def resolve_device(device: str) -> torch.device:
    """Read a device string.

    Raises:
        ConfigError: No such device here.
    """
    found = read_device(device)
    if found.type == "cuda" and (not torch.cuda.is_available() or (found.index or 0) >= torch.cuda.device_count()):
        raise ConfigError(
            f"device {device!r} is not available here ({torch.cuda.device_count()} CUDA devices): use cpu"
        )
    return found


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Read a dtype option; `auto` as it is on `device`.

    Raises:
        ConfigError: An unknown dtype.
    """
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if dtype not in DTYPES:
        raise ConfigError(f"{dtype!r} is not a dtype: use auto, {' or '.join(DTYPES)}")
    return DTYPES[dtype]


def _require_reachable(path: str) -> None:
    """Refuse a name that is no folder, is not in the hub's cache here, and that the hub cannot tell anything about.

    One question to the hub. Without it the library asks six times within a minute, and says so in as many lines.
    """
    if Path(path).is_dir() or isinstance(try_to_load_from_cache(path, CONFIG_NAME), str):
        return
    try:
        get_hf_file_metadata(hf_hub_url(path, CONFIG_NAME), timeout=_HUB_SECONDS)
    except (GatedRepoError, EntryNotFoundError):
        return  # the hub has it: what is wrong with it is told when it is loaded
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"there is no folder {path!r} here, and the hub has no model of that name (or a private one)"
        ) from error
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"there is no folder {path!r} here, and the hub could not be reached to look for a model of that name: "
            f"{reason}. Check the name, or give a folder; nothing at all is the built-in model"
        ) from error


def _load(name: str, part: str, action: Callable[[], Any]) -> Any:
    """Run one step of loading, turning whatever it raises into a ModelError."""
    try:
        return action()
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"model {name!r} comes with code of its own, which is never run: only classes of the installed "
                f"transformers are served"
            ) from error
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"cannot load the {part} of model {name!r}: {reason}") from error


def end_tokens(loaded: LoadedModel) -> tuple[int, ...]:
    """Tokens that end an answer: those of the generation config, or the model's, and the tokenizer's."""
    generation: Any = getattr(loaded.model, "generation_config", None)
    given: Any = getattr(generation, "eos_token_id", None)
    if given is None:
        given = getattr(loaded.model.config, "eos_token_id", None)
    found = set(given) if isinstance(given, list | tuple) else {given}
    found.add(loaded.tokenizer.eos_token_id)
    return tuple(sorted(token for token in found if token is not None))
