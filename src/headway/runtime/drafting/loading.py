"""Drafters by name or by folder.

A trained drafter is a folder with `config.json` (a `DrafterConfig`) and `model.safetensors`. A model may bring some
along, in `drafts/NAME` beside its own files, or heads among its weights (`headway.runtime.drafting.published`). Folders
are in Headway's own form, or those of a published DSpark drafter (`headway.runtime.drafting.published_dspark`). What
else others publish for their engines (EAGLE, DFlash) has other names and parts, and is refused by its name.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from headway.cache import LayerSpec
from headway.errors import ConfigError, ModelError
from headway.runtime.drafting.drafter import Drafter
from headway.runtime.drafting.dspark import DSparkDrafter, DSparkNetwork
from headway.runtime.drafting.features import FINAL
from headway.runtime.drafting.layers import LayerShape
from headway.runtime.drafting.lookup import PromptLookup
from headway.runtime.drafting.mtp import MtpDrafter, MtpNetwork
from headway.runtime.drafting.published import PublishedHead, has_published_head, published_sizes
from headway.runtime.drafting.published_dspark import DSparkConfig, is_published_dspark, load_published_dspark
from headway.runtime.drafting.target import Target
from headway.runtime.interface import MOST_DRAFT_TOKENS
from headway.runtime.sources import foreign_drafter

__all__ = ["DrafterConfig", "drafter_folder", "groups_without_weights", "load_drafter", "save_drafter"]

_PUBLISHED_TOKENS = 3
"""Tokens of a draft of a head in the checkpoint, if nobody says: it was trained for one, and is fed with its own."""
_LOOKUP_TOKENS = 6
"""Tokens of a looked-up draft, if nobody says: repeated passages are long."""
_TRAINED = ("mtp", "dspark")
_SIZES = (
    "hidden_size",
    "vocab_size",
    "draft_tokens",
    "layers",
    "heads",
    "kv_heads",
    "head_dim",
    "intermediate_size",
)


@dataclass(frozen=True)
class DrafterConfig:
    """What `config.json` of a drafter says.

    Attributes:
        drafter: `mtp` or `dspark`.
        hidden_size: Hidden size of the target.
        vocab_size: Width of the target's logits.
        feature_layers: Decoder layers of the target that it reads, -1 for the embeddings; one for `mtp`.
        draft_tokens: Tokens of a draft.
        layers: Its own layers.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Width of a head.
        intermediate_size: Width of the feed-forward.
        rope_theta: Base of the rotary wavelengths.
        eps: Added to the mean square in norms.
        markov_rank: Width of the Markov head (`dspark`).
    """

    drafter: str
    hidden_size: int
    vocab_size: int
    feature_layers: tuple[int, ...]
    draft_tokens: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float = 10000.0
    eps: float = 1e-6
    markov_rank: int = 0

    @property
    def shape(self) -> LayerShape:
        """Sizes of its layers."""
        return LayerShape(
            self.hidden_size,
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.intermediate_size,
            self.rope_theta,
            self.eps,
        )

    def network(self) -> MtpNetwork | DSparkNetwork:
        """The network with fresh weights."""
        if self.drafter == "mtp":
            return MtpNetwork(self.shape, self.layers)
        return DSparkNetwork(self.shape, self.layers, len(self.feature_layers), self.vocab_size, self.markov_rank)


def load_drafter(source: str, model: PreTrainedModel, folder: Path | None, tokens: int | None = None) -> Drafter:
    """Make a drafter for a model.

    Args:
        source: `lookup`, `mtp`, `dspark`, or the folder of a drafter.
        model: The target.
        folder: Where the target was loaded from, if that is a folder.
        tokens: Most tokens of a draft; None takes the drafter's own number.

    Raises:
        ModelError: There is no such drafter, or it is for another model.
        ConfigError: More tokens than it can draft.
    """
    if source == "lookup":
        return PromptLookup(_LOOKUP_TOKENS if tokens is None else tokens)
    target = Target.of(model)
    if _is_published(source, folder):
        assert folder is not None
        sizes = published_sizes(folder, target.dtype)
        return MtpDrafter(PublishedHead(model), target, sizes, tokens or _PUBLISHED_TOKENS, FINAL)
    path = _find(source, folder)
    config = _read_config(path)
    most = _draft_tokens(path, config, tokens)
    if isinstance(config, DSparkConfig):
        return _published_dspark(path, config, target, most)
    _require_same_sizes(path, config, target)
    network = _load_weights(path, config).to(target.device, target.dtype).eval()
    sizes = config.shape.entries(config.layers, target.dtype)
    if isinstance(network, MtpNetwork):
        return MtpDrafter(network, target, sizes, most, config.feature_layers[0])
    return DSparkDrafter(network, target, sizes, config.draft_tokens, config.feature_layers, most)


def _published_dspark(path: Path, config: DSparkConfig, target: Target, most: int) -> DSparkDrafter:
    return DSparkDrafter(
        load_published_dspark(path, config, target),
        target,
        config.sizes(target.dtype),
        config.draft_tokens,
        config.feature_layers,
        most,
        mixed=config.mixed,
        causal=config.causal,
    )


def _draft_tokens(path: Path, config: DrafterConfig | DSparkConfig, wanted: int | None) -> int:
    """Most tokens of a draft: as many as are wanted, of a DSpark drafter no more than it was trained for."""
    if wanted is None:
        return config.draft_tokens
    bounded = isinstance(config, DSparkConfig) or config.drafter == "dspark"
    if bounded and wanted > config.draft_tokens:
        raise ConfigError(
            f"--draft-tokens {wanted}: the drafter in {path} was trained for {config.draft_tokens}, ask for that or "
            f"less"
        )
    return wanted


def groups_without_weights(
    source: str, folder: Path | None, dtype: torch.dtype, tokens: int | None = None
) -> tuple[LayerSpec, ...]:
    """What a drafter keeps in the cache, read off its config alone.

    Args:
        source: As for `load_drafter`.
        folder: As for `load_drafter`.
        dtype: Type of the target's weights.
        tokens: As for `load_drafter`.

    Raises:
        ModelError: There is no such drafter.
        ConfigError: More tokens than it can draft.
    """
    if source == "lookup":
        return ()
    if _is_published(source, folder):
        assert folder is not None
        return (published_sizes(folder, dtype).group(MtpDrafter.lookahead),)
    path = _find(source, folder)
    config = _read_config(path)
    _draft_tokens(path, config, tokens)
    if isinstance(config, DSparkConfig):
        return (config.sizes(dtype).group(DSparkDrafter.lookahead),)
    lookahead = MtpDrafter.lookahead if config.drafter == "mtp" else DSparkDrafter.lookahead
    return (config.shape.entries(config.layers, dtype).group(lookahead),)


def drafter_folder(source: str, folder: Path | None) -> Path | None:
    """The folder of a drafter's own weights; None where it has none: `lookup`, and heads in the target's checkpoint.

    Raises:
        ModelError: There is no such drafter.
    """
    return None if source == "lookup" or _is_published(source, folder) else _find(source, folder)


def _is_published(source: str, folder: Path | None) -> bool:
    """Whether `mtp` means the heads in a checkpoint: it has some, and no drafter in our form beside them.

    Raises:
        ModelError: They are in a form that is not run.
    """
    if source != "mtp" or folder is None or (folder / "drafts" / source / "config.json").is_file():
        return False
    return has_published_head(folder)


def save_drafter(path: Path, network: MtpNetwork | DSparkNetwork, config: DrafterConfig) -> None:
    """Write a drafter's folder; the weights in bf16."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(asdict(config), indent=2) + "\n")
    weights = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in network.state_dict().items()}
    save_file(weights, path / "model.safetensors")


