"""What it costs in quality to store entries or states as a narrower type: measured when a model is loaded.

A short text is computed twice over memory of its own, stored as the model computes and as it was asked for. How well
each predicts the text, and how often both predict the same token, is told to whoever chose the type. It is one text of
a few hundred tokens: it shows that a type does harm, not that it does none to longer ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from headway.cache import CacheGeometry
from headway.runtime.forward.batch import RunBatch
from headway.runtime.forward.runner import ModelRunner
from headway.runtime.interface import StoredTypes
from headway.runtime.loading import LoadedModel
from headway.runtime.model.inspection import require_read_back
from headway.runtime.model.layout import ModelLayout
from headway.runtime.model.stored import stored_layout

__all__ = ["Quality", "measured_quality", "quality_of"]

_MOST_TOKENS = 256
_PIECE = 32
"""Tokens after which states are stored and read again, where they are rounded."""
_HARM = 1.05
"""Perplexity by which a type has done harm that everybody should know of, as a multiple."""

_TEXT = """The old lighthouse stood at the end of the pier, and every evening the keeper climbed its hundred and twelve
steps to light the lamp. He had done so for thirty years. In winter, when the storms came from the north, he could feel
the tower move under the weight of the waves, and he wrote the hour and the wind into a book that nobody but him would
read. One morning in March a letter came from the harbour office. It said that the lamp would be replaced by an electric
one, which needs no keeper, and that he could stay in the house if he wished. He read it twice, put it into the book
between two pages about the wind, and went down to the water to look at the boats. The fishermen knew already. "What
will you do?" asked one of them. "I will count the steps again," he said. "Somebody has to know whether they are all
still there." Then he laughed, and the others laughed with him, and the gulls rose from the wall."""


@dataclass(frozen=True)
class Quality:
    """What a narrower type does to the predictions of a text.

    Attributes:
        types: What is stored as which type.
        tokens: Tokens that were predicted.
        whole: Perplexity with everything stored as the model computes.
        stored: Perplexity as asked for; infinite if the model's numbers were not finite.
        agreed: Share of the tokens at which both find the same token most likely.
    """

    types: StoredTypes
    tokens: int
    whole: float
    stored: float
    agreed: float

    @property
    def told(self) -> str:
        """One sentence."""
        names = {"attention entries": self.types.entries, "states": self.types.states}
        what = ", ".join(f"{name} {dtype}" for name, dtype in names.items() if dtype != "auto")
        return (
            f"{what}: perplexity {self.stored:.4g} instead of {self.whole:.4g} on a text of {self.tokens} tokens, the "
            f"same likeliest token at {self.agreed:.1%} of them"
        )

    @property
    def warning(self) -> str | None:
        """What to tell the operator if the type has done harm, else None."""
        if self.stored <= self.whole * _HARM:
            return None
        return f"{self.told}: that is worse; leave out --kv-dtype or --state-dtype, or choose a wider type"


def quality_of(loaded: LoadedModel, types: StoredTypes, single_steps: bool = False) -> Quality | None:
    """Measure what types cost a model that is loaded; None where it computes with them anyway.

    Ranks that share the weights call this together. It takes the time of two short prompts.

    Args:
        loaded: The model, with the layout that it computes with.
        types: The types.
        single_steps: What its self-check says.

    Raises:
        ConfigError: The model cannot store as these types.
        ModelError: It does not attend to entries as they are stored.
    """
    layout = stored_layout(loaded.layout, types)
    if layout == loaded.layout:
        return None
    if layout.narrows_entries:
        require_read_back(loaded.model, f"--kv-dtype {types.entries}")
    tokens = loaded.tokenizer(" ".join(_TEXT.split()))["input_ids"][:_MOST_TOKENS]
    return measured_quality(loaded.model, loaded.layout, types, tokens, single_steps)


def measured_quality(
    model: PreTrainedModel,
    layout: ModelLayout,
    types: StoredTypes,
    tokens: Sequence[int],
    single_steps: bool = False,
) -> Quality:
    """Measure what types cost a model on a text of its tokens, at least two."""
    limits = (layout.max_tokens, None if layout.long_rope is None else layout.long_rope.original)
    text = np.asarray(tokens[: min((n for n in limits if n is not None), default=None)], dtype=np.int32)
    piece = _PIECE if types.states != "auto" and not single_steps else len(text)
    layouts = (layout, stored_layout(layout, types))
    whole, stored = (_logits(model, each, text, piece, single_steps) for each in layouts)
    agreed = (whole.argmax(dim=-1) == stored.argmax(dim=-1)).float().mean()
    return Quality(types, len(text) - 1, _perplexity(whole, text), _perplexity(stored, text), float(agreed))


def _logits(
    model: PreTrainedModel, layout: ModelLayout, text: np.ndarray, piece: int, single_steps: bool
) -> torch.Tensor:
    """Logits of a text but for its last token, float32 [tokens - 1, vocab], computed in pieces."""
    geometry = CacheGeometry(layout.groups, block_tokens=16)
    needs = [table.state_blocks or table.blocks_for(len(text)) for table in geometry.tables]
    runner = ModelRunner(model, layout, geometry, sum(needs), single_steps)
    ends = np.cumsum(needs)
    tables = [np.arange(e - n, e, dtype=np.int32)[None] for e, n in zip(ends, needs, strict=True)]
    parts = []
    for start in range(0, len(text) - 1, piece):
        stop = min(start + piece, len(text) - 1)
        batch = RunBatch(
            tokens=text[start:stop],
            starts=np.array([start], dtype=np.int64),
            counts=np.array([stop - start], dtype=np.int64),
            tables=tables,
            fresh=np.array([start == 0]),
            all_logits=np.ones(1, dtype=np.bool_),
        )
        parts += [part for part in runner.run(batch).all_logits if part is not None]
    return torch.cat(parts)


def _perplexity(logits: torch.Tensor, text: np.ndarray) -> float:
    following = torch.from_numpy(text[1:].astype(np.int64)).to(logits.device)
    loss = float(torch.nn.functional.cross_entropy(logits, following))
    return math.exp(min(loss, 700.0)) if math.isfinite(loss) else math.inf
