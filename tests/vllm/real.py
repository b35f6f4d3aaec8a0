"""vLLM's real scheduler with ours for its KV cache, under the emulated worker: random runs, without a model or a GPU.

    python -m tests.vllm.real [--seeds 3] [--requests 40] [--layout NAME] [--blocks 300 90]

Needs vLLM in the environment, but not its compiled parts. Real are vLLM's scheduler, its configuration and its specs.
Fabricated are the model's configuration and the worker, which asserts every entry and state that a request reads.
With asynchronous scheduling the output of a step arrives when the next one is planned.
"""

from __future__ import annotations

import argparse
import random
import time
from types import SimpleNamespace
from typing import Any

import torch
from tests.vllm.standin import worker_groups
from tests.vllm.worker import EmulatedWorker
from vllm.config import CacheConfig, DeviceConfig, ParallelConfig, SchedulerConfig, SpeculativeConfig, VllmConfig
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

import headway.vllm
from headway.cache import DEFAULT_PLACEMENT, EVICTIONS

MAX_LEN = 512
LAYOUTS = ("full", "hybrid", "windows", "chunks", "spans", "all")


def specs(layout: str, drafts: int) -> list[Any]:
    """vLLM's own specs of a small model of each kind."""
    sizes = {"num_kv_heads": 1, "head_size": 64, "dtype": torch.float16}
    full = FullAttentionSpec(block_size=8, **sizes)
    state = MambaSpec(
        block_size=4096,
        shapes=((4, 8),),
        dtypes=(torch.float16,),
        page_size_padded=full.page_size_bytes,
        num_speculative_blocks=drafts,
    )
    narrow = FullAttentionSpec(block_size=4, **{**sizes, "head_size": 128})
    return {
        "full": [full],
        "hybrid": [full, state, state, state],
        "windows": [*[SlidingWindowSpec(block_size=8, sliding_window=25, **sizes)] * 2, full],
        "chunks": [ChunkedLocalAttentionSpec(block_size=8, attention_chunk_size=32, **sizes), full],
        "spans": [full, narrow, SlidingWindowSpec(block_size=8, sliding_window=5, **sizes)],
        "all": [full, SlidingWindowSpec(block_size=8, sliding_window=9, **sizes), state],
    }[layout]


class _NoStructuredOutput:
    def accept_tokens(self, *_: Any) -> bool:
        return True

    def validate_tokens(self, _: Any, tokens: list[int]) -> list[int]:
        return tokens

    def grammar_bitmask(self, *_: Any, **__: Any) -> None:
        return None


def _drafting(drafts: int) -> Any:
    """A `SpeculativeConfig` without a draft model to load; what it answers is vLLM's own."""
    made = object.__new__(SpeculativeConfig)
    draft = SimpleNamespace(hf_config=SimpleNamespace(num_nextn_predict_layers=1), architectures=[])
    given = {"method": "mtp", "num_speculative_tokens": drafts, "draft_model_config": draft, "parallel_drafting": False}
    off = ("disable_eagle_block_drop", "disable_lookahead_block_hashes", "num_speculative_tokens_per_batch_size")
    for name, value in {**given, **dict.fromkeys(off[:2], False), off[2]: None}.items():
        object.__setattr__(made, name, value)
    return made


