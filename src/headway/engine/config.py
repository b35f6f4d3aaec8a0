"""The engine's options in two records, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass, field

from headway.cache import DEFAULT_PLACEMENT, EVICTIONS, ParallelLayout, check_placement
from headway.errors import ConfigError
from headway.runtime.interface import COMMUNICATIONS, MOST_DRAFT_TOKENS, AcceptanceRule

__all__ = ["EXECUTORS", "ON_RANK_FAILURE", "EngineConfig", "ParallelConfig"]

EXECUTORS = ("auto", "local", "processes", "ray")
"""Who computes: this process, one process a rank on this machine, or one Ray actor a rank on any machines."""
ON_RANK_FAILURE = ("restart", "exit")
"""What the engine does when it has lost a rank."""


@dataclass(frozen=True)
class ParallelConfig:
    """The ranks of an engine.

    Attributes:
        dcp: Decode-context-parallel size: ranks over which the tokens of full attention are split. Windows, chunks and
            states are not. Without tensor parallelism each of these ranks holds the whole model; with it they are among
            the ranks that share the weights.
        interleave: Consecutive tokens that one rank stores before the next takes over.
        communication: `ag_rs` (all-gather and reduce-scatter) or `a2a` (all-to-all); both give the same results.
        executor: One of `EXECUTORS`; `auto` is `local` for one rank and `processes` for more.
        rank_timeout: Seconds that a step may take on any rank before the ranks count as lost.
        on_rank_failure: `restart` starts new ranks with an empty cache, `exit` ends the engine.
        tp: Tensor-parallel size: ranks that share the weights, and states by heads. `dcp` divides it.
        pcp: Prefill-context-parallel size. Only 1 can run.
    """

    dcp: int = 1
    interleave: int = 1
    communication: str = "ag_rs"
    executor: str = "auto"
    rank_timeout: float = 300.0
    on_rank_failure: str = "restart"
    tp: int = 1
    pcp: int = 1

    def __post_init__(self) -> None:
        """Refuse what cannot run.

        Raises:
            ConfigError: The message names the option and what to change.
        """
        for name in ("dcp", "interleave", "tp", "pcp"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if self.tp > 1 and self.tp % self.dcp:
            raise ConfigError(
                f"dcp={self.dcp} does not divide tp={self.tp}: decode context parallelism reuses the ranks that share "
                f"the weights, so choose --dcp among the divisors of --tp, or leave --tp out"
            )
        if self.pcp > 1:
            raise ConfigError(
                f"pcp={self.pcp}: prefill context parallelism is geometry only (`headway inspect --pcp`), no executor "
                f"splits a prompt over ranks yet: use --dcp"
            )
        _one_of("executor", self.executor, EXECUTORS)
        _one_of("on_rank_failure", self.on_rank_failure, ON_RANK_FAILURE)
        _one_of("communication", self.communication, COMMUNICATIONS)
        if not self.rank_timeout > 0:
            raise ConfigError(f"rank_timeout is {self.rank_timeout}, it must be more than 0 seconds")
        if self.executor == "local" and self.ranks > 1:
            raise ConfigError(
                f"executor=local computes in one process, and tp={self.tp}, dcp={self.dcp} need {self.ranks}: use "
                f"auto, processes or ray"
            )

    @property
    def ranks(self) -> int:
        """How many ranks compute."""
        return self.tp if self.tp > 1 else self.dcp

    @property
    def kind(self) -> str:
        """The executor that `executor` means: `local`, `processes` or `ray`."""
        if self.executor != "auto":
            return self.executor
        return "local" if self.ranks == 1 else "processes"

    @property
    def layout(self) -> ParallelLayout:
        """The layout for the cache: context parallelism without tensor parallelism has ranks of its own."""
        return ParallelLayout(tp=self.ranks, dcp=self.dcp, interleave=self.interleave)


@dataclass(frozen=True)
class EngineConfig:
    """How an engine computes and what it keeps.

    Attributes:
        device: Torch device string, `cpu` or `cuda` or `cuda:1`.
        dtype: `fp32`, `bf16`, or `auto`: fp32 on a CPU, else bf16.
        memory: Bytes for the block pool; None chooses from what the device has free.
        max_model_len: Most tokens of prompt and answer together; None takes the model's own limit.
        max_batched_tokens: Most tokens computed in one step, over all requests.
        max_running: Most requests that run at once.
        max_waiting: Most requests that wait; beyond it a request is refused (HTTP 429).
        block_tokens: Tokens in a block of the pool.
        placement: Which positions get a checkpoint; see `headway.cache.CacheConfig`.
        eviction: What goes first when memory runs out: `value`, `lru` or `greedy-dual`.
        checkpoint_alignment: Checkpoints lie at multiples of this many tokens, except the ends of answers.
        chunked_prefill: False computes every prompt in one step, for models that cannot continue one; prompts are then
            limited by `max_batched_tokens` less one token for each of the other running requests.
        prefix_reuse: False computes every prompt from its start.
        draft: Who drafts tokens for the model to verify: `none`, `lookup`, `mtp` or `dspark`, or the folder of a
            drafter.
        draft_tokens: Most tokens of a draft; None takes the drafter's own number.
        draft_rule: How drafts of sampled answers are judged: `match`, `token` or `block`.
        max_retries: How often a request whose step failed is tried again by itself before it is failed.
        parallel: The ranks that compute.
        check: Verify the cache's invariants after every operation. Slow; for tests.
    """

    device: str = "cpu"
    dtype: str = "auto"
    memory: int | None = None
    max_model_len: int | None = None
    max_batched_tokens: int = 2048
    max_running: int = 64
    max_waiting: int = 1024
    block_tokens: int = 16
    placement: tuple[str, ...] = DEFAULT_PLACEMENT
    eviction: str = "value"
    checkpoint_alignment: int = 1
    chunked_prefill: bool = True
    prefix_reuse: bool = True
    draft: str = "none"
    draft_tokens: int | None = None
    draft_rule: str = "match"
    max_retries: int = 2
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    check: bool = False

    def __post_init__(self) -> None:
        """Refuse values that cannot work.

        Raises:
            ConfigError: The message names the option and what to change.
        """
        for name in ("max_batched_tokens", "max_running", "max_waiting", "block_tokens", "checkpoint_alignment"):
            _at_least(name, getattr(self, name), 1)
        _at_least("max_retries", self.max_retries, 0)
        if self.max_model_len is not None:
            _at_least("max_model_len", self.max_model_len, 2)
        if self.memory is not None:
            _at_least("memory", self.memory, 1)
        if self.max_batched_tokens < self.max_running:
            raise ConfigError(
                f"max_batched_tokens={self.max_batched_tokens} is less than max_running={self.max_running}: every "
                "running request needs one token of each step, so raise the first or lower the second"
            )
        self._check_drafts()
        check_placement(self.placement)
        if self.eviction not in EVICTIONS:
            raise ConfigError(f"eviction is {self.eviction!r}, it must be one of {', '.join(EVICTIONS)}")
        if self.prefix_reuse and not self.chunked_prefill:
            raise ConfigError("prefix_reuse needs chunked_prefill: a reused prefix is continued as a chunk is")

    def _check_drafts(self) -> None:
        if self.draft_rule not in list(AcceptanceRule):
            raise ConfigError(f"draft_rule is {self.draft_rule!r}, it must be one of {', '.join(AcceptanceRule)}")
        if self.draft_tokens is not None and not 1 <= self.draft_tokens <= MOST_DRAFT_TOKENS:
            raise ConfigError(f"draft_tokens is {self.draft_tokens}, it must be between 1 and {MOST_DRAFT_TOKENS}")
        if self.draft != "none" and not self.chunked_prefill:
            raise ConfigError("a draft is verified as a chunk of a prompt is: it needs chunked_prefill")


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name} is {value}, it must be at least {least}")


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}, it must be {', '.join(choices[:-1])} or {choices[-1]}")
