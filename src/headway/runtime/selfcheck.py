"""Does the model, run in pieces over our memory, say what it says in one go?

At load a short random text is computed once by transformers alone, without any cache, and then in the ways that serving
uses: in one go, in chunks, one token at a time, and resumed from a checkpoint after other sequences ran in between.
Some classes of transformers contradict themselves here: their continuation by several tokens ignores the state, or they
keep a state outside the cache. Better to know at load than to serve wrong tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from headway.cache import CacheGeometry, TableKind
from headway.errors import ModelError
from headway.runtime.forward.batch import RunBatch, StateMove
from headway.runtime.forward.runner import ModelRunner
from headway.runtime.model.layout import ModelLayout

__all__ = ["SelfCheck", "Verdict", "self_check"]

_BASE_TOKENS = 96
"""Length of the probe text where nothing asks for a longer one: six blocks."""
_FLOPS_LIMIT = 4e12
"""Operations that one pass over the probe text may take; large models are probed with shorter texts."""
_STEPS = 4
"""Single tokens with which a continuation is tried."""
_PIECES = 5
"""Pieces in which the probe text is tried: odd, so that cuts fall inside blocks; few, so that they are longer than what
`short_chunks` computes in another form."""
_NEAR = 2
"""Positions after each cut that are compared: a lost state spoils these most; further on, models forget it."""
_TOLERANCE = {torch.float32: 2e-3, torch.float64: 1e-6}
"""Largest difference that is rounding, relative to the size of the logits."""
_COARSE_TOLERANCE = 0.1
"""For bf16 and fp16: rounding moves logits by a few per cent, a contradiction by about their own size."""

Int32s = NDArray[np.int32]


class Verdict(Enum):
    """What the check found."""

    SOUND = "sound"
    """Chunks, single steps and resumed checkpoints agree with the one-shot forward."""
    STEPS_ONLY = "steps-only"
    """Only single steps continue correctly: prompts run in one piece, and reuse of prefixes is off."""


@dataclass(frozen=True)
class SelfCheck:
    """Result of a self-check.

    Attributes:
        verdict: What follows for serving.
        tokens: Length of the probe text.
        whole: Difference of a one-piece prefill from the one-shot forward: root mean square of the differences relative
            to that of the logits, at the median position (in low precision an expert that flips spoils single
            positions). All differences below are measured so.
        chunks: Difference just after each cut of a text computed in pieces; infinite if that raised.
        steps: Difference of a continuation by single tokens, from a checkpoint, after other sequences ran.
        max_difference: Largest absolute difference of any logit in the parts that the verdict relies on.
        detail: What went wrong, in one sentence; empty if nothing did.
    """

    verdict: Verdict
    tokens: int
    whole: float
    chunks: float
    steps: float
    max_difference: float
    detail: str = ""

    @property
    def reuse(self) -> bool:
        """Whether prefixes may be reused."""
        return self.verdict is Verdict.SOUND

    @property
    def single_steps(self) -> bool:
        """What to pass to `ModelRunner` as `single_steps`."""
        return self.verdict is Verdict.STEPS_ONLY

    @property
    def warning(self) -> str | None:
        """What to tell the operator, or None."""
        if self.reuse:
            return None
        return (
            f"prefix reuse is off: {self.detail}. transformers' implementation of this model does not continue from a "
            f"cached state by several tokens at once; what continues is computed token by token, right but slow"
        )


def self_check(model: PreTrainedModel, layout: ModelLayout, seed: int = 0) -> SelfCheck:
    """Check a model at load. Takes memory for four short sequences, and gives it back.

    Raises:
        ModelError: Even a prefill in one piece, or a continuation by single tokens, is not what transformers computes.
    """
    probe = _Probe(model, layout, seed)
    whole = probe.whole()
    chunks, failure = probe.chunks()
    steps = probe.steps()
    limit = _TOLERANCE.get(layout.dtype, _COARSE_TOLERANCE)
    for part, what in ((whole, "a prefill"), (steps, "a continuation by single tokens")):
        if not part.relative <= limit:
            raise ModelError(
                f"{layout.model} cannot be served: {what} over Headway's memory differs from transformers' own forward "
                f"by {part.relative:.2g} of the size of the logits (at most {limit:.2g} is rounding); it may keep a "
                f"state outside its cache or attend in a way that is not supported"
            )
    sound = chunks.relative <= limit
    detail = failure or (
        "" if sound else f"a continuation by several tokens is off by {chunks.relative:.2g} of the logits"
    )
    relied = (whole, chunks, steps) if sound else (whole, steps)
    return SelfCheck(
        verdict=Verdict.SOUND if sound else Verdict.STEPS_ONLY,
        tokens=probe.tokens,
        whole=whole.relative,
        chunks=chunks.relative,
        steps=steps.relative,
        max_difference=max(part.largest for part in relied),
        detail=detail,
    )


@dataclass(frozen=True)
class _Difference:
    relative: float
    largest: float


_UNKNOWN = _Difference(float("inf"), float("inf"))


class _Probe:
    """Four sequences in a small arena of their own: whole, chunked, resumed, and another text in between."""

    def __init__(self, model: PreTrainedModel, layout: ModelLayout, seed: int) -> None:
        self.tokens = _probe_length(layout)
        rng = np.random.default_rng(seed)
        self._text, self._other = rng.integers(1, layout.vocab_size, (2, self.tokens), dtype=np.int32)
        self._geometry = CacheGeometry(layout.groups, block_tokens=16)
        self._each = sum(table.blocks_for(self.tokens) for table in self._geometry.tables)
        self._runner = ModelRunner(model, layout, self._geometry, blocks=4 * self._each)
        self._runner.arena.data.fill_(0xFF)
        self._cuts = [i * self.tokens // _PIECES for i in range(1, _PIECES)]
        self._reference = _one_shot(model, self._text)

    def whole(self) -> _Difference:
        """Sequence 0: the text in one piece."""
        return self._compare(self._run(0, self._text, 0, self.tokens), list(range(self.tokens)))

    def chunks(self) -> tuple[_Difference, str]:
        """Sequence 1: the text in pieces, each continuing from the memory of the one before."""
        self._run(1, self._text, 0, self._cuts[0])
        parts = []
        try:
            for start, stop in pairwise([*self._cuts, self.tokens]):
                parts.append(self._run(1, self._text, start, stop)[:_NEAR])
        except Exception as error:
            return _UNKNOWN, f"a continuation by several tokens raises {type(error).__name__}: {error}"
        return self._compare(torch.cat(parts), [cut + i for cut in self._cuts for i in range(_NEAR)]), ""

    def steps(self) -> _Difference:
        """Sequence 2 takes a checkpoint of sequence 1, another text runs, then sequence 2 goes on step by step."""
        cut = self._cuts[_PIECES // 2]
        self._run(1, self._text, 0, cut, exports=self._checkpoint(1, 2))
        self._run(3, self._other, 0, self.tokens)
        copies = self._token_copies(1, 2)
        parts = []
        positions = list(range(cut, min(cut + _STEPS, self.tokens)))
        for position in positions:
            parts.append(self._run(2, self._text, position, position + 1, copies=copies))
            copies = np.empty((0, 2), dtype=np.int32)
        return self._compare(torch.cat(parts), positions)

    def _tables(self, sequence: int) -> list[Int32s]:
        """Block-table rows of a sequence: its share of the arena, table after table."""
        rows, first = [], sequence * self._each
        for table in self._geometry.tables:
            count = table.blocks_for(self.tokens)
            rows.append(np.arange(first, first + count, dtype=np.int32))
            first += count
        return rows

    def _checkpoint(self, source: int, destination: int) -> list[StateMove]:
        return [
            StateMove(a, b)
            for table, a, b in zip(self._geometry.tables, self._tables(source), self._tables(destination), strict=True)
            if table.kind is TableKind.STATE
        ]

    def _token_copies(self, source: int, destination: int) -> Int32s:
        pairs = [
            np.stack([a, b], axis=1)
            for table, a, b in zip(self._geometry.tables, self._tables(source), self._tables(destination), strict=True)
            if table.kind is not TableKind.STATE
        ]
        return np.concatenate(pairs) if pairs else np.empty((0, 2), dtype=np.int32)

    def _run(
        self,
        sequence: int,
        text: Int32s,
        start: int,
        stop: int,
        copies: Int32s | None = None,
        exports: list[StateMove] | None = None,
    ) -> torch.Tensor:
        """Logits of positions [start, stop), float32 [stop - start, vocab]."""
        batch = RunBatch(
            tokens=text[start:stop],
            starts=np.array([start], dtype=np.int64),
            counts=np.array([stop - start], dtype=np.int64),
            tables=[row[None] for row in self._tables(sequence)],
            fresh=np.array([start == 0]),
            copies=np.empty((0, 2), dtype=np.int32) if copies is None else copies,
            exports=exports or (),
            all_logits=np.array([True]),
        )
        logits = self._runner.run(batch).all_logits[0]
        assert logits is not None
        return logits

    def _compare(self, logits: torch.Tensor, positions: list[int]) -> _Difference:
        expected = self._reference[positions]
        difference = logits - expected
        centred = expected - expected.mean(dim=-1, keepdim=True)
        relative = difference.square().mean(dim=-1).sqrt() / centred.square().mean(dim=-1).sqrt().clamp_min(1e-12)
        if not bool(torch.isfinite(difference).all()):
            return _UNKNOWN
        return _Difference(float(relative.median()), float(difference.abs().max()))


def _probe_length(layout: ModelLayout) -> int:
    """Tokens of the probe text: past the smallest window or chunk if that is affordable, and never fewer than 32."""
    reaches = [getattr(group, "window", 0) or getattr(group, "chunk", 0) for group in layout.groups]
    crossing = [reach + reach // 2 + 16 for reach in reaches if 0 < reach <= 1024]
    affordable = int(_FLOPS_LIMIT / max(1.0, layout.cost.linear))
    wanted = max([_BASE_TOKENS, *crossing])
    length = max(32, min(wanted, affordable))
    return length if layout.max_tokens is None else min(length, layout.max_tokens)


@torch.no_grad()
def _one_shot(model: PreTrainedModel, text: Int32s) -> torch.Tensor:
    """Logits of the whole text by transformers alone: float32 [tokens, vocab]."""
    tokens = torch.from_numpy(text.astype(np.int64)).to(model.device)[None]
    positions = torch.arange(len(text), device=model.device)[None]
    logits: torch.Tensor = model(input_ids=tokens, position_ids=positions, use_cache=False)["logits"]
    return logits[0].float()
