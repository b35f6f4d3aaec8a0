"""Which classes of transformers the table of families has, found by their configurations.

A family is a model type that `AutoModelForCausalLM` loads, so what `headway serve` can be given. It stands in the table
if its configuration, or that of its text model, has a field for a recurrent state or a short convolution, for a window
or a chunk, or for rotary positions, which every such class lets scale. What has none of these (GPT-2, OPT, BERT as a
decoder) has full attention alone, with learned or relative positions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from huggingface_hub.errors import StrictDataclassClassValidationError
from tests.families.tiny import CONVOLUTIONS, ROPE, fields_of, has_convolution
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

__all__ = ["Case", "Family", "cases", "families"]

_KINDS = {
    "states": r"\w*conv_kernel\w*|mamba_d_conv|conv_L_cache|conv1d_width|cca_time\d|\w*state_size|\w*_d_state"
    r"|linear_\w*head_dim|linear_attn_\w*|chunkwise_kernel|attention_hidden_size",
    "windows": r"\w*sliding_window\w*|attention_window_size|window_size|local_attention\w*|attention_chunk_size"
    r"|local_attn_chunk_length",
    "rotary": r"rope_parameters",
}
_LONG = "longrope"
"""Rotations that depend on the longest sequence of a forward at any length: every family is tried with them."""
_OTHERS = tuple(name for name in ROPE if name != _LONG)
"""Those that depend on the position alone up to the model's length: each family is tried with one of them."""


@dataclass(frozen=True)
class Family:
    """A class of transformers.

    Attributes:
        name: Its model type.
        config: Its configuration class.
        kinds: Which of `states`, `windows` and `rotary` its configuration has fields for.
        architecture: Name of the class that computes it.
    """

    name: str
    config: type[PretrainedConfig]
    kinds: tuple[str, ...]
    architecture: str


@dataclass(frozen=True)
class Case:
    """One row of the table: a family with short convolutions of one width, or with one kind of rotary positions."""

    family: Family
    convolution: int = CONVOLUTIONS[0]
    rope: str | None = None

    @property
    def name(self) -> str:
        """What the row is called."""
        if self.rope is not None:
            return f"{self.family.name}+{self.rope}"
        return f"{self.family.name}+conv{self.convolution}" if self.convolution != CONVOLUTIONS[0] else self.family.name


def families() -> list[Family]:
    """All families, by name."""
    found = []
    for name, architecture in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()):
        config = CONFIG_MAPPING[name]
        fields = set().union(*(fields_of(part) for part in _parts(config)))
        kinds = tuple(kind for kind, pattern in _KINDS.items() if any(re.fullmatch(pattern, field) for field in fields))
        if kinds:
            found.append(Family(name, config, kinds, str(architecture)))
    return found


def _parts(config: type[PretrainedConfig]) -> list[type[PretrainedConfig]]:
    """A configuration class and that of its text model."""
    if "text_config" not in config.sub_configs and "decoder_config" not in config.sub_configs:
        return [config]
    try:
        return list({config, type(config().get_text_config(decoder=True))})
    except StrictDataclassClassValidationError:  # a drafter for another model, which has no size of its own
        return [config]


def cases() -> Iterator[Case]:
    """The rows of the table: every family as its class makes it, with a wide convolution and with scaled rotations."""
    for family in families():
        yield Case(family)
        if any(has_convolution(part) for part in _parts(family.config)):
            yield Case(family, convolution=CONVOLUTIONS[1])
        if "rotary" in family.kinds:
            for rope in (_OTHERS[sum(family.name.encode()) % len(_OTHERS)], _LONG):
                yield Case(family, rope=rope)
