"""Models as vLLM's planner sees them, and the scheduler that vLLM would build for each: no weights, no device.

Real are the specs of the layers, the planner that groups them and counts blocks, the block sizes for hashing, and the
scheduler. The model's config is a namespace with what the scheduler reads. Page sizes follow vLLM's rule for hybrids:
the attention block is raised until its page holds a state, and the page of a state is padded to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

__all__ = ["ENGINES", "LAYOUTS", "Built", "Layout", "Options", "build"]

LONGEST = 1 << 20
"""Tokens of the longest sequence, prompt and answer."""


@dataclass(frozen=True)
class Options:
    """How an engine is run, beside model and memory.

    Attributes:
        running: Most requests in a step.
        step_tokens: Most tokens in a step.
        asynchronous: Plan a step before the one before it is answered.
        drafts: Drafted tokens per step, by an MTP head with a cache of its own; 0 for none.
    """

    running: int = 16
    step_tokens: int = 8192
    asynchronous: bool = False
    drafts: int = 0


@dataclass(frozen=True)
class Layout:
    """A model on its ranks.

    Attributes:
        text: Model, ranks and types, for reports.
        block: Tokens per attention block and rank.
        dcp: Ranks that attention is split over by tokens.
        layers: From the size of the block of a state, the mode of states and the drafts to the spec of each layer.
    """

    text: str
    block: int
    dcp: int
    layers: Callable[[int, str, int], dict[str, KVCacheSpec]]


@dataclass(frozen=True)
class Engine:
    """Who keeps what: `unit` is vLLM's `prefix_match_unit`, `scheduler` a class in the place of vLLM's."""

    unit: int | None = None
    scheduler: str | None = None


@dataclass(frozen=True)
class Built:
    """A scheduler, and what makes the block hashes of a request where the engine wants them."""

    scheduler: Scheduler
    hasher: Callable[..., Any] | None


ENGINES = {
    "vllm": Engine(),
    "vllm-512": Engine(unit=512),
    "headway": Engine(scheduler="headway.vllm.Scheduler"),
}


def _hybrid_block(state_bytes: int, token_bytes: int, multiple: int) -> int:
    return multiple * math.ceil(state_bytes / (multiple * token_bytes))


def _states(layers: int, block: int, mode: str, drafts: int, **spec: Any) -> dict[str, KVCacheSpec]:
    made = MambaSpec(block_size=block, mamba_cache_mode=mode, num_speculative_blocks=drafts, **spec)
    return {f"state.{i}": made for i in range(layers)}


def _kimi_k3(state_block: int, mode: str, drafts: int) -> dict[str, KVCacheSpec]:
    """24 MLA layers of 576 bytes per token in fp8; 69 KDA layers, of which 12 of 96 heads lie on each rank."""
    latent = {"num_kv_heads": 1, "head_size": 576, "dtype": torch.uint8, "cache_dtype_str": "fp8", "max_tp_shards": 1}
    mla = MLAAttentionSpec(block_size=_K3_BLOCK, **latent)
    draft = {"draft.0": MLAAttentionSpec(block_size=_K3_BLOCK, is_draft=True, **latent)} if drafts else {}
    # What the CUDA kernels of this model declare: a state inside the last chunk can be kept without ending the chunk.
    inside = {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 16} if mode == "align" else {}
    shapes, dtypes = ((3 + drafts, 4608), (12, 128, 128)), (torch.bfloat16, torch.float32)
    page = {"shapes": shapes, "dtypes": dtypes, "page_size_padded": _K3_BLOCK * 576}
    return {f"mla.{i}": mla for i in range(24)} | draft | _states(69, state_block, mode, drafts, **page, **inside)


def _qwen3_next(state_block: int, mode: str, drafts: int) -> dict[str, KVCacheSpec]:
    """12 layers of attention with 2 heads of 256 in bf16; 36 layers of Gated DeltaNet."""
    block = {"block_size": _QWEN_BLOCK, "num_kv_heads": 2, "head_size": 256, "dtype": torch.bfloat16}
    shapes, dtypes = ((3 + drafts, 8192), (32, 128, 128)), (torch.bfloat16, torch.bfloat16)
    page = {"shapes": shapes, "dtypes": dtypes, "page_size_padded": _QWEN_BLOCK * 2048}
    attention = FullAttentionSpec(**block)
    return {f"attention.{i}": attention for i in range(12)} | _states(36, state_block, mode, drafts, **page)


def _gpt_oss(_state_block: int, _mode: str, drafts: int) -> dict[str, KVCacheSpec]:
    """18 layers of full attention and 18 with a window of 128 tokens, each 8 heads of 64 in bf16."""
    block = {"block_size": 16, "num_kv_heads": 8, "head_size": 64, "dtype": torch.bfloat16}
    full, window = FullAttentionSpec(**block), SlidingWindowSpec(**block, sliding_window=128)
    draft = {"draft.0": FullAttentionSpec(**block, is_draft=True)} if drafts else {}
    return {f"layer.{i}": window if i % 2 == 0 else full for i in range(36)} | draft


_K3_BLOCK = _hybrid_block(3 * 4608 * 2 + 12 * 128 * 128 * 4, 576, 128)
_QWEN_BLOCK = _hybrid_block((3 * 8192 + 32 * 128 * 128) * 2, 2048, 16)
LAYOUTS = {
    "kimi-k3": Layout("Kimi-K3, TP 8, DCP 8, fp8", _K3_BLOCK, 8, _kimi_k3),
    "qwen3-next": Layout("Qwen3-Next-80B-A3B, TP 1, bf16", _QWEN_BLOCK, 1, _qwen3_next),
    "gpt-oss-120b": Layout("gpt-oss-120b, TP 1, bf16", 16, 1, _gpt_oss),
}


def build(layout: Layout, engine: Engine, memory: int, options: Options) -> Built:
    """The scheduler that vLLM builds for a model with `memory` bytes for its caches on each rank.

    Raises:
        ImportError: The engine's scheduler class cannot be imported.
    """
    config = _config(layout, engine, options)
    caching = engine.scheduler is None
    mode = "align" if caching else "none"
    state_block = layout.block if caching else LONGEST
    config.cache_config.mamba_cache_mode, config.cache_config.mamba_block_size = mode, state_block
    groups = get_kv_cache_groups(config, layout.layers(state_block, mode, options.drafts))
    # Draft layers that vLLM's own cache must know about are found by name in a real start.
    drop = config.speculative_config is not None and config.speculative_config.use_eagle_block_drop()
    for group in groups:
        group.is_eagle_group = drop and any(name.startswith("draft.") for name in group.layer_names)
    planned = get_kv_cache_config_from_groups(config, groups, memory)
    config.cache_config.num_gpu_blocks = planned.num_blocks
    return _scheduler(config, planned, caching)


def _scheduler(config: VllmConfig, planned: KVCacheConfig, caching: bool) -> Built:
    scheduler_block, hash_block = resolve_kv_cache_block_sizes(planned, config)
    hash_function = get_hash_fn_by_name("sha256")
    init_none_hash(hash_function)
    scheduler = config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=planned,
        structured_output_manager=_NoGrammar(),
        block_size=scheduler_block,
        hash_block_size=hash_block,
        include_finished_set=False,
        log_stats=False,
    )
    lookahead = config.num_hash_lookahead_tokens
    return Built(scheduler, get_request_block_hasher(hash_block, hash_function, lookahead) if caching else None)


def _config(layout: Layout, engine: Engine, options: Options) -> VllmConfig:
    caching = engine.scheduler is None
    config = VllmConfig(
        cache_config=CacheConfig(
            block_size=layout.block,
            enable_prefix_caching=caching,
            prefix_match_unit=engine.unit,
        ),
        scheduler_config=SchedulerConfig(
            max_model_len=LONGEST,
            is_encoder_decoder=False,
            max_num_batched_tokens=options.step_tokens,
            max_num_seqs=options.running,
            async_scheduling=options.asynchronous,
            scheduler_cls=engine.scheduler,
        ),
        parallel_config=ParallelConfig(worker_extension_cls="headway.vllm.WholePages"),
        device_config=DeviceConfig(device="cpu"),
    )
    # What VllmConfig decides from a model and a platform, neither of which is there.
    config.cache_config.kv_cache_layout = "LBNHC"
    config.scheduler_config.async_scheduling = options.asynchronous
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    config.parallel_config.decode_context_parallel_size = layout.dcp
    object.__setattr__(config, "speculative_config", _drafting(options.drafts) if options.drafts else None)
    object.__setattr__(config, "model_config", _model())
    return config


def _model() -> SimpleNamespace:
    return SimpleNamespace(
        architecture="none",
        architectures=["none"],
        is_diffusion=False,
        is_encoder_decoder=False,
        is_multimodal_model=False,
        max_model_len=LONGEST,
        multimodal_config=None,
        return_sampling_mask=False,
        runner_type="generate",
        supports_multimodal_inputs=False,
        uses_mrope=False,
    )


def _drafting(tokens: int) -> SpeculativeConfig:
    """Drafts by MTP. Only what validates a draft model is left out; all questions are answered by vLLM's methods."""
    config = object.__new__(SpeculativeConfig)
    head = SimpleNamespace(hf_config=SimpleNamespace(num_nextn_predict_layers=1), architectures=[])
    fields = {
        "method": "mtp",
        "num_speculative_tokens": tokens,
        "disable_eagle_block_drop": False,
        "disable_lookahead_block_hashes": False,
        "num_speculative_tokens_per_batch_size": None,
        "parallel_drafting": False,
        "draft_model_config": head,
    }
    for name, value in fields.items():
        object.__setattr__(config, name, value)
    return config


class _NoGrammar:
    """In the place of the manager of structured output: nothing is asked for."""

    def accept_tokens(self, _request: Any, _tokens: list[int]) -> bool:
        return True

    def validate_tokens(self, _request: Any, tokens: list[int]) -> list[int]:
        return tokens
