"""The engine's options in two records, checked when they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

from headway.cache import DEFAULT_PLACEMENT, EVICTIONS, ParallelLayout, check_placement
from headway.engine.tier_options import TierOptions
from headway.errors import ConfigError
from headway.option_records import Written, option
from headway.runtime.interface import (
    COMMUNICATIONS,
    MOST_DRAFT_TOKENS,
    AcceptanceRule,
    StoredTypes,
    require_ranks,
    require_stripes,
)
from headway.sizes import parse_bytes

__all__ = ["DEFAULT_WAIT_TOKENS", "EXECUTORS", "ON_RANK_FAILURE", "EngineConfig", "ParallelConfig"]

EXECUTORS = ("auto", "local", "processes", "ray")
"""Who computes: this process, one process per rank on this machine, or one Ray actor per rank on any machines."""
ON_RANK_FAILURE = ("restart", "exit")
"""What the engine does when it has lost a rank."""


_RANKS = "Ranks"


@dataclass(frozen=True)
class ParallelConfig:
    """The ranks of an engine: options of `headway serve`, each with what it means.

    Windows, chunks and states are not split by `dcp`. With tensor parallelism its ranks are among those that share the
    weights. `pcp` has all of these ranks as many times. `executor` is one of `EXECUTORS`: `auto` is `local` for one
    rank and `processes` for more.
    """

    dcp: Annotated[
        int,
        option(
            _RANKS,
            "Decode-context-parallel size: ranks over which the tokens of full attention are split. Without --tp each "
            "holds the whole model; with the same memory a rank, the cache holds about that many times the tokens.",
        ),
    ] = 1
    interleave: Annotated[
        int, option(_RANKS, "Consecutive tokens that one --dcp or --pcp rank stores; must divide --block-tokens.")
    ] = 1
    communication: Annotated[
        str,
        option(
            _RANKS,
            "How ranks merge their attention: ag_rs (all-gather, reduce-scatter) or a2a (all-to-all).",
            "--dcp-comm",
        ),
    ] = "ag_rs"
    tp: Annotated[
        int,
        option(
            _RANKS,
            "Tensor-parallel size: ranks that share the weights by the plan that transformers has for the model, and "
            "recurrent states by heads. --dcp divides it.",
        ),
    ] = 1
    pcp: Annotated[
        int,
        option(
            _RANKS,
            "Prefill-context-parallel size: ranks that compute a share each of the tokens of a long prompt. They store "
            "full attention as --dcp ranks do, and hold the same weights; with --tp N there are N times as many.",
        ),
    ] = 1
    executor: Annotated[
        str,
        option(_RANKS, "Who computes: local (this process), processes, ray (both: one per rank), or auto."),
    ] = "auto"
    rank_timeout: Annotated[float, option(_RANKS, "Seconds that a step may take before the ranks count as lost.")] = (
        300.0
    )
    on_rank_failure: Annotated[
        str, option(_RANKS, "When a rank is lost: restart (new ranks, empty cache) or exit (with an error status).")
    ] = "restart"

    def __post_init__(self) -> None:
        """Refuse what cannot run.

        Raises:
            ConfigError: The message names the option and what to change.
        """
        require_ranks(self.tp, self.dcp, self.interleave, self.pcp)
        _one_of("executor", self.executor, EXECUTORS)
        _one_of("on_rank_failure", self.on_rank_failure, ON_RANK_FAILURE)
        _one_of("communication", self.communication, COMMUNICATIONS)
        if not self.rank_timeout > 0:
            raise ConfigError(f"rank_timeout is {self.rank_timeout}, it must be more than 0 seconds")
        if self.executor == "local" and self.ranks > 1:
            raise ConfigError(
                f"executor=local computes in one process, and tp={self.tp}, dcp={self.dcp}, pcp={self.pcp} need "
                f"{self.ranks}: use auto, processes or ray"
            )

    @property
    def ranks(self) -> int:
        """How many ranks compute."""
        return self.layout.tp * self.pcp

    @property
    def kind(self) -> str:
        """The executor that `executor` means: `local`, `processes` or `ray`."""
        if self.executor != "auto":
            return self.executor
        return "local" if self.ranks == 1 else "processes"

    @property
    def layout(self) -> ParallelLayout:
        """The layout for the cache: context parallelism without tensor parallelism has ranks of its own."""
        own = self.tp if self.tp > 1 else self.dcp
        return ParallelLayout(tp=own, dcp=self.dcp, pcp=self.pcp, interleave=self.interleave)


def _kinds(text: str) -> tuple[str, ...]:
    return tuple(kind.strip() for kind in text.split(",") if kind.strip())


DEFAULT_WAIT_TOKENS = 256
"""About what a step takes besides its tokens: to wait for fewer would cost more than to compute them."""

_MODEL, _CACHE, _DRAFTS, _LIMITS = "Model", "Cache", "Speculative decoding", "Batches and limits"


@dataclass(frozen=True)
class EngineConfig:
    """How an engine computes and what it keeps: options of `headway serve`, each with what it means, and five more.

    Attributes:
        memory: Bytes for the block pool, of every rank; None chooses from what the device has free.
        placement: See `headway.cache.CacheConfig`. The ends of answers need not lie on `checkpoint_alignment`.
        parallel: The ranks that compute.
        tiers: What lies below the memory of the cache.
        step_price: For a model that continues token by token only: how many tokens of a prompt, computed in one piece,
            take as long as one such step. Its prompts are computed in one step, and so are limited by
            `max_batched_tokens` less one token for each of the other running requests. None for all other models.
        max_retries: How often a request whose step failed is tried again by itself before it is failed.
        check: Verify the cache's invariants after every operation. Slow; for tests.
    """

    device: Annotated[str, option(_MODEL, "cpu, cuda, cuda:1, ...")] = "cpu"
    dtype: Annotated[str, option(_MODEL, "fp32, bf16, or auto: fp32 on a CPU, else bf16.")] = "auto"
    max_model_len: Annotated[
        int | None, option(_MODEL, "Most tokens of prompt and answer together; the model's own limit by default.")
    ] = None
    memory: Annotated[
        int | None,
        option(
            _CACHE,
            "Memory of the cache, such as 4GiB; by default most of a GPU's free memory, or half of the free host "
            "memory up to 4 GiB.",
        ),
        Written(partial(parse_bytes, option="--memory")),
    ] = None
    block_tokens: Annotated[int, option(_CACHE, "Tokens in a block.")] = 16
    kv_dtype: Annotated[
        str,
        option(
            _CACHE,
            "What attention entries are stored as: auto (as the model computes), bf16, or fp8_e4m3, which takes half "
            "the memory of bf16. What that costs in quality is measured at start.",
        ),
    ] = "auto"
    state_dtype: Annotated[
        str, option(_CACHE, "What recurrent states are stored as: auto (as the model computes), fp32 or bf16.")
    ] = "auto"
    placement: Annotated[
        tuple[str, ...],
        option(_CACHE, "Which positions get a checkpoint, separated by commas; interval:N for every N tokens."),
        Written(_kinds, ",".join),
    ] = DEFAULT_PLACEMENT
    eviction: Annotated[
        str, option(_CACHE, "What goes first when memory runs out: adaptive, value, shared-value, lru or greedy-dual.")
    ] = "adaptive"
    checkpoint_alignment: Annotated[int, option(_CACHE, "Checkpoints lie at multiples of this many tokens.")] = 1
    pin_share: Annotated[float, option(_CACHE, "Largest share of the cache that pins may protect, from 0 to 1.")] = 0.5
    pin_seconds: Annotated[float, option(_CACHE, "Longest time of a pin, and that of one that names no time.")] = 3600.0
    prefix_reuse: Annotated[bool, option(_CACHE, "Reuse what is cached, or compute every prompt anew.")] = True
    draft: Annotated[
        str,
        option(
            _DRAFTS,
            "Who drafts tokens for the model to verify: none; lookup (repeats of the text itself); mtp or dspark (what "
            "the model brings along); or the folder of a drafter. Answers have the same distribution as without.",
        ),
    ] = "none"
    draft_tokens: Annotated[
        int | None, option(_DRAFTS, "Most tokens of a draft; the drafter's own number by default.", min=1)
    ] = None
    draft_rule: Annotated[
        str,
        option(
            _DRAFTS,
            "How drafts of sampled answers are judged. match: a seed gives the very answer it gives without drafts. "
            "token or block: more drafts are accepted, and a seed may give another answer.",
        ),
    ] = "match"
    max_batched_tokens: Annotated[int, option(_LIMITS, "Most tokens computed in one step.")] = 2048
    max_running: Annotated[int, option(_LIMITS, "Most requests that run at once.")] = 64
    max_waiting: Annotated[int, option(_LIMITS, "Most requests that wait; more are refused.")] = 1024
    wait_tokens: Annotated[
        int,
        option(
            _LIMITS,
            "A request waits where a running one is about to compute at least so many tokens of its prompt that it "
            "would have to compute as well; 0: never.",
        ),
    ] = DEFAULT_WAIT_TOKENS
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    tiers: TierOptions = field(default_factory=TierOptions)
    step_price: float | None = None
    max_retries: int = 2
    check: bool = False

    def __post_init__(self) -> None:
        """Refuse values that cannot work.

        Raises:
            ConfigError: The message names the option and what to change.
        """
        for name in ("max_batched_tokens", "max_running", "max_waiting", "block_tokens", "checkpoint_alignment"):
            _at_least(name, getattr(self, name), 1)
        _at_least("max_retries", self.max_retries, 0)
        _at_least("wait_tokens", self.wait_tokens, 0)
        if self.max_model_len is not None:
            _at_least("max_model_len", self.max_model_len, 2)
        if self.memory is not None:
            _at_least("memory", self.memory, 1)
        if self.max_batched_tokens < self.max_running:
            raise ConfigError(
                f"max_batched_tokens={self.max_batched_tokens} is less than max_running={self.max_running}: every "
                "running request needs one token of each step, so raise the first or lower the second"
            )
        if not 0 <= self.pin_share <= 1:
            raise ConfigError(f"pin_share is {self.pin_share}, it must be between 0 and 1")
        if not 1e-3 <= self.pin_seconds <= 1e12:
            raise ConfigError(f"pin_seconds is {self.pin_seconds}, it must be a positive number of seconds")
        if not self.prefix_reuse and (self.tiers.below or self.tiers.host_memory is not None):
            raise ConfigError(
                "without reuse of prefixes nothing is kept in lower tiers: leave out --no-prefix-reuse, or their "
                "options"
            )
        require_stripes(self.parallel.interleave, self.block_tokens)
        StoredTypes.read(self.kv_dtype, self.state_dtype)
        self._check_drafts()
        check_placement(self.placement)
        if self.eviction not in EVICTIONS:
            raise ConfigError(f"eviction is {self.eviction!r}, it must be one of {', '.join(EVICTIONS)}")
        if self.step_price is not None and not self.step_price >= 1:
            raise ConfigError(f"step_price is {self.step_price}, it must be at least 1")

    @property
    def stored(self) -> StoredTypes:
        """What the cache stores entries and states as."""
        return StoredTypes.read(self.kv_dtype, self.state_dtype)

    def least_hit(self, tokens: int) -> int:
        """First position of a prompt of `tokens` tokens from which it pays to go on.

        A model that continues by several tokens goes on anywhere. One that does not either computes all but the last
        token in one piece, or resumes at position p and makes single steps, one for each token; the last is one in both
        cases. The steps pay if (tokens - 1 - p) * step_price < tokens - 1. So does a checkpoint inside a prompt: the
        steps behind it then cost less than the first request saves that resumes there.
        """
        return 0 if self.step_price is None else math.floor((tokens - 1) * (1 - 1 / self.step_price)) + 1

    def _check_drafts(self) -> None:
        if self.draft_rule not in list(AcceptanceRule):
            raise ConfigError(f"draft_rule is {self.draft_rule!r}, it must be one of {', '.join(AcceptanceRule)}")
        if self.draft_tokens is not None and not 1 <= self.draft_tokens <= MOST_DRAFT_TOKENS:
            raise ConfigError(f"draft_tokens is {self.draft_tokens}, it must be between 1 and {MOST_DRAFT_TOKENS}")
        if self.draft == "none" and (self.draft_tokens is not None or self.draft_rule != AcceptanceRule.MATCH):
            raise ConfigError("draft_tokens and draft_rule say how a drafter is used, and there is none: add --draft")
        if self.draft != "none" and self.step_price is not None:
            raise ConfigError("a draft is verified as a chunk of a prompt is: a model with step_price has no chunks")


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name} is {value}, it must be at least {least}")


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}, it must be {', '.join(choices[:-1])} or {choices[-1]}")
