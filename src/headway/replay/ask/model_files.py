"""A model from its own files: a Hugging Face `config.json`, or the folder of a checkpoint. No weights are read.

The sizes are those of `headway inspect`, which runs the model without numbers and looks at what it keeps; the data
types are those that the user names. The runtime behind it needs the extra `serve`; it is imported when it is used.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from headway.cache import FullAttention, LayerSpec, ParallelLayout, Recurrent
from headway.errors import ConfigError
from headway.replay.ask.catalogue import Model, check_copies

__all__ = ["is_model_files", "model_of_files"]

_BYTES = {"fp32": 4, "bf16": 2, "fp8": 1, "fp8_e4m3": 1}
_CONVOLUTION = 2
"""Bytes of a number of a convolution state: engines keep these in bf16 whatever the recurrent ones are."""
_NOTE = (
    "sizes are those of the transformers model: one with latent attention (MLA) may keep more there than in engines "
    "that store the latent row alone"
)

_TWO_SETS = (
    "beyond {0:,} tokens it uses other rotary frequencies (LongRoPE), and no entry of a shorter sequence serves a "
    "longer one: hits of longer requests on what shorter ones left are counted all the same, so figures are too high"
)


def is_model_files(path: Path) -> bool:
    """Whether a path is a folder, or a file that looks like the config of a Hugging Face model."""
    if path.is_dir():
        return True
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and "model_type" in found and "groups" not in found


def model_of_files(path: Path, layout: ParallelLayout, *, kv_dtype: str, state_dtype: str) -> Model:
    """The model of a `config.json` or of the folder that holds one.

    Raises:
        ConfigError: Data types or a layout that it cannot have.
        ModelError: Files that are no model, or one that the runtime does not know.
        ModuleNotFoundError: Without the extra `serve`.
    """
    if kv_dtype not in _BYTES or state_dtype not in _BYTES:
        raise ConfigError(
            f"--kv-dtype {kv_dtype}, --state-dtype {state_dtype}: for a model read from its files they are one of "
            f"{', '.join(_BYTES)}"
        )
    found = _inspected(path.resolve(), layout.tp)
    if layout.dcp > 1:
        _check_copies(path, layout)
    groups = tuple(_resized(group, found.layers, kv_dtype, state_dtype) for group in found.groups)
    name = path.resolve().name if path.is_dir() else path.resolve().parent.name
    source = "counted from the config: 2 operations a parameter that works on a token, and attention"
    kept = Counter(e.group for layer in found.layers for e in (layer.tokens, layer.state) if e is not None)
    file = "config.json" if path.is_dir() else path.name
    notes = (_NOTE,) if found.long_rope is None else (_NOTE, _TWO_SETS.format(found.long_rope.original))
    kinds = {group.name: kind for group in groups if (kind := _kind(group, path))}
    return Model(name, groups, found.cost, source, found.parameters, f"the model's own {file}", notes, kept, kinds)


def _kind(group: LayerSpec, path: Path) -> str:
    """What kind of layers these are, as far as the config tells: latent attention, gated delta nets."""
    config = json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
    says = {*config, *config.get("text_config", {})}
    if isinstance(group, Recurrent):
        return "gdn" if "linear_key_head_dim" in says else ""
    return "mla" if isinstance(group, FullAttention) and "kv_lora_rank" in says else ""


@lru_cache(maxsize=64)
def _inspected(path: Path, tp: int) -> Any:
    loading = import_module("headway.runtime.loading")
    if path.is_dir():
        return loading.layout_without_weights(str(path), "bf16", tp)[1]
    with TemporaryDirectory() as folder:
        shutil.copyfile(path, Path(folder) / "config.json")
        return loading.layout_without_weights(folder, "bf16", tp)[1]


def _check_copies(path: Path, layout: ParallelLayout) -> None:
    """Only copies of a key/value head can be split by tokens."""
    whole = _inspected(path.resolve(), 1)
    entries = [layer.tokens for layer in whole.layers if layer.tokens is not None and layer.tokens.group == "full"]
    heads = max((entry.fields[0].shape[0] for entry in entries), default=1)
    check_copies(str(path), heads, layout)


def _resized(group: LayerSpec, layers: Sequence[Any], kv_dtype: str, state_dtype: str) -> LayerSpec:
    """A group with its numbers in the data types that the user names."""
    if isinstance(group, Recurrent):
        fields = [field for layer in layers if layer.state is not None for field in layer.state.fields]
        convolutions = sum(_numbers(field) for field in fields if field.name.startswith("conv"))
        states = sum(_numbers(field) for field in fields if not field.name.startswith("conv"))
        return Recurrent(group.name, convolutions * _CONVOLUTION + states * _BYTES[state_dtype])
    entries = [layer.tokens for layer in layers if layer.tokens is not None and layer.tokens.group == group.name]
    numbers = sum(_numbers(field) for entry in entries for field in entry.fields)
    return replace(group, bytes_per_token=numbers * _BYTES[kv_dtype])


def _numbers(field: Any) -> int:
    return int(field.bytes) // int(field.dtype.itemsize)
