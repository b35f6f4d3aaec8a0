"""What a model keeps, and how it is laid out: the records that everything else is computed from.

A *spec* describes one KV cache group: layers of one kind whose bytes add up. A spec declares whether its kind is split
by tokens over context-parallel ranks (`sharded`); nothing infers that from a class name, because every such inference
that we know of became a silent loss of hits once a model mixed kinds (vllm#53598).

`bytes_per_token` and `state_bytes` count what *one rank* stores after tensor parallelism: tensor parallelism splits
heads and is already in these figures, context parallelism splits tokens and is applied by `shape.geometry`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from headway.cache.shape.checks import check_float, check_whole
from headway.errors import ConfigError

__all__ = [
    "ChunkedLocal",
    "ComputeCost",
    "FullAttention",
    "LayerSpec",
    "ParallelLayout",
    "Recurrent",
    "SlidingWindow",
    "check_names",
]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


class _Group:
    """What groups of all kinds have in common."""

    name: str

    def __post_init__(self) -> None:
        """Refuse a group without a name, and sizes out of range (ConfigError)."""
        _require(bool(self.name), f"a {type(self).__name__} group needs a name")
        for label in ("bytes_per_token", "window", "chunk", "state_bytes", "lookahead"):
            low, high = (0, 2**10) if label == "lookahead" else (1, 2**50)
            check_whole(f"group {self.name!r}: {label}", getattr(self, label, low), low, high)


@dataclass(frozen=True)
class FullAttention(_Group):
    """Full attention (MHA, GQA, MLA): one entry a token, all of them needed.

    Attributes:
        name: The group's name, unique within a configuration.
        bytes_per_token: Bytes of one token over all layers of the group, on the rank that stores it.
        lookahead: How many later tokens an entry also depends on (EAGLE and MTP drafts; 0 for a target, DFlash,
            DSpark).
        sharded: False for a draft that keeps every token on every rank (GQA drafts under decode context parallelism).
        own_table: The group has a block table of its own. Otherwise groups of one kind and reach share one.
    """

    name: str
    bytes_per_token: int
    lookahead: int = 0
    sharded: bool = True
    own_table: bool = False


@dataclass(frozen=True)
class SlidingWindow(_Group):
    """Sliding-window attention: token p sees (p - window, p], so resuming at p needs [p - window + 1, p).

    Attributes:
        name: The group's name.
        bytes_per_token: Bytes of one token over all layers of the group.
        window: Tokens that a query sees, itself included.
        lookahead: As for `FullAttention`.
        own_table: As for `FullAttention`.
    """

    name: str
    bytes_per_token: int
    window: int
    lookahead: int = 0
    own_table: bool = False
    sharded: ClassVar[bool] = False


@dataclass(frozen=True)
class ChunkedLocal(_Group):
    """Chunked local attention (Llama 4): token p sees its own chunk up to p, [p // chunk * chunk, p].

    Attributes:
        name: The group's name.
        bytes_per_token: Bytes of one token over all layers of the group.
        chunk: Tokens in a chunk.
        lookahead: As for `FullAttention`.
        own_table: As for `FullAttention`.
    """

    name: str
    bytes_per_token: int
    chunk: int
    lookahead: int = 0
    own_table: bool = False
    sharded: ClassVar[bool] = False


@dataclass(frozen=True)
class Recurrent(_Group):
    """A recurrent state (Mamba, Mamba-2, GatedDeltaNet, KDA, short convolutions): one of fixed size a sequence.

    Attributes:
        name: The group's name.
        state_bytes: Bytes of the state after some number of tokens, over all layers of the group, on one rank.
    """

    name: str
    state_bytes: int
    sharded: ClassVar[bool] = False
    lookahead: ClassVar[int] = 0


LayerSpec = FullAttention | SlidingWindow | ChunkedLocal | Recurrent
"""A KV cache group of any kind. The kinds are a closed set: one that is not listed here is refused."""


@dataclass(frozen=True)
class ParallelLayout:
    """How many ranks there are and what each dimension splits.

    Attributes:
        tp: Tensor-parallel size (splits heads and states; already applied in the specs' bytes).
        dcp: Decode-context-parallel size (splits tokens of sharded groups; reuses the tensor-parallel ranks).
        pcp: Prefill-context-parallel size (extra ranks, splits tokens as well).
        interleave: Consecutive tokens that one rank stores before the next rank takes over.
    """

    tp: int = 1
    dcp: int = 1
    pcp: int = 1
    interleave: int = 1

    def __post_init__(self) -> None:
        """Refuse impossible layouts.

        Raises:
            ConfigError: A size below 1, or tp not divisible by dcp.
        """
        for name in ("tp", "dcp", "pcp", "interleave"):
            check_whole(f"layout: {name}", getattr(self, name), high=2**20)
        _require(
            self.tp % self.dcp == 0,
            f"layout: tp={self.tp} is not divisible by dcp={self.dcp}; decode context parallelism reuses the "
            f"tensor-parallel ranks, so choose dcp among the divisors of tp, or a tp such as {self.dcp}",
        )

    @property
    def shards(self) -> int:
        """Ranks over which the tokens of a sharded group are split."""
        return self.dcp * self.pcp


@dataclass(frozen=True)
class ComputeCost:
    """What computing a prompt costs, in any unit: cost(n) = linear * n + quadratic * n^2 / 2 for n tokens.

    The quadratic term is full attention's. The default ratio puts the two terms level at 100,000 tokens, between
    Kimi-Linear (38.6k) and Kimi-K3 (140k).

    Attributes:
        linear: Cost of one token apart from attention to earlier tokens.
        quadratic: Additional cost of one token for each earlier token.
    """

    linear: float = 1.0
    quadratic: float = 1e-5

    def __post_init__(self) -> None:
        """Refuse costs that could not rank anything.

        Raises:
            ConfigError: A negative coefficient, or both zero.
        """
        check_float("cost: linear", self.linear, 0.0, 1e300)
        check_float("cost: quadratic", self.quadratic, 0.0, 1e300)
        _require(self.linear + self.quadratic > 0, "cost: one of linear and quadratic must be positive")

    def between(self, start: float, stop: float) -> float:
        """Cost of computing positions [start, stop) on top of the first `start` tokens."""
        return (stop - start) * (self.linear + 0.5 * self.quadratic * (stop + start))


def check_names(groups: Sequence[LayerSpec]) -> None:
    """Refuse an empty list of groups, groups of an unknown kind and repeated names.

    Raises:
        ConfigError: Says which, and what to give instead.
    """
    given: object = groups
    _require(
        isinstance(given, Sequence) and len(given) > 0,
        "no cache groups: give at least one FullAttention, SlidingWindow, ChunkedLocal or Recurrent, in a list",
    )
    for group in groups:
        _require(
            isinstance(group, LayerSpec),
            f"unknown kind of cache group: {group!r}; use FullAttention, SlidingWindow, ChunkedLocal or Recurrent",
        )
    names = [group.name for group in groups]
    repeated = sorted({name for name in names if names.count(name) > 1})
    _require(not repeated, f"cache groups share the name {', '.join(repeated)}: give each its own")
