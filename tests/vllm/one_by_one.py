"""vLLM's scheduler for one request after another: the manager in situations that a test can spell out."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from tests.vllm.standin import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    Request,
    SlidingWindowSpec,
    planned,
)

from headway.cache import ParallelLayout
from headway.vllm.groups import read_groups
from headway.vllm.manager import KVCacheManager
from headway.vllm.options import Options

BLOCK = 16
SPECS = {
    "full": FullAttentionSpec(block_size=BLOCK),
    "window": SlidingWindowSpec(block_size=BLOCK, sliding_window=2 * BLOCK),
    "wide window": SlidingWindowSpec(block_size=BLOCK, sliding_window=4 * BLOCK),
    "chunk": ChunkedLocalAttentionSpec(block_size=BLOCK, attention_chunk_size=2 * BLOCK),
    "state": MambaSpec(),
}


class OneByOne:
    """vLLM's scheduler for one request after another: it admits them, computes what is asked for, and ends them."""

    def __init__(self, *specs: Any, blocks: int = 1000, dcp: int = 1, lookahead: int = 0, **options: Any) -> None:
        config = planned(*[SPECS[spec] if isinstance(spec, str) else spec for spec in specs], blocks=blocks)
        groups = read_groups(config, ParallelLayout(tp=dcp, dcp=dcp), lookahead)
        self.manager = KVCacheManager(groups, Options(check=True, **options), max_model_len=1 << 20)
        self.made = 0

    def request(self, tokens: list[int], **fields: Any) -> Request:
        self.made += 1
        return Request(f"r{self.made}", list(tokens), **fields)

    def admit(self, request: Request, *answer: int) -> int | None:
        """Let a request in, compute its prompt and sample its answer. Returns the hit, or None if there is no room."""
        hit: int = self.manager.get_computed_blocks(request)[1]
        request.num_computed_tokens = hit
        done = self.compute(request, request.num_tokens - hit, *answer[:1])
        return hit if done and all(self.compute(request, 1, token) for token in answer[1:]) else None

    def compute(self, request: Request, count: int, *sampled: int) -> bool:
        """Compute the next tokens, in as many steps as the manager wants, and sample in the last."""
        while count:
            now = self.manager.cut(request, count)
            if self.manager.allocate_slots(request, now) is None:
                return False
            request.num_computed_tokens += now
            count -= now
            self.finish_step([request], [] if count else list(sampled))
        request._all_token_ids.extend(sampled)
        return True

    def finish_step(self, requests: list[Request], sampled: Sequence[int] = (), drafts: int = 0) -> None:
        """The worker has done what was planned for `requests`, and has sampled `sampled` for each of them."""
        self.manager.take_kv_cache_block_copies()
        given = {request.request_id: [0] * drafts for request in requests} if drafts else {}
        output = SimpleNamespace(scheduled_spec_decode_tokens=given)
        self.manager.close_step(output)
        index = {request.request_id: i for i, request in enumerate(requests)}
        self.manager.commit(output, index, [list(sampled)] * len(requests))
        self.manager.new_step_starts()

    def end(self, request: Request, status: str = "FINISHED_STOPPED") -> None:
        request.status = SimpleNamespace(name=status)
        self.manager.free(request)

    def run(self, tokens: list[int], *answer: int, **fields: Any) -> int:
        """One whole request with its answer. Returns the hit."""
        request = self.request(tokens, **fields)
        hit = self.admit(request, *answer)
        assert hit is not None
        self.end(request)
        return hit

    def blocks(self, request: Request) -> list[int]:
        """All pages of a request, but vLLM's null page."""
        groups = self.manager.get_blocks(request.request_id).get_block_ids() or ()
        return [block for group in groups for block in group if block]
