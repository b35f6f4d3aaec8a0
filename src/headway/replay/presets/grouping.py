"""How many pages a state takes: vLLM's grouping of layers.

Layers of one kind and one size are divided into groups of equally many layers, so that one page holds `block_tokens`
tokens, or a state, of every layer of a group. That many is the number of layers of the rarest kind; or of the most
frequent one, where that has less than half as many again (the rarest are then padded). So Kimi-K3's 24 layers of
attention and 69 with states make groups of 24: one of attention and three of states.

`vllm/v1/core/kv_cache_utils.py`; the page *Hybrid KV Cache Manager* of vLLM's documentation describes it.

Not modelled: attention that itself falls into several groups, because it has more layers than what it is grouped by.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from headway.cache import LayerSpec, Recurrent
from headway.errors import ConfigError
from headway.replay.specs import size_of

__all__ = ["Grouping", "grouped"]

_HALF_AS_MANY_AGAIN = Fraction(3, 2)
_SAY = "give state_groups, as in vllm,state_groups=3: layers with states over layers with attention, rounded up"


@dataclass(frozen=True)
class Grouping:
    """How the layers share pages.

    Attributes:
        state_groups: Groups of layers with states: pages of a state. 0: there are none.
        padding: Layers that a page has room for over layers of attention; 1 where attention fills it.
        state_tokens: Tokens that a block needs at least, so that a page holds the states of a group.
    """

    state_groups: int
    padding: Fraction
    state_tokens: Fraction


def grouped(groups: Sequence[LayerSpec], layers: Mapping[str, int], state_groups: int = 0) -> Grouping:
    """Group the layers of a model with full attention, and perhaps states.

    Args:
        groups: Cache groups, on one rank.
        layers: Layers in each of them, by name.
        state_groups: Take that many groups of states, whatever the layers are; 0: as the layers say.

    Raises:
        ConfigError: The numbers of layers are not known, or attention would fall into several groups.
    """
    state = sum(group.state_bytes for group in groups if isinstance(group, Recurrent))
    token = sum(size_of(group) for group in groups if not isinstance(group, Recurrent))
    if not state:
        return Grouping(0, Fraction(1), Fraction(0))
    if state_groups:
        return Grouping(state_groups, Fraction(1), Fraction(state, token * state_groups))
    if unknown := [group.name for group in groups if not layers.get(group.name)]:
        raise ConfigError(f"preset vllm: how many layers {', '.join(unknown)} has is not known: {_SAY}")
    attention: Counter[Fraction] = Counter()
    states: Counter[Fraction] = Counter()
    for group in groups:
        kind = states if isinstance(group, Recurrent) else attention
        kind[Fraction(size_of(group), layers[group.name])] += layers[group.name]
    counts = [*attention.values(), *states.values()]
    each = min(counts) if max(counts) >= min(counts) * _HALF_AS_MANY_AGAIN else max(counts)
    if len(attention) > 1 or attention.total() > each:
        raise ConfigError(
            f"preset vllm: {attention.total()} layers of attention would fall into several groups of {each} layers, "
            f"which is not modelled; to replay it as if they were one, {_SAY}"
        )
    padding = Fraction(each, attention.total())
    return Grouping(sum(-(-n // each) for n in states.values()), padding, max(states) / min(attention))
