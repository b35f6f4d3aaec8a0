"""What stands in for vLLM around the manager, where no vLLM is: its specs by name, its requests, and its call order."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from headway.cache import ParallelLayout
from headway.vllm.groups import read_groups
from headway.vllm.manager import KVCacheManager
from headway.vllm.options import Options

BLOCK = 16


@dataclass
class FullAttentionSpec:
    block_size: int = BLOCK
    page_size_bytes: int = 4096
    dcp_sharded: bool = True
    tokens_per_state: int = 1
    prefix_cacheable: bool = True
    prefix_replay_tokens: int = 0


@dataclass
class MLAAttentionSpec(FullAttentionSpec):
    pass


@dataclass
class SlidingWindowSpec(FullAttentionSpec):
    sliding_window: int = 2 * BLOCK
    dcp_sharded: bool = False


@dataclass
class ChunkedLocalAttentionSpec(FullAttentionSpec):
    attention_chunk_size: int = 2 * BLOCK
    dcp_sharded: bool = False


@dataclass
class MambaSpec:
    block_size: int = 1 << 20
    page_size_bytes: int = 4096
    mamba_cache_mode: str = "none"
    num_speculative_blocks: int = 0
    dcp_sharded: bool = False


SPECS = {
    "full": FullAttentionSpec,
    "window": SlidingWindowSpec,
    "wide window": lambda: SlidingWindowSpec(sliding_window=4 * BLOCK),
    "chunk": ChunkedLocalAttentionSpec,
    "state": MambaSpec,
}


def config(*specs: Any, blocks: int = 1000) -> SimpleNamespace:
    """A `KVCacheConfig` with a group per spec, or per name of one."""
    made = [SPECS[spec]() if isinstance(spec, str) else spec for spec in specs]
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=[f"layer{i}"]) for i, spec in enumerate(made)]
    return SimpleNamespace(kv_cache_groups=groups, num_blocks=blocks)


@dataclass
class Request:
    """vLLM's `Request`, as far as the manager reads it."""

    request_id: str
    _all_token_ids: list[int]
    lora_request: Any = None
    cache_salt: str | None = None
    mm_features: list[Any] = field(default_factory=list)
    skip_reading_prefix_cache: bool = False
    num_preemptions: int = 0
    sampling_params: Any = None
    prompt_embeds: Any = None
    num_computed_tokens: int = 0
    status: Any = field(default_factory=lambda: SimpleNamespace(name="RUNNING"))

    @property
    def all_token_ids(self) -> list[int]:
        return self._all_token_ids

    @property
    def num_tokens(self) -> int:
        return len(self._all_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._all_token_ids)

    def is_finished(self) -> bool:
        return str(self.status.name).startswith("FINISHED")


class StandIn:
    """vLLM's scheduler for one request after another: each step admits it or goes on with it, and commits.

    Attributes:
        manager: The manager under test.
    """

    def __init__(self, *specs: Any, blocks: int = 1000, dcp: int = 1, lookahead: int = 0, **options: Any) -> None:
        layout = ParallelLayout(tp=dcp, dcp=dcp)
        groups = read_groups(config(*specs, blocks=blocks), layout, lookahead)
        self.manager = KVCacheManager(groups, Options(**{"check": True, **options}), max_model_len=1 << 20)
        self.made = 0

    def request(self, tokens: list[int], **fields: Any) -> Request:
        self.made += 1
        return Request(f"r{self.made}", list(tokens), **fields)

    def admit(self, request: Request) -> int | None:
        """Let a request in and compute its prompt. Returns the hit, or None if there is no room."""
        hit: int = self.manager.get_computed_blocks(request)[1]
        return hit if self.compute(request, request.num_tokens - hit) else None

    def compute(self, request: Request, count: int, *sampled: int) -> bool:
        """Compute the next tokens, in as many steps as the manager wants, and sample in the last."""
        while count:
            now = self.manager.cut(request, count)
            if self.manager.allocate_slots(request, now) is None:
                return False
            count -= now
            self.finish_step([request], {request.request_id: list(sampled)} if not count else {})
        request.all_token_ids.extend(sampled)
        return True

    def finish_step(self, requests: list[Request], sampled: dict[str, list[int]] | None = None) -> None:
        """The worker has done what was planned for `requests`, and has sampled something for some of them."""
        self.manager.take_kv_cache_block_copies()
        output = SimpleNamespace(scheduled_spec_decode_tokens={})
        self.manager.close_step(output)
        index = {request.request_id: i for i, request in enumerate(requests)}
        self.manager.commit(output, index, [(sampled or {}).get(request.request_id, []) for request in requests])
        self.manager.new_step_starts()

    def end(self, request: Request, status: str = "FINISHED_STOPPED") -> None:
        request.status = SimpleNamespace(name=status)
        self.manager.free(request)

    def run(self, tokens: list[int], *answer: int, **fields: Any) -> int:
        """One whole request with its answer. Returns the hit."""
        request = self.request(tokens, **fields)
        hit = self.admit_with(request, answer)
        assert hit is not None
        self.end(request)
        return hit

    def admit_with(self, request: Request, answer: tuple[int, ...]) -> int | None:
        hit: int = self.manager.get_computed_blocks(request)[1]
        if not self.compute(request, request.num_tokens - hit, *answer[:1]):
            return None
        for token in answer[1:]:
            self.compute(request, 1, token)
        return hit

    def blocks(self, request: Request) -> list[int]:
        """All pages of a request, but vLLM's null page."""
        return [
            block
            for group in self.manager.get_blocks(request.request_id).get_block_ids() or ()
            for block in group
            if block
        ]
