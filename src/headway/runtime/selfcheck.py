"""Does the model, run in pieces over our memory, say what it says in one go?

At load short random texts are computed once by transformers alone, each by itself and without any cache, and then in
the ways that serving uses: in one go, in pieces, and resumed in the middle, by several tokens and by single ones, alone
and many rows at once. What a token computes may depend on its own prefix only. So rows that start at different
positions run beside each other and beside one at the far end of the context, all of them resumed behind a path that
goes on; texts are cut on each side of every length that the configuration names. Lengths that no affordable text
reaches are tried with positions alone: the text is short, and the model is told that it stands around that length.

Some classes of transformers contradict themselves here: their continuation by several tokens ignores the state, or they
keep a state outside the cache. Better to know at load than to serve wrong tokens.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from headway.cache import CacheGeometry, SlidingWindow, TableKind
from headway.errors import ModelError
from headway.runtime.forward.batch import RunBatch, StateMove
from headway.runtime.forward.runner import ModelRunner
from headway.runtime.model.inspection import raised_in
from headway.runtime.model.layout import ModelLayout

__all__ = ["SelfCheck", "Verdict", "self_check"]

_BASE_TOKENS = 96
"""Length of the probe text where nothing asks for a longer one: six blocks."""
_LEAST_TOKENS = 32
_FLOPS_LIMIT = 2e12
"""Operations that one pass over the probe text may take; large models are probed with shorter texts."""
_LOGITS_LIMIT = 1 << 28
"""Logits of one text that are held, in fp32: 1 GiB."""
_STEPS = 4
"""Single tokens with which a continuation is tried."""
_PIECES = 5
"""Pieces in which the probe text is tried where nothing is named: odd, so that cuts fall inside blocks."""
_RESUMED = 20
"""Tokens with which a text is resumed: more than what `short_chunks` computes in another form."""
_NEAR = 4
"""Positions after each cut that are compared: a lost state spoils these most; further on, models forget it."""
_USUAL_CHUNK = 64
"""Tokens of a chunk of linear attention where no configuration says otherwise."""
_LENGTHS = re.compile(r"window|chunk|block_size|kernel|conv|interleave")
"""Fields of a configuration that name a number of tokens."""
_PLACES = re.compile(r"original_max|floor_scale")
"""Fields that name a position, behind which something changes."""
_TOLERANCE = {torch.float32: 2e-3, torch.float64: 1e-6}
"""Largest difference that is rounding, relative to the size of the logits."""
_COARSE_TOLERANCE = 0.1
"""For bf16 and fp16: rounding moves logits by a few per cent, a contradiction by about their own size."""
_COARSE_FLIPS = 4.0
"""How many times the tolerance a single row may differ in low precision, where an expert flips now and then."""

Int32s = NDArray[np.int32]


class Verdict(Enum):
    """What the check found."""

    SOUND = "sound"
    """Chunks, single steps and resumed checkpoints agree with the one-shot forward."""
    STEPS_ONLY = "steps-only"
    """Only single steps continue correctly: prompts run in one piece, and what is resumed goes on token by token."""


@dataclass(frozen=True)
class SelfCheck:
    """Result of a self-check.

    Attributes:
        verdict: What follows for serving.
        tokens: Length of the longest probe text.
        whole: Difference of one-piece prefills from the one-shot forward: root mean square of the differences relative
            to that of the logits, at the median position of each stretch between cuts (in low precision an expert that
            flips spoils single positions); of the worst stretch. All differences below are measured so.
        chunks: Difference just after each cut of a text computed in pieces, and where many rows are resumed by several
            tokens at once; infinite if that raised.
        steps: Difference of many rows resumed by single tokens, from checkpoints behind a path that goes on.
        max_difference: Largest absolute difference of any logit in the parts that the verdict relies on.
        detail: What went wrong, in one sentence; empty if nothing did.
        step_price: Tokens of a prompt computed in one piece that took as long as one single step.
    """

    verdict: Verdict
    tokens: int
    whole: float
    chunks: float
    steps: float
    max_difference: float
    detail: str = ""
    step_price: float = 1.0

    @property
    def reuse(self) -> bool:
        """Whether prefixes are reused wherever they can be."""
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
            f"less is reused: {self.detail}. transformers' implementation of this model does not continue from a "
            f"cached state by several tokens at once. So prompts are computed in one piece, and a cached prefix is "
            f"reused where the rest, token by token, takes less time than the whole prompt in one piece (here a single "
            f"step takes as long as {self.step_price:.1f} tokens in one piece)"
        )


def self_check(model: PreTrainedModel, layout: ModelLayout, seed: int = 0) -> SelfCheck:
    """Check a model at load. Takes memory for a few short sequences, and gives it back.

    Raises:
        ModelError: Even a prefill in one piece, or a continuation by single tokens, is not what transformers computes.
    """
    try:
        probe = _Probe(model, layout, seed)
        whole = probe.whole()
        chunks, failure = probe.chunks()
        steps = probe.steps()
    except Exception as error:
        place = raised_in(error)
        if place is None or isinstance(error, torch.OutOfMemoryError):
            raise
        raise ModelError(
            f"{layout.model} cannot be served: its {type(place).__name__} fails over Headway's memory. It may need "
            f"more than tokens, or use transformers' cache in a way of its own"
        ) from error
    for part, what in ((whole, "a prefill"), (steps, "a continuation by single tokens")):
        if not part.is_rounding(layout.dtype):
            raise ModelError(
                f"{layout.model} cannot be served: {what} over Headway's memory differs from transformers' own forward "
                f"by {part.relative:.2g} of the size of the logits (at most {_limit(layout.dtype):.2g} is rounding). "
                f"{_suspicion(layout, probe.stretches, part)}"
            )
    sound = chunks.is_rounding(layout.dtype)
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
        step_price=probe.step_price,
    )


def _suspicion(layout: ModelLayout, stretches: Sequence[int], found: _Difference) -> str:
    """What may be the matter with a model of which a part differs, by where the first of its `stretches` does."""
    agreed = next((at for at, off in zip(stretches, found.stretches, strict=False) if off > _limit(layout.dtype)), 0)
    if any(agreed == spec.window for spec in layout.groups if isinstance(spec, SlidingWindow)):
        return (
            f"Its first {agreed} tokens agree: its cache lets go of entries behind a window of {agreed} tokens, which "
            f"its own forward attends to"
        )
    return "It may keep a state outside its cache, couple the rows of a batch, or attend in a way that is not supported"


def _limit(dtype: torch.dtype) -> float:
    return _TOLERANCE.get(dtype, _COARSE_TOLERANCE)


@dataclass
class _Difference:
    """Differences of stretches of positions: each stretch's median, and the largest of any logit."""

    stretches: list[float] = field(default_factory=list)
    largest: float = 0.0

    @property
    def relative(self) -> float:
        """That of the worst stretch."""
        return max(self.stretches)

    def is_rounding(self, dtype: torch.dtype) -> bool:
        """Whether all of it is rounding."""
        flips = 1.0 if dtype in _TOLERANCE else _COARSE_FLIPS
        return self.relative <= flips * _limit(dtype) and float(np.median(self.stretches)) <= _limit(dtype)

    def add(self, logits: torch.Tensor, expected: torch.Tensor) -> None:
        """Compare a stretch: float32 [positions, vocab] each."""
        difference = logits - expected
        if not bool(torch.isfinite(difference).all()):
            self.stretches.append(float("inf"))
            self.largest = float("inf")
            return
        centred = expected - expected.mean(dim=-1, keepdim=True)
        relative = difference.square().mean(dim=-1).sqrt() / centred.square().mean(dim=-1).sqrt().clamp_min(1e-12)
        self.stretches.append(float(relative.median()))
        self.largest = max(self.largest, float(difference.abs().max()))


