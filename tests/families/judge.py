"""What Headway does with a family: its answers against those of the model's own `generate()`.

The engine is built as for a server, checks at load included, and driven without its thread: random batches, chunks and
sharing, preemption, failed steps, memory for two or three requests that starts full of NaN. What comes out is one word:

- `equal`: every answer is the one of `generate()`, in fp32, though prefixes were reused.
- `warned`: equal as well, and the server says at load that it reuses no prefixes, or less; and transformers' own
  continuation by several tokens is indeed not its own full forward.
- `refused`: not served, with a reason in a user's words.
- `not made`: transformers itself cannot make or run a tiny model of the class.
- `fault`: anything else. Ours to mend.
"""

from __future__ import annotations

import copy
import logging
import re
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import transformers
from tests.families.drive import drive, scarce_memory
from tests.families.scan import Case
from tests.families.tiny import WINDOW, tiny_config
from tests.runtime.tiny_models import answer_of, with_random_weights
from tests.server import tiny
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from headway.engine import EngineConfig, RequestResult
from headway.engine.build import BuiltEngine, engine_of
from headway.errors import ModelError
from headway.runtime.loading import LoadedModel
from headway.runtime.model.inspection import cache_argument, inspect_model

__all__ = ["OUTCOMES", "Judgement", "judge"]

OUTCOMES = ("equal", "warned", "refused", "not made", "fault")

_NOTHING_REUSED = "no prefix was reused"
_CHUNKS_DIFFER = 2e-3
"""Difference between transformers' chunks and its full forward, relative to the logits, that is no rounding."""
_UNCLEAR = re.compile(
    r"NoneType|\w+Error\b|has no attribute|is not (subscriptable|iterable|callable)|positional argument"
    r"|keyword argument|size mismatch|must match|shape '|out of (range|bounds)"
)
"""Words of a Python traceback: no reason for a user."""


@dataclass(frozen=True)
class Judgement:
    """What came out for one row.

    Attributes:
        outcome: One of `OUTCOMES`.
        reason: What the server says, or what is wrong; empty where answers are equal.
        hits: Prompt tokens that were reused.
        seconds: What it took, in processor time.
    """

    outcome: str
    reason: str = ""
    hits: int = 0
    seconds: float = 0.0


def judge(case: Case, seed: int) -> Judgement:
    """Judge one row, with weights and requests drawn from `seed`.

    In so little memory it happens that none of the few requests meets what another has left: then others are drawn.
    """
    started = time.process_time()
    with _quiet():
        found = _judge(case, seed)
        for more in (1, 2):
            if found.reason == _NOTHING_REUSED:
                found = _judge(case, seed + more)
    return Judgement(found.outcome, found.reason, found.hits, time.process_time() - started)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what transformers says of missing kernels, and what the engine says of steps that were made to fail."""
    before, level = transformers.logging.get_verbosity(), logging.root.manager.disable
    transformers.logging.set_verbosity(logging.CRITICAL)
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(before)
        logging.disable(level)


def _judge(case: Case, seed: int) -> Judgement:
    try:
        model = _model(case, seed)
        reference = copy.deepcopy(model)
        answer_of(reference, [3, 4, 5], 3)
    except Exception as error:
        return Judgement("not made", _first_line(error))
    try:
        config = EngineConfig(
            max_batched_tokens=48, max_running=4, max_retries=9, memory=scarce_memory(model), check=True
        )
        built = engine_of(LoadedModel(case.name, model, tiny.tokenizer(), inspect_model(model)), config)
    except ModelError as error:
        clear = not _UNCLEAR.search(str(error))
        return Judgement("refused" if clear else "fault", str(error) if clear else f"unclear reason: {error}")
    except Exception as error:
        return Judgement("fault", f"loading raises {_first_line(error)}")
    try:
        served = drive(built, seed)
    except Exception as error:
        return Judgement("fault", f"serving raises {_first_line(error)}")
    hits = sum(each.cached_tokens for each in served)
    return _verdict(built, reference, _first_wrong(served, reference), hits, seed)


def _first_wrong(served: list[RequestResult], reference: PreTrainedModel) -> str:
    """What is wrong with the first answer that is not the one of `generate()`; empty if all are right."""
    for each in served:
        prompt = each.request.tokens.tolist()
        answer, _ = answer_of(reference, prompt, each.request.max_tokens)
        if list(each.tokens) != answer:
            pairs = zip(each.tokens, answer, strict=False)
            at = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), len(answer))
            return f"token {at} of an answer to {len(prompt)} tokens differs, {each.cached_tokens} cached"
    return ""


def _verdict(built: BuiltEngine, reference: PreTrainedModel, wrong: str, hits: int, seed: int) -> Judgement:
    warning = built.check.warning
    if wrong:
        return Judgement("fault", wrong + (f" (warned: {warning})" if warning else ""), hits)
    if warning is None:
        return Judgement("equal", "", hits) if hits else Judgement("fault", _NOTHING_REUSED)
    if _chunks_agree(reference, seed):
        return Judgement("fault", f"warned, and transformers' own chunks are right: {warning}", hits)
    return Judgement("warned", warning, hits)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:300]}" if lines else type(error).__name__


def _model(case: Case, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = tiny_config(case.family.config, case.convolution, case.rope)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    return with_random_weights(model, seed)


@torch.no_grad()
def _chunks_agree(model: PreTrainedModel, seed: int) -> bool:
    """Whether transformers alone, in pieces with its own cache, computes what it computes in one go."""
    length, cuts = 60, (0, WINDOW - 4, 31, 47, 60)
    tokens = torch.from_numpy(np.random.default_rng(seed).integers(3, 200, (1, length)))
    whole = model(input_ids=tokens, use_cache=False)["logits"][0]
    cache, parts = DynamicCache(config=model.config), []
    try:
        for start, stop in pairwise(cuts):
            positions = torch.arange(start, stop)[None]
            piece = {"input_ids": tokens[:, start:stop], "position_ids": positions, cache_argument(model): cache}
            parts.append(model(**piece, use_cache=True)["logits"][0])
    except Exception:
        return False
    difference = (torch.cat(parts) - whole).square().mean().sqrt() / whole.std().clamp_min(1e-9)
    return bool(difference < _CHUNKS_DIFFER)