def make(
    layout: str,
    blocks: int,
    *,
    drafts: int = 0,
    ahead: bool = False,
    dcp: int = 1,
    policy: str = "fcfs",
    options: dict[str, Any] | None = None,
) -> Any:
    """A scheduler, and the configuration of its KV cache."""
    scheduling = SchedulerConfig(
        max_model_len=MAX_LEN,
        is_encoder_decoder=False,
        max_num_batched_tokens=64,
        max_num_seqs=6,
        async_scheduling=ahead,
        policy=policy,
    )
    config = VllmConfig(
        cache_config=CacheConfig(block_size=8, enable_prefix_caching=False),
        scheduler_config=scheduling,
        parallel_config=ParallelConfig(worker_extension_cls="headway.vllm.WholePages"),
        device_config=DeviceConfig(device="cpu"),
    )
    config.scheduler_config.async_scheduling = ahead
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    config.parallel_config.decode_context_parallel_size = dcp
    config.parallel_config.worker_extension_cls = "headway.vllm.WholePages"
    config.cache_config.mamba_cache_mode, config.cache_config.num_gpu_blocks = "none", blocks
    config.additional_config = {"headway": {"check": True, **(options or {})}}
    object.__setattr__(config, "speculative_config", _drafting(drafts) if drafts else None)
    no = ("uses_mrope", "is_encoder_decoder", "is_diffusion", "supports_multimodal_inputs", "return_sampling_mask")
    model = SimpleNamespace(
        **dict.fromkeys(no, False),
        max_model_len=MAX_LEN,
        runner_type="generate",
        multimodal_config=None,
        is_multimodal_model=False,
        architecture="none",
        architectures=["none"],
    )
    object.__setattr__(config, "model_config", model)
    groups = [KVCacheGroupSpec([f"g{i}"], spec) for i, spec in enumerate(specs(layout, drafts))]
    planned = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    block_size, hash_block_size = resolve_kv_cache_block_sizes(planned, config)
    scheduler = headway.vllm.Scheduler(
        vllm_config=config,
        kv_cache_config=planned,
        structured_output_manager=_NoStructuredOutput(),
        block_size=block_size,
        hash_block_size=hash_block_size,
        log_stats=True,
    )
    return scheduler, planned


class Run:
    """One random run.

    Attributes:
        worker: What checks it.
        hits: Tokens that were not computed at first admission, and after preemption.
        preemptions: How often.
        turns: More input for sessions.
    """

    def __init__(self, seed: int, layout: str, blocks: int, **given: Any) -> None:
        """All is random, by `seed`."""
        self.rng, self.drafts, self.ahead = random.Random(seed), given.get("drafts", 0), given.get("ahead", False)
        self.scheduler, planned = make(layout, blocks, options=self._options(), **given)
        self.worker = EmulatedWorker(
            worker_groups(planned, shards=given.get("dcp", 1), drafts=self.drafts > 0),
            sample=lambda rid, position: self.rng.randrange(9),
            accept=lambda drafted: self.rng.randrange(drafted + 1),
            slots_ahead=self.drafts,
            max_model_len=MAX_LEN,
        )
        self.said = [[self.rng.randrange(1000) for _ in range(self.rng.randrange(20, 200))] for _ in range(4)]
        self.live: dict[str, Request] = {}
        self.hits = self.preemptions = self.turns = 0

    def _options(self) -> dict[str, Any]:
        """What an operator may choose."""
        rng, placement = self.rng, [*DEFAULT_PLACEMENT]
        if rng.random() < 0.4:
            placement = rng.sample(placement, rng.randrange(1, len(placement) + 1))
            placement += [] if self.drafts else [f"interval:{rng.randrange(5, 60)}"]
        chosen = {"placement": placement, "alignment": rng.choice([1, 1, 4, 8])}
        return chosen | {"eviction": rng.choice(EVICTIONS), "explain": rng.choice(["own", "all", "off"])}

    def serve(self, requests: int) -> None:
        """Serve random requests that share, stop, are aborted and come back."""
        rng, scheduler, pending = self.rng, self.scheduler, []
        while requests or self.live or pending:
            while requests and len(self.live) < rng.randrange(1, 9):
                requests -= 1
                self._add(f"r{requests}")
            if self.live and rng.random() < 0.03:
                self._end(rng.choice(list(self.live)), abort=True)
            if rng.random() < 0.01:
                scheduler.reset_prefix_cache(reset_running_requests=rng.random() < 0.5)
            out = scheduler.schedule()
            self.hits += sum(new.num_computed_tokens for new in out.scheduled_new_reqs)
            self.preemptions += len(out.preempted_req_ids or ())
            pending.append((out, self.worker.run(out)))
            while len(pending) > self.ahead or (pending and not out.num_scheduled_tokens):
                self._update(*pending.pop(0))
        self.worker.run(scheduler.schedule())  # the last exports are copied
        cache = scheduler.kv_cache_manager.cache
        cache.check()
        assert cache.leases == cache.stats().leased == 0

    def _add(self, name: str) -> None:
        rng, base = self.rng, self.rng.choice(self.said[-20:])
        shared = len(base) if rng.random() < 0.4 else rng.randrange(1, len(base) + 1)
        tokens = (base[:shared] + [rng.randrange(1000) for _ in range(rng.randrange(30))])[:400]
        stops = [5] if rng.random() < 0.5 else []
        self.live[name] = request = self._request(name, tokens, stops, resumable=rng.random() < 0.1)
        self.scheduler.add_request(request)
        if request.resumable and rng.random() < 0.5:  # more input before the first answer
            self._go_on(name, more=True)

    def _go_on(self, name: str, *, more: bool) -> None:
        """More input for a session, or none."""
        tokens = [self.rng.randrange(1000) for _ in range(self.rng.randrange(1, 40))]
        self.scheduler.add_request(self._request(name, tokens, [], resumable=more))
        self.turns += more

    def _request(self, name: str, tokens: list[int], stops: list[int], *, resumable: bool) -> Request:
        rng, wishes = self.rng, {}
        if rng.random() < 0.3:
            wishes = {"headway_explain": True, "headway_pin": rng.randrange(len(tokens) + 1)}
            wishes |= {"headway_breakpoints": [rng.randrange(1, len(tokens) + 1)], "headway_pin_seconds": 0.05}
        given = SamplingParams(
            max_tokens=rng.randrange(1, 25), temperature=0.0, stop_token_ids=stops, extra_args=wishes or None
        )
        adapter = rng.choice([None, None, None, "a", "b"])
        lora = LoRARequest(adapter, ord(adapter), f"/{adapter}") if adapter else None
        salt, priority = rng.choice([None, None, "s"]), rng.randrange(3)
        return Request(
            name, tokens, given, None, lora_request=lora, priority=priority, cache_salt=salt, resumable=resumable
        )

    def _end(self, name: str, *, abort: bool = False) -> None:
        request = self.live.get(name)
        if request is not None and request.resumable and not abort and name in self.scheduler.requests:
            self._go_on(name, more=self.rng.random() < 0.6 and request.num_tokens < 350)
            if name in self.scheduler.requests:
                return
        if self.live.pop(name, None) is not None:
            self.said.append(list(request._all_token_ids))
            if abort:
                self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def _update(self, out: Any, result: Any) -> None:
        told = ModelRunnerOutput(result.req_ids, result.req_id_to_index, sampled_token_ids=result.sampled_token_ids)
        outputs = self.scheduler.update_from_output(out, told)
        if self.drafts and not self.ahead:
            names = [name for name in result.req_ids if name in self.scheduler.requests]
            drafted = [[self.rng.randrange(9) for _ in range(self.drafts)] for _ in names]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafted))
        for one in [one for some in outputs.values() for one in some.outputs if one.finish_reason is not None]:
            self._end(one.request_id)


