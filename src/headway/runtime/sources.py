"""What a user means by a model (a directory, a hub id, or the built-in model), and what its files say that it is.

The built-in model is a distribution of its own, `headway-builtin-model`: who embeds the cache does not need its 9 MB.

It imports neither torch nor transformers, which take seconds: a mistyped path is told at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headway.errors import ModelError

__all__ = [
    "BUILTIN",
    "foreign_drafter",
    "head_weights",
    "require_served_format",
    "require_served_weights",
    "resolve_source",
]

BUILTIN = "builtin"
"""Name of the built-in model."""

PACKAGE = "headway_builtin_model"
INSTALL = "`pip install headway-builtin-model`, or in a checkout of Headway `pip install ./packages/builtin-model`"


def resolve_source(source: str | None) -> tuple[str, str]:
    """Find out what a user means by a model.

    Returns:
        The model's name, and the directory or hub id to load.

    Raises:
        ModelError: A path that is not a model, or the built-in model is not installed.
    """
    if source is None or source == BUILTIN:
        package = find_spec(PACKAGE)
        if package is None or package.origin is None:
            raise ModelError(f"the built-in model is not installed: {INSTALL}. Or name a directory or a hub id")
        return f"headway-{BUILTIN}", str(Path(package.origin).parent)
    path = Path(source).expanduser()
    if path.is_dir():
        _require_model_folder(source, path)
        return path.resolve().name, str(path)
    if source.lower().endswith(".gguf"):
        raise ModelError(_GGUF.format(source))
    if path.exists():
        raise ModelError(f"{source!r} is a file: give the directory that holds the model's config.json")
    looks_local = source.startswith((".", "/", "~")) or source.count("/") > 1
    if looks_local:
        raise ModelError(f"there is no directory {source!r}: name one, a hub id, or nothing for the built-in model")
    return source, source


_GGUF = (
    "{!r} holds GGUF weights, which are not read: give the model in Hugging Face form (config.json and safetensors) "
    "from which they were made"
)


def _require_model_folder(source: str, path: Path) -> None:
    """Refuse a folder that is no model in Hugging Face form, or in a format that is not served.

    Raises:
        ModelError: What it is, and what to give.
    """
    if (path / "adapter_config.json").is_file():
        base = _read(path / "adapter_config.json").get("base_model_name_or_path")
        raise ModelError(
            f"{source!r} is an adapter (LoRA) for {base!r}, which is not applied here: merge it into its model (peft: "
            f"merge_and_unload, then save_pretrained) and give the folder of the merged one"
        )
    if not (path / "config.json").is_file():
        if any(path.glob("*.gguf")):
            raise ModelError(_GGUF.format(source))
        raise ModelError(f"{source!r} is a directory without a config.json: give one in Hugging Face form")
    require_served_format(source, _read(path / "config.json"))


def require_served_format(name: str, config: Mapping[str, Any]) -> None:
    """Refuse what a model's config says that it is, if that is not served.

    Args:
        name: What to call the model.
        config: What its `config.json` says.

    Raises:
        ModelError: What it is, and what to give.
    """
    kind = foreign_drafter(config)
    if kind is not None:
        raise ModelError(f"{name!r} is a drafter ({kind}), not a model: give the model that it drafts for")
    if config.get("is_encoder_decoder"):
        raise ModelError(
            f"model {name!r} is an encoder-decoder ({config.get('model_type')}): only decoders (causal language "
            f"models) are served"
        )


def require_served_weights(name: str, config: Mapping[str, Any]) -> None:
    """Refuse quantised weights but those in MXFP4, the published form of gpt-oss, which are dequantised as they load.

    Arguments and errors are those of `require_served_format`.
    """
    quantised = config.get("quantization_config")
    method = quantised.get("quant_method", "?") if isinstance(quantised, Mapping) else "?"
    if quantised and method != "mxfp4":
        raise ModelError(
            f"model {name!r} is quantised ({method}), which is not served: give the checkpoint in bf16 or fp32 that it "
            f"was made from"
        )


def foreign_drafter(config: Mapping[str, Any]) -> str | None:
    """What kind of drafter, such as `EAGLE`, a config is of that other engines made; None if it is of none."""
    told = str([config.get(key) for key in ("architectures", "model_type", "speculators_model_type")]).lower()
    for word, kind in _DRAFTERS.items():
        if (word in told and "conditionalgeneration" not in told) or f"{word}_config" in config:
            return kind
    return "EAGLE-3" if "draft_vocab_size" in config else None


_DRAFTERS = {"eagle3": "EAGLE-3", "eagle": "EAGLE", "dflash": "DFlash", "dspark": "DSpark", "medusa": "Medusa"}
"""Words in the config of a published drafter, and its kind."""


def head_weights(config: Any) -> re.Pattern[str]:
    """What to search for in the names of a checkpoint's weights, to find those of heads for multi-token prediction.

    Args:
        config: The config of its language model, as transformers reads it.
    """
    count = getattr(config, "num_mtp_layers", None) or getattr(config, "num_nextn_predict_layers", None) or 0
    behind = [rf"layers\.{config.num_hidden_layers + i}" for i in range(count)]  # DeepSeek's heads follow the layers
    return re.compile(rf"(^|\.)({'|'.join(['mtp', 'mtp_layers', 'nextn', *behind])})\.")


def _read(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is none, which whoever loads it tells better."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
