"""Stand-ins for what the manager sees of vLLM: specs by their names, requests, and a scheduler that calls it in order.

The scheduler is a reduced one of the same shape: running requests first, preemption from the end, admission from the
head, steps planned one ahead with asynchronous scheduling, drafts with placeholders. What vLLM's own does is tested
where vLLM is installed (`tests.vllm.real`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tests.vllm.worker import Output, WorkerGroup

from headway.vllm.manager import Blocks, KVCacheManager


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec:
    """vLLM's, as far as it is read."""

    block_size: int
    page_size_bytes: int = 4096
    dcp_sharded: bool = True
    non_causal: bool = False
    tokens_per_state: int = 1


class MLAAttentionSpec(FullAttentionSpec):
    """Likewise."""


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(FullAttentionSpec):
    """Likewise."""

    sliding_window: int
    extra_retained_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class ChunkedLocalAttentionSpec(FullAttentionSpec):
    """Likewise."""

    attention_chunk_size: int


@dataclass(frozen=True, kw_only=True)
class MambaSpec:
    """Likewise."""

    block_size: int = 1 << 20
    page_size_bytes: int = 4096
    mamba_cache_mode: str = "none"
    num_speculative_blocks: int = 0


def planned(*specs: Any, blocks: int = 100, layers: int = 2) -> SimpleNamespace:
    """A `KVCacheConfig` with a group for each of `specs`."""
    groups = [
        SimpleNamespace(kv_cache_spec=spec, layer_names=[f"g{i}.{k}" for k in range(layers)])
        for i, spec in enumerate(specs)
    ]
    return SimpleNamespace(num_blocks=blocks, kv_cache_groups=groups)


def worker_groups(config: Any, *, shards: int = 1, drafts: bool = False) -> list[WorkerGroup]:
    """How a worker uses the groups of a configuration; drafts have the last group that is not of states."""
    groups = []
    for one in config.kv_cache_groups:
        spec, name = one.kv_cache_spec, type(one.kv_cache_spec).__name__
        if name == "MambaSpec":
            groups.append(WorkerGroup("state", columns=1 + spec.num_speculative_blocks))
        elif name.startswith("SlidingWindow"):
            groups.append(WorkerGroup("window", spec.block_size, spec.sliding_window))
        elif name == "ChunkedLocalAttentionSpec":
            groups.append(WorkerGroup("chunk", spec.block_size, spec.attention_chunk_size))
        else:
            groups.append(WorkerGroup("full", spec.block_size * shards))
    if drafts:
        last = max(i for i, group in enumerate(groups) if group.kind == "full")
        groups[last] = WorkerGroup("full", groups[last].span, draft=True)
    return groups