def main() -> None:
    """Every layout in much and little memory, with and without drafts and delay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--layout", choices=LAYOUTS, action="append")
    parser.add_argument("--blocks", type=int, nargs="+", default=[300, 90])
    asked = parser.parse_args()
    ways = [{"drafts": d, "ahead": a} for d in (0, 2) for a in (False, True)]
    ways += [{"policy": "priority"}, {"policy": "priority", "ahead": True}]
    print(
        "layout    way                                blocks  forwards    reads  copies  preemptions  hit tokens  turns"
    )
    for layout in asked.layout or LAYOUTS:
        for way in [*ways, *([{"dcp": 2}] if layout in ("full", "hybrid") else [])]:
            for blocks in asked.blocks:
                runs = []
                for seed in range(asked.seeds):
                    run = Run(first := time.time_ns() % 10**9 + seed, layout, blocks, **way)
                    try:
                        run.serve(asked.requests)
                    except BaseException:
                        print(f"seed {first}, {layout}, {blocks} blocks, {way}", flush=True)
                        raise
                    runs.append(run)
                sums = [sum(getattr(run.worker, name) for run in runs) for name in ("checked", "reads", "copied")]
                sums += [
                    sum(run.preemptions for run in runs),
                    sum(run.hits for run in runs),
                    sum(run.turns for run in runs),
                ]
                text = " ".join(f"{name}={value}" for name, value in way.items())
                print(f"{layout:9} {text:34} {blocks:6}", *(f"{n:9}" for n in sums), flush=True)


if __name__ == "__main__":
    main()
