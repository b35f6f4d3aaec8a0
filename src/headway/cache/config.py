"""Everything that a prefix cache is told when it is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headway.cache.index.reclaim import Retention
from headway.cache.index.tree import CHECKPOINT_BYTES, EDGE_BYTES, token_bytes
from headway.cache.policy.eviction import Adaptive, EvictionPolicy, eviction_policy
from headway.cache.policy.placement import DEFAULT_PLACEMENT, check_placement
from headway.cache.shape.checks import MOST_BLOCKS, check_float, check_whole
from headway.cache.shape.geometry import CacheGeometry
from headway.cache.shape.spec import ComputeCost, LayerSpec, ParallelLayout
from headway.errors import ConfigError

__all__ = ["CacheConfig"]


@dataclass(frozen=True)
class CacheConfig:
    """Configuration of a `PrefixCache`. The defaults need no tuning; `groups` and `blocks` come from model and memory.

    Attributes:
        groups: Cache groups of the model, in any order.
        blocks: Blocks in the pool (of each rank).
        block_tokens: Tokens of the first token-indexed group in one block on one rank (default 16); fixes the block's
            bytes.
        block_bytes: Bytes of a block on one rank, given instead of `block_tokens`.
        layout: Parallel layout.
        checkpoint_alignment: States can be exported at multiples of this only. A donated state (end of an answer,
            preemption) is the running one and may lie anywhere.
        placement: Kinds of position that get a checkpoint, see `headway.cache.policy.placement`.
        eviction: "adaptive", "value", "shared-value", "lru", "greedy-dual", or a policy object.
        cost: What computing tokens costs; ranks what to keep.
        exports_inside: The model can export states inside a chunk, so prefill need not stop at checkpoints.
        max_leases: Running requests for which room is made at once; grows when needed.
        pin_share: Largest share of the pool that pins may protect.
        pin_seconds: Time to live of a pin whose prompt does not say.
        history_tokens: Tokens that may be known: of what is kept, and of what went, to explain misses and to see where
            traffic parts. What is kept or running is known in any case; of what went the oldest is forgotten first.
            None: four times what the pool can hold.
        index_bytes: Memory of this process for all that is known and kept: tokens, branches, checkpoints, pins. Beyond
            it what went is forgotten first, then what is kept goes; what is running stays. None: what went is
            forgotten beyond the tokens of four full pools and 16 MiB, and what is kept has room for a branch and a
            checkpoint in every block besides.
        steps_in_flight: Steps that a lease may have under way at once: 1, or 2 to plan a step before the one before it
            is committed.
        slots_ahead: Positions behind those of a step for which `extend` gives blocks too: drafts write there.
        scratch_blocks: Blocks that every lease has besides, for itself alone, such as for states after draft tokens.
        answer_stretch: Tokens of an answer that gather before others can reuse them; the whole answer can be reused
            when its request ends.
        check: Check every invariant after every operation (slow; for tests).
    """

    groups: Sequence[LayerSpec]
    blocks: int
    block_tokens: int | None = None
    block_bytes: int | None = None
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    checkpoint_alignment: int = 1
    placement: Sequence[str] = DEFAULT_PLACEMENT
    eviction: str | EvictionPolicy = "adaptive"
    cost: ComputeCost = field(default_factory=ComputeCost)
    exports_inside: bool = False
    max_leases: int = 64
    pin_share: float = 0.5
    pin_seconds: float = 3600.0
    history_tokens: int | None = None
    index_bytes: int | None = None
    steps_in_flight: int = 1
    slots_ahead: int = 0
    scratch_blocks: int = 0
    answer_stretch: int = 256
    check: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            ConfigError: The message names the field and says what to change.
        """
        check_whole("blocks", self.blocks, high=MOST_BLOCKS)
        check_whole("checkpoint_alignment", self.checkpoint_alignment)
        check_whole("max_leases", self.max_leases, high=2**20)
        check_whole("answer_stretch", self.answer_stretch, high=2**20)
        check_whole("steps_in_flight", self.steps_in_flight, high=2)
        for name in ("slots_ahead", "scratch_blocks"):
            check_whole(name, getattr(self, name), low=0, high=2**20)
        for name in ("block_tokens", "block_bytes"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), high=2**40)
        check_float("pin_share", self.pin_share, 0.0, 1.0)
        check_float("pin_seconds", self.pin_seconds, 1e-3, 1e12)
        for name in ("history_tokens", "index_bytes"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), low=0)
        for name, kind in (("layout", ParallelLayout), ("cost", ComputeCost)):
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(f"{name} must be a {kind.__name__}, not {getattr(self, name)!r}")
        check_placement(self.placement)
        eviction_policy(self.eviction)
        self.geometry()

    def geometry(self) -> CacheGeometry:
        """The geometry that this configuration gives."""
        return CacheGeometry(
            self.groups,
            self.layout,
            block_tokens=self.block_tokens,
            block_bytes=self.block_bytes,
            scratch_blocks=self.scratch_blocks,
        )

    def retention(self, clock: Callable[[], float]) -> Retention:
        """What decides how long something is kept, with the defaults of `history_tokens` and `index_bytes`."""
        tables = self.geometry().prefix_tables
        full = self.blocks * max((table.span for table in tables), default=1024)
        tokens = 4 * full + 65536 if self.history_tokens is None else self.history_tokens
        policy, edges, each = eviction_policy(self.eviction), 16 * 2**20, EDGE_BYTES + CHECKPOINT_BYTES
        if isinstance(policy, Adaptive):  # its shadows take as much again, on edges and for what they keep
            edges, each = 2 * edges, 2 * each
        known, kept = 4 * token_bytes(tables) * full + edges, self.blocks * each
        sizes = (known, known + kept) if self.index_bytes is None else (self.index_bytes, self.index_bytes)
        return Retention(policy, self.cost, clock, self.pin_share, tokens, *sizes)
