"""The conversations answered by a tiny random Kimi-K3: by one process without a cache, and by several ranks with one.

What the answers are, `generate()` of transformers says, which computes each prompt from its first token on. Then
processes, one per rank, serve the same prompts with everything that the incident had: states by heads, latents split by
tokens, a DSpark drafter whose latents are split likewise, and prefix hits. A token that differs is a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from headway.cache import LayerSpec
from headway.engine import Engine, EngineConfig, GenerationRequest, ParallelConfig, RequestResult
from headway.engine.build import BuiltEngine, build_engine
from headway.incident.sessions import ANSWER, Ints, Request, conversations, turns
from headway.models.kimi_k3.tiny import tiny_config, write_tiny, write_tiny_draft
from headway.runtime.loading import load_model
from headway.runtime.sources import resolve_source

__all__ = ["RANKS", "Served", "answered_by_one", "served_by_ranks", "write_model"]

RANKS = (4, 8)
_MEMORY = 64 << 20
_GROUP = 32
"""Values that share a scale in packed experts: a rank's part of an expert is a multiple of it."""
_PATIENCE = 600.0

Say = Callable[[str], None]
"""Called with a few words before each stage of loading."""
Tell = Callable[[int], None]
"""Called with the number of requests that are answered."""


@dataclass(frozen=True)
class Served:
    """What the ranks did.

    Attributes:
        groups: Cache groups of model and drafter on one rank, before context parallelism.
        answers: Tokens of each answer.
        hits: Tokens that each request reused.
        drafted: Tokens that the drafter proposed.
        accepted: Of these, tokens that became part of an answer.
    """

    groups: tuple[LayerSpec, ...]
    answers: list[Ints]
    hits: list[int]
    drafted: int
    accepted: int


def write_model(folder: Path, ranks: int) -> None:
    """Write a tiny Kimi-K3 that so many ranks can share, and its drafter in `folder/draft`.

    Raises:
        ModelError: The built-in model, whose tokenizer it gets, is not installed.
    """
    config = tiny_config()
    text = config["text_config"]
    text["linear_attn_config"]["num_heads"] = max(4, ranks)
    text["moe_intermediate_size"] = _GROUP * max(4, ranks)
    write_tiny(folder, Path(resolve_source(None)[1]), config=config)
    write_tiny_draft(folder / "draft")


def answered_by_one(folder: Path, tell: Tell) -> list[Request]:
    """Answer all conversations by `generate()` of transformers, in this process: no cache of ours, and no drafts."""
    model = load_model(str(folder)).model
    assert model.generation_config is not None
    model.generation_config.eos_token_id = None  # every answer has its full length

    def answer(tokens: Ints) -> Ints:
        prompt = torch.tensor([tokens.tolist()])
        asked = {"max_new_tokens": ANSWER, "do_sample": False, "pad_token_id": 0}
        made = model.generate(prompt, attention_mask=torch.ones_like(prompt), **asked)  # type: ignore[operator]
        return np.array(made[0, len(tokens) :].tolist(), dtype=np.int32)

    found, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)  # of so small a model threads only wait for each other
    try:
        for one in conversations(turns(), answer):
            found.append(one)
            tell(len(found))
    finally:
        torch.set_num_threads(threads)
    return found


def served_by_ranks(folder: Path, ranks: int, requests: Sequence[Request], say: Say, tell: Tell) -> Served:
    """Serve the same prompts on `ranks` ranks with a cache and the drafter, each after the one before has ended.

    Raises:
        RanksLostError: A rank died.
    """
    config = EngineConfig(memory=_MEMORY, draft=str(folder / "draft"), parallel=ParallelConfig(tp=ranks, dcp=ranks))
    results: list[RequestResult] = []
    with _running(folder, config, say) as built:
        groups = tuple(built.engine.cache.config.groups)
        for one in requests:
            results.append(_ask(built.engine, one.tokens, one.boundaries))
            tell(len(results))
    drafted, accepted = (sum(getattr(one, name) for one in results) for name in ("drafted", "accepted"))
    return Served(groups, [_ids(one) for one in results], [one.cached_tokens for one in results], drafted, accepted)


def _ids(result: RequestResult) -> Ints:
    return np.array(result.tokens, dtype=np.int32)


def _ask(engine: Engine, tokens: Ints, boundaries: tuple[int, ...]) -> RequestResult:
    request = GenerationRequest(tokens, ANSWER, ignore_eos=True, boundaries=boundaries)
    return engine.submit(request).result(_PATIENCE)


@contextmanager
def _running(folder: Path, config: EngineConfig, say: Say) -> Iterator[BuiltEngine]:
    built = build_engine(str(folder), config, say)
    built.engine.start()
    try:
        yield built
    finally:
        built.engine.close()