def _find(source: str, folder: Path | None) -> Path:
    """The folder that a user means.

    Raises:
        ModelError: There is none.
    """
    if source in _TRAINED:
        path = None if folder is None else folder / "drafts" / source
        if path is None or not (path / "config.json").is_file():
            raise ModelError(
                f"--draft {source}: the model brings no such drafter along; name the folder of one, or use "
                "--draft lookup"
            )
        return path
    path = Path(source).expanduser()
    if not (path / "config.json").is_file():
        raise ModelError(
            f"--draft {source!r} is neither none, lookup, {', '.join(_TRAINED)} nor a folder with the config.json of a "
            "drafter"
        )
    return path


def _read_config(path: Path) -> DrafterConfig | DSparkConfig:
    try:
        found: Any = json.loads((path / "config.json").read_text())
        if is_published_dspark(found):
            return DSparkConfig.of(path, found)
        _require_ours(path, found)
        known = {field.name for field in fields(DrafterConfig)}
        config = DrafterConfig(**{name: value for name, value in found.items() if name in known})
    except (ValueError, TypeError, AttributeError) as error:
        raise ModelError(f"{path / 'config.json'} is not the config of a Headway drafter: {error}") from error
    if config.drafter not in _TRAINED:
        raise ModelError(f"{path} holds a drafter of the kind {config.drafter!r}; known are {', '.join(_TRAINED)}")
    fault = _fault(config)
    if fault is not None:
        raise ModelError(f"{path / 'config.json'} is not the config of a Headway drafter: {fault}")
    return DrafterConfig(**(asdict(config) | {"feature_layers": tuple(config.feature_layers)}))