@dataclass(frozen=True, eq=False)
class _Text:
    """A probe text.

    Attributes:
        tokens: int32 [n].
        cuts: Where it is cut and resumed, ascending.
        offset: The position that the model is told for its first token.
        long: Whether it uses the long set of rotary frequencies.
        expected: Its logits by transformers alone: float32 [n, vocab].
        one_piece: Its block-table rows when it is computed in one piece.
        pieces: Those when it is computed in pieces.
    """

    tokens: Int32s
    cuts: Sequence[int]
    offset: int
    long: bool
    expected: torch.Tensor
    one_piece: list[Int32s]
    pieces: list[Int32s]


@dataclass(frozen=True, eq=False)
class _Row:
    """A row of a batch: `count` tokens of a text from `start` on, in blocks of its own where they are not shared.

    Attributes:
        copies: int32 [k, 2], blocks to copy before its first step: those of the text it goes on from.
    """

    text: _Text
    start: int
    count: int
    tables: list[Int32s]
    copies: Int32s = field(default_factory=lambda: np.empty((0, 2), dtype=np.int32))


class _Probe:
    """Texts in a small arena of their own: each in one piece, in pieces, and resumed at its cuts."""

    def __init__(self, model: PreTrainedModel, layout: ModelLayout, seed: int) -> None:
        self._model, self._layout = model, layout
        self._rng = np.random.default_rng(seed)
        self._geometry = CacheGeometry(layout.groups, block_tokens=16)
        self._states = any(table.kind is TableKind.STATE for table in self._geometry.tables)
        config = model.config.to_dict()
        named, places = (sorted(set(_named(pattern, config))) for pattern in (_LENGTHS, _PLACES))
        self.tokens = _probe_length(layout, named)
        short = min(2 * _RESUMED + 8, self.tokens)
        middle = short // 2 - 2
        self._resumed = min(_RESUMED, short - middle - 1)
        wanted = list(self._wanted(named, places, short, middle))
        self._each = sum(table.blocks_for(self.tokens) for table in self._geometry.tables)
        row = sum(t.state_blocks or -(-self._resumed // t.span) + 1 for t in self._geometry.tables)
        rows = sum(len(cuts) for _, cuts, _ in wanted)
        blocks = (2 * len(wanted) + 1) * self._each + (2 * rows + 1) * row
        self._runner = ModelRunner(model, layout, self._geometry, blocks)
        self._runner.arena.data.fill_(0xFF)
        self._taken = 0
        self._step_seconds = self._token_seconds = math.inf
        self._texts = [self._text(*each) for each in wanted]
        self._scratch = self._sequence()

    @property
    def stretches(self) -> list[int]:
        """Where the stretches of the first text begin, which `whole` compares first."""
        return [0, *self._texts[0].cuts]

    @property
    def step_price(self) -> float:
        """Tokens computed in one piece in the time of one single step, at least 1."""
        return max(1.0, self._step_seconds / self._token_seconds)

    def _wanted(
        self, named: Sequence[int], places: Sequence[int], short: int, middle: int
    ) -> Iterator[tuple[int, Sequence[int], int]]:
        """Length, cuts and offset of each text: from 0 on, around places and what is out of reach, at the far end."""
        rope, limit = self._layout.long_rope, self._layout.max_tokens
        length = self.tokens if rope is None else min(self.tokens, rope.original)
        yield length, _cuts(length - self._resumed, length, (*named, *places), self._states), 0
        for there in sorted({*places, *(n for n in named if n > length)}):
            if middle < there and (limit is None or there - middle + short <= limit):
                yield short, (middle - 1, middle, middle + 1), there - middle
        if limit is not None and limit > length:
            yield short, (middle,), limit - short

    def _text(self, length: int, cuts: Sequence[int], offset: int) -> _Text:
        rope = self._layout.long_rope
        tokens = self._rng.integers(1, self._layout.vocab_size, length, dtype=np.int32)
        long = rope is not None and offset + length > rope.original
        expected = _one_shot(self._model, tokens, offset)
        return _Text(tokens, cuts, offset, long, expected, self._sequence(), self._sequence())

    def whole(self) -> _Difference:
        """Each text in one piece, those of one length beside each other."""
        found = _Difference()
        rows = [_Row(text, 0, len(text.tokens), text.one_piece) for text in self._texts]
        for row, logits in zip(rows, self._run(rows), strict=True):
            for start, stop in pairwise([0, *row.text.cuts, row.count]):
                found.add(logits[start:stop], row.text.expected[start:stop])
        return found

    def chunks(self) -> tuple[_Difference, str]:
        """Each text in pieces; then all of them resumed at all cuts by several tokens, in one batch.

        With states a piece ends at every cut, since only there a state can be taken; else some cuts do.
        """
        found = _Difference()
        try:
            rows: list[_Row] = []
            for text in self._texts:
                resumed = {cut: self._resume(text, text.pieces, cut, self._resumed) for cut in text.cuts}
                rows += resumed.values()
                ends = text.cuts if self._states else text.cuts[:: max(1, len(text.cuts) // _PIECES)]
                for start, stop in pairwise([0, *ends, len(text.tokens)]):
                    exports = self._states_of(text.pieces, resumed[stop]) if stop in resumed else ()
                    [logits] = self._run([_Row(text, start, stop - start, text.pieces)], exports)
                    found.add(logits[:_NEAR], text.expected[start:stop][:_NEAR])
                    found.add(logits[-1:], text.expected[stop - 1 : stop])
            for row, logits in zip(rows, self._run(rows), strict=True):
                found.add(logits[:_NEAR], row.text.expected[row.start :][:_NEAR])
        except Exception as error:
            found.stretches.append(float("inf"))
            return found, f"a continuation by several tokens raises {type(error).__name__}: {error}"
        return found, ""

    def steps(self) -> _Difference:
        """Texts resumed from checkpoints of prefills in one piece, behind the whole text, token by token in one batch.

        A state is there for each cut only at the price of a prefill, so with states some cuts do. One row makes a step
        alone as well.
        """
        found = _Difference()
        rows = [self._checkpoint(text, cut) for text in self._texts for cut in self._stepped(text)]
        alone = self._checkpoint(self._texts[0], self._stepped(self._texts[0])[-1])
        [logits] = self._run([alone])
        found.add(logits, alone.text.expected[alone.start : alone.start + 1])
        parts: list[list[torch.Tensor]] = [[] for _ in rows]
        for step in range(_STEPS):
            now = [replace(row, start=row.start + step, copies=row.copies[: 0 if step else None]) for row in rows]
            for part, logits in zip(parts, self._run(now), strict=True):
                part.append(logits)
        for row, part in zip(rows, parts, strict=True):
            found.add(torch.cat(part), row.text.expected[row.start : row.start + _STEPS])
        return found

    def _stepped(self, text: _Text) -> Sequence[int]:
        """Cuts of a text at which it is resumed token by token."""
        cuts = text.cuts
        return sorted({cuts[0], cuts[len(cuts) // 2], cuts[-1]}) if self._states else cuts

    def _checkpoint(self, text: _Text, cut: int) -> _Row:
        """A row that goes on with single tokens from what a prefill in one piece left at `cut`."""
        row = self._resume(text, text.one_piece, cut, 1)
        if self._states:
            self._run([_Row(text, 0, cut, self._scratch)], self._states_of(self._scratch, row))
        return row

    def _sequence(self) -> list[Int32s]:
        """Block-table rows for a text."""
        return [self._take(table.blocks_for(self.tokens)) for table in self._geometry.tables]

    def _take(self, count: int) -> Int32s:
        self._taken += count
        return np.arange(self._taken - count, self._taken, dtype=np.int32)

    def _resume(self, text: _Text, source: list[Int32s], cut: int, count: int) -> _Row:
        """A row that goes on from a path at `cut`: it shares the blocks before it, and copies those it writes to."""
        tables, copies = [], []
        for table, held in zip(self._geometry.tables, source, strict=True):
            if table.kind is TableKind.STATE:
                tables.append(self._take(len(held)))
                continue
            written = slice(cut // table.span, (cut + max(count, _STEPS) - 1) // table.span + 1)
            own = held.copy()
            own[written] = self._take(len(own[written]))
            tables.append(own)
            copies.append(np.stack([held[written], own[written]], axis=1))
        return _Row(text, cut, count, tables, np.concatenate([*copies, np.empty((0, 2), dtype=np.int32)]))

    def _states_of(self, source: list[Int32s], row: _Row) -> list[StateMove]:
        """Copies of the running state of `source`, the only row of its batch, to that of a row."""
        return [
            StateMove(held, own, 0)
            for table, held, own in zip(self._geometry.tables, source, row.tables, strict=True)
            if table.kind is TableKind.STATE
        ]

    def _run(self, rows: Sequence[_Row], exports: Sequence[StateMove] = ()) -> Sequence[torch.Tensor]:
        """Logits of rows, float32 [count, vocab] each.

        Notes the least time of a single step, and of a token of a row that runs alone from its start.
        """
        starts = np.array([row.start for row in rows], dtype=np.int64)
        batch = RunBatch(
            tokens=np.concatenate([row.text.tokens[row.start : row.start + row.count] for row in rows]),
            starts=starts,
            counts=np.array([row.count for row in rows], dtype=np.int64),
            tables=[np.stack(held) for held in zip(*(row.tables for row in rows), strict=True)],
            fresh=starts == 0,
            copies=np.concatenate([row.copies for row in rows]),
            exports=exports,
            all_logits=np.ones(len(rows), dtype=np.bool_),
            long=np.array([row.text.long for row in rows]),
            offsets=np.array([row.text.offset for row in rows], dtype=np.int64),
        )
        started = time.perf_counter()
        logits = [part for part in self._runner.run(batch).all_logits if part is not None]
        if self._runner.device.type == "cuda":
            torch.cuda.synchronize(self._runner.device)
        took = time.perf_counter() - started
        if starts.all() and batch.counts.max() == 1:
            self._step_seconds = min(self._step_seconds, took)
        elif len(rows) == 1 and starts[0] == 0:
            self._token_seconds = min(self._token_seconds, took / len(batch.tokens))
        return logits


def _named(pattern: re.Pattern[str], config: Any, name: str = "") -> Iterator[int]:
    """Whole numbers above 1 that a configuration gives to fields of some names, at any depth."""
    if isinstance(config, dict):
        for key, value in config.items():
            yield from _named(pattern, value, str(key))
    elif isinstance(config, list | tuple):
        for value in config:
            yield from _named(pattern, value, name)
    elif pattern.search(name) and isinstance(config, int | float) and config == int(config) and config > 1:
        yield int(config)


def _cuts(last: int, length: int, named: Sequence[int], states: bool) -> list[int]:
    """Where a text of `length` tokens is cut, up to `last`: evenly, at 1, and on each side of every named length."""
    even = [i * length // _PIECES for i in range(1, _PIECES)]
    sides = [there + side for there in (*named, *((_USUAL_CHUNK,) if states else ())) for side in (-1, 0, 1)]
    return sorted({1, *(cut for cut in (*even, *sides) if 1 <= cut <= last)})


def _probe_length(layout: ModelLayout, named: Sequence[int]) -> int:
    """Tokens of the longest probe text: past the lengths that the model names where affordable, never below 32."""
    affordable = int(min(_FLOPS_LIMIT / max(1.0, layout.cost.linear), _LOGITS_LIMIT / layout.vocab_size))
    reaches = [getattr(group, "window", 0) or getattr(group, "chunk", 0) for group in layout.groups]
    crossing = [there + there // 2 + 16 for there in (*reaches, *named)]
    length = max(_LEAST_TOKENS, min(max([_BASE_TOKENS, *(n for n in crossing if n <= affordable)]), affordable))
    return length if layout.max_tokens is None else min(length, layout.max_tokens)


@torch.no_grad()
def _one_shot(model: PreTrainedModel, text: Int32s, offset: int = 0) -> torch.Tensor:
    """Logits of the whole text by transformers alone: float32 [tokens, vocab]."""
    tokens = torch.from_numpy(text.astype(np.int64)).to(model.device)[None]
    positions = torch.arange(offset, offset + len(text), device=model.device)[None]
    logits: torch.Tensor = model(input_ids=tokens, position_ids=positions, use_cache=False)["logits"]
    return logits[0].float()
