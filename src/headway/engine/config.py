"""The engine's options in one record, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass, field

from headway.cache import DEFAULT_PLACEMENT, EVICTIONS, check_placement
from headway.engine.parallel import ParallelConfig
from headway.errors import ConfigError
from headway.runtime.choices import MOST_DRAFT_TOKENS, AcceptanceRule

__all__ = ["EngineConfig"]


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
