"""What proposes tokens: one small interface, and the records that pass through it.

A drafter is asked at the *start* of the step that verifies its proposal, and told at the end of every forward what the
target computed. So a proposal and its distributions live within one step: nothing of them has to survive a preemption,
an abort or a failure, and nothing but token ids travels between processes. What a drafter does keep from step to step
lies in the cache, in groups of its own that follow the target's through hits, copies and evictions.

Rejected: drafting at the end of a step for the next one (the engines' way). It would have to keep a distribution over
the vocabulary for every drafted token until the request comes round again, or to give up drawing from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from headway.cache import LayerSpec
from headway.runtime.forward.arena import Arena
from headway.runtime.forward.grammars import Grammars
from headway.runtime.forward.sampling import Stream, distributions, draw, uniform
from headway.runtime.interface import SampleRow
from headway.runtime.model.layout import Entries
from headway.runtime.parallel.context_parallel import HeadMerge

__all__ = ["DraftRequest", "Drafter", "Observed", "Proposal", "choose", "proposals"]

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Floats = NDArray[np.float32]
_Chosen = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True)
class DraftRequest:
    """A sequence that wants a draft.

    Attributes:
        row: Row of its lease.
        count: Most tokens to propose, at least 1.
        sample: Its prompt and answer so far, and how its tokens are chosen.
        drawn: Draw from the draft's own distribution and report it; else propose the likeliest tokens.
        tables: int32, its row of each block table of the geometry.
        grammars: Knows the form of the answer if it must have one: a draft that has not is never verified.
    """

    row: int
    count: int
    sample: SampleRow
    drawn: bool
    tables: Sequence[Int32s]
    grammars: Grammars | None = None

    @property
    def length(self) -> int:
        """Tokens of prompt and answer; the target has computed all but the last of them."""
        return len(self.sample.prompt) + len(self.sample.output)

    @property
    def anchor(self) -> int:
        """The last token."""
        return int(self.sample.output[-1] if len(self.sample.output) else self.sample.prompt[-1])


@dataclass(frozen=True)
class Proposal:
    """A draft.

    Attributes:
        tokens: int32 [k], at most as many as were asked for; none is an answer too.
        distribution: float32 [k, vocab] from which each was drawn, or None where they were not drawn.
        confidence: float32 [m], chance that the drafter gives each place, given that all before it are accepted; None
            if it has no opinion. It may speak of more places than were asked for.
    """

    tokens: Int32s
    distribution: torch.Tensor | None = None
    confidence: Floats | None = None


@dataclass(frozen=True)
class Observed:
    """What the target computed in one forward: n rows of equally many tokens, rejected drafts at their ends.

    Attributes:
        rows: int64 [n], rows of leases.
        starts: int64 [n], position of each row's first token.
        valid: int64 [n], how many of the tokens, from the first on, are part of the sequence.
        following: int64 [n], the token behind the last valid one, -1 where nobody knows it yet.
        tokens: int64 [n, count], on the device.
        features: [n, count, width], what the drafter's `feature_layers` put out, side by side.
        tables: one int32 [n, width] array per block table of the geometry.
    """

    rows: Int64s
    starts: Int64s
    valid: Int64s
    following: Int64s
    tokens: torch.Tensor
    features: torch.Tensor
    tables: Sequence[Int32s]


class Drafter(Protocol):
    """Proposes tokens. Used by one thread.

    Attributes:
        name: What it is called in metrics: `lookup`, `mtp`, `dspark`.
        groups: Its groups in the cache; none if it keeps nothing there.
        entries: What it keeps of a token in each of them.
        feature_layers: Decoder layers of the target whose outputs it reads, -1 for the embeddings.
        mixed_features: Whether it reads what the next layer makes of these outputs (see `FeatureTap`).
        most: Most tokens that it can propose at once.
    """

    name: str
    groups: tuple[LayerSpec, ...]
    entries: tuple[Entries, ...]
    feature_layers: tuple[int, ...]
    mixed_features: bool
    most: int

    def attach(self, arena: Arena, merge: HeadMerge | None = None) -> None:
        """Use this arena, whose geometry has the drafter's groups. Called once, before anything else.

        Args:
            arena: The arena.
            merge: The ranks that split tokens, if there are several. A drafter whose groups say that they are sharded
                has the entries of this rank's tokens in its arena, and attends to those of the others through `merge`.
        """

    def observe(self, observed: Observed) -> None:
        """Store what later proposals need of a forward; called after every forward if there are feature layers."""

    def prepare(self, requests: Sequence[DraftRequest]) -> None:
        """Do what takes all ranks, for the next `propose`. Called on all of them, for the same requests."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Propose a draft for each sequence. Called on rank 0 alone, for the requests that were prepared.

        All tokens of a sequence but the last have been observed since its lease began, or come with its hit.
        """


def choose(logits: torch.Tensor, requests: Sequence[DraftRequest], drafts: torch.Tensor) -> _Chosen:
    """Choose the next token of each draft, among those that the form of the answer allows.

    Args:
        logits: float32 [n, vocab].
        requests: One per row.
        drafts: int64 [n, k], the tokens proposed so far.

    Returns:
        The tokens, int64 [n], and the distributions, float32 [n, vocab], or None if no row is drawn.
    """
    drawing = any(request.drawn for request in requests)
    grammars = next((r.grammars for r in requests if r.sample.constraint is not None), None)
    rows: list[SampleRow] = []
    if drawing or grammars is not None:
        written = drafts.to("cpu", torch.int32).numpy()
        outputs = [np.concatenate([r.sample.output, w]) for r, w in zip(requests, written, strict=True)]
        rows = [replace(r.sample, output=output) for r, output in zip(requests, outputs, strict=True)]
    if grammars is not None:
        logits = grammars.restrict(logits, rows, again=True)
    tokens = logits.argmax(dim=-1)
    if not drawing:
        return tokens, None
    offset = drafts.shape[1]
    found = distributions(logits, rows)
    numbers = [uniform(r.sample.seed, len(r.sample.output), Stream.DRAFT, offset) for r in requests]
    drawn = draw(found, torch.tensor(numbers, device=logits.device))
    asked = torch.tensor([request.drawn for request in requests], device=logits.device)
    return torch.where(asked, drawn, tokens), found


def proposals(
    requests: Sequence[DraftRequest], drafts: torch.Tensor, found: Sequence[torch.Tensor | None]
) -> list[Proposal]:
    """Cut what was chosen for all rows to what each asked for.

    Args:
        requests: One per row.
        drafts: int64 [n, k], k at least the largest count.
        found: k distributions as `choose` returns them.
    """
    tokens = drafts.to("cpu", torch.int32).numpy()
    stacked = None if not found or found[0] is None else torch.stack([f for f in found if f is not None], dim=1)
    return [
        Proposal(tokens[i, : r.count], stacked[i, : r.count] if stacked is not None and r.drawn else None)
        for i, r in enumerate(requests)
    ]