def _require_ours(path: Path, found: Any) -> None:
    """Refuse the folder of another engine's drafter, or of a model, by its name."""
    if "drafter" in found:
        return
    kind = foreign_drafter(found)
    if kind is not None:
        raise ModelError(
            f"{path} holds a drafter in the form of other engines ({kind}), which is not read: use --draft lookup, or "
            f"train one in Headway's form (docs/drafting.md)"
        )
    if "model_type" in found:
        raise ModelError(f"{path} holds a model ({found['model_type']}): a whole model does not draft for another here")


def _fault(config: DrafterConfig) -> str | None:
    """What cannot work in a config that has just been read, or None."""
    sizes = [*_SIZES, "markov_rank"] if config.drafter == "dspark" else _SIZES
    for name in sizes:
        value: object = getattr(config, name)
        if type(value) is not int or value < 1:
            return f"{name} is {value!r}, it must be a whole number of at least 1"
    layers: object = config.feature_layers
    if not isinstance(layers, list) or not layers or any(type(layer) is not int for layer in layers):
        return f"feature_layers is {layers!r}, it must be a list of layer numbers"
    if config.drafter == "mtp" and len(layers) != 1:
        return f"feature_layers is {layers!r}, an mtp head reads one layer"
    if config.draft_tokens > MOST_DRAFT_TOKENS:
        return f"draft_tokens is {config.draft_tokens}, it must be at most {MOST_DRAFT_TOKENS}"
    if config.heads % config.kv_heads or config.head_dim % 2:
        return f"kv_heads ({config.kv_heads}) must divide heads ({config.heads}), and head_dim must be even"
    return None


def _require_same_sizes(path: Path, config: DrafterConfig, target: Target) -> None:
    if (config.hidden_size, config.vocab_size) != (target.hidden, target.vocab):
        raise ModelError(
            f"the drafter in {path} is for a hidden size of {config.hidden_size} and {config.vocab_size} tokens, the "
            f"model has {target.hidden} and {target.vocab}: it was trained for another model"
        )


def _load_weights(path: Path, config: DrafterConfig) -> MtpNetwork | DSparkNetwork:
    network = config.network()
    try:
        network.load_state_dict(load_file(path / "model.safetensors"))
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"cannot load the weights of the drafter in {path}: {reason}") from error
    return network