@dataclass(eq=False)
class Request:
    """vLLM's, as far as manager and scheduler read it."""

    request_id: str
    _all_token_ids: list[int]
    max_tokens: int = 8
    cache_salt: str | None = None
    stop: int = -1
    sampling_params: Any = None
    mm_features: list[Any] = field(default_factory=list)
    lora_request: Any = None
    prompt_embeds: Any = None
    skip_reading_prefix_cache: bool = False
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    status: Any = field(default_factory=lambda: SimpleNamespace(name="WAITING"))
    placeholders: int = 0
    drafts: list[int] = field(default_factory=list)
    in_flight: int = 0
    stale: int = 0

    def __post_init__(self) -> None:
        """The prompt is what there is now."""
        self.num_prompt_tokens = len(self._all_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens known."""
        return len(self._all_token_ids)

    def is_finished(self) -> bool:
        """Whether its status says so."""
        return bool(self.status.name.startswith("FINISHED"))


class StandInScheduler:
    """Calls the manager as vLLM's scheduler does."""

    def __init__(
        self, manager: KVCacheManager, *, batched: int = 64, running: int = 6, drafts: int = 0, ahead: bool = False
    ) -> None:
        """At most `batched` tokens per step of `running` requests; `ahead` for asynchronous scheduling."""
        self.manager, self.batched, self.most, self.num_drafts, self.ahead = manager, batched, running, drafts, ahead
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.finished: set[str] = set()
        self.preemptions = 0

    def add_request(self, request: Request) -> None:
        """A request arrives."""
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def finish(self, request: Request, status: str = "FINISHED_ABORTED") -> None:
        """A request ends."""
        request.status = SimpleNamespace(name=status)
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        self.manager.free(request)
        self.finished.add(request.request_id)
        del self.requests[request.request_id]

    def preempt(self, request: Request) -> None:
        """A running request gives its memory back."""
        self.manager.free(request)
        request.num_computed_tokens = request.placeholders = 0
        request.num_preemptions += 1
        request.stale, request.drafts = request.in_flight, []
        self.waiting.appendleft(request)
        self.preemptions += 1

    def schedule(self) -> Any:
        """Plan a step."""
        self.manager.new_step_starts()
        out = SimpleNamespace(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set(), all_token_ids={}
            ),
            num_scheduled_tokens={},
            scheduled_spec_decode_tokens={},
            finished_req_ids=self.finished,
        )
        self.finished = set()
        budget, short = self._schedule_running(out)
        if not short:
            self._admit(out, budget)
        out.kv_cache_block_copies, _ = self.manager.take_kv_cache_block_copies()
        out.new_block_ids_to_zero = self.manager.take_new_block_ids()
        self.manager.close_step(out)
        for rid, count in out.num_scheduled_tokens.items():
            self._advance(self.requests[rid], count, len(out.scheduled_spec_decode_tokens.get(rid, ())))
        return out

    def _schedule_running(self, out: Any) -> tuple[int, bool]:
        """Slots for running requests. Returns the tokens left, and whether memory was short."""
        budget, before = self.batched, self.preemptions
        index = 0
        while index < len(self.running) and budget:
            request, index = self.running[index], index + 1
            sure = request.num_tokens + request.placeholders - request.num_computed_tokens
            ended = request.placeholders and request.num_computed_tokens + 2 - request.placeholders >= (
                request.num_prompt_tokens + request.max_tokens
            )
            count = min(self.manager.cut(request, sure + len(request.drafts)), budget)
            if count <= 0 or ended:
                continue
            blocks = self.manager.allocate_slots(request, count)
            while blocks is None:
                victim = self.running.pop()
                self.preempt(victim)
                if victim is request:
                    return budget, True
                blocks = self.manager.allocate_slots(request, count)
            if count > sure:
                out.scheduled_spec_decode_tokens[request.request_id] = request.drafts[: count - sure]
            request.drafts = []
            cached = out.scheduled_cached_reqs
            cached.req_ids.append(request.request_id)
            cached.new_block_ids.append(blocks.get_block_ids(allow_none=True))
            cached.num_computed_tokens.append(request.num_computed_tokens)
            out.num_scheduled_tokens[request.request_id] = count
            budget -= count
        return budget, self.preemptions > before

    def _admit(self, out: Any, budget: int) -> None:
        """Slots for waiting requests, from the head on."""
        while self.waiting and budget and len(self.running) < self.most and not self.waiting[0].stale:
            request = self.waiting[0]
            _, hit, _ = self.manager.get_computed_blocks(request)
            assert hit < request.num_tokens
            request.num_computed_tokens = hit
            count = self.manager.cut(request, min(request.num_tokens - hit, budget))
            granted = self.manager.allocate_slots(request, count, num_new_computed_tokens=hit)
            if granted is None:
                request.num_computed_tokens = 0
                break
            self.running.append(self.waiting.popleft())
            blocks: Blocks = self.manager.get_blocks(request.request_id)
            out.scheduled_new_reqs.append(
                SimpleNamespace(
                    req_id=request.request_id,
                    prompt_token_ids=list(request._all_token_ids),
                    num_computed_tokens=hit,
                    block_ids=blocks.get_block_ids(),
                )
            )
            out.num_scheduled_tokens[request.request_id] = count
            budget -= count

    def _advance(self, request: Request, count: int, drafts: int) -> None:
        """A step of a request is planned."""
        request.num_computed_tokens += count
        request.in_flight += count
        if self.ahead and request.num_computed_tokens >= request.num_tokens + request.placeholders:
            request.placeholders += 1 + drafts
            request.drafts = [-1] * self.num_drafts

    def update_from_output(self, out: Any, result: Output) -> list[Request]:
        """A step has been done. Returns the requests that it ended."""
        self.manager.commit(out, result.req_id_to_index, result.sampled_token_ids)
        done = []
        for rid, count in out.num_scheduled_tokens.items():
            request = self.requests.get(rid)
            if request is None:
                continue
            request.in_flight -= count
            stale, request.stale = request.stale > 0, max(0, request.stale - count)
            tokens = result.sampled_token_ids[result.req_id_to_index[rid]]
            drafts = len(out.scheduled_spec_decode_tokens.get(rid, ()))
            if drafts and not stale:
                request.num_computed_tokens -= drafts + 1 - len(tokens)
                request.placeholders -= self.ahead * (drafts + 1 - len(tokens))
            ended = self._append(request, tokens)
            if self.ahead and not stale:
                request.placeholders -= len(tokens)
            elif tokens and not stale:
                request.drafts = [-1] * self.num_drafts
            if ended:
                done.append(request)
                self.finish(request, ended)
        return done

    @staticmethod
    def _append(request: Request, tokens: list[int]) -> str:
        """Tokens of an answer. Returns the status with which it ends, if it does."""
        for token in tokens:
            request._all_token_ids.append(token)
            if token == request.stop:
                return "FINISHED_STOPPED"
            if request.num_tokens - request.num_prompt_tokens >= request.max_tokens:
                return "FINISHED_LENGTH_CAPPED"
        return ""
