"""Whether what a step computed is made of finite numbers, looked at on the device.

A NaN is an answer to nothing: its row fails, and nothing of that step is kept. Three things are looked at:

- The logits that tokens are chosen from, by their largest: it is NaN if one is, and infinite if one is or if all are
  minus infinity. A single minus infinity is how some models rule a token out.
- The decoder's last hidden vectors of all tokens, in a step that makes logits of the last token alone. A query attends
  to its own key and value, and reads a state that has taken in its own token. So an entry or a state that is not finite
  makes the vector of its token so, and behind the norm that ends every decoder infinities are NaN as well. The last
  token's logits alone would miss an entry that has left a window since.
- A state that is exported, by its own numbers.

Two other ways to keep a state need no look of their own. Who ends or gives way donates the state of its last good step,
which is finite by the same argument: a token of the step has read each of its numbers. (fp32 and bf16 have the same
range, and what is stored as fp8 is clamped to its range, so storing adds no infinity.) A bookmark copies the running
state before a step that reads it as well: if it was damaged in between, the row fails, and the bookmark goes with it.
Memory that is damaged later is found by whoever resumes there.

The flags stay on the device until the step's tokens are read. When a row has failed, `damage` looks at what it started
from, which may be what the cache has kept for everybody.

Rejected: to look at everything that is written. Reading all states anew costs as much as a step's own reading of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from headway.cache import TableKind
from headway.runtime.forward.arena import Arena
from headway.runtime.forward.batch import RunBatch
from headway.runtime.forward.plan import TokenPlan

__all__ = ["damage", "extremes", "finite_states"]


def extremes(logits: torch.Tensor, hidden: torch.Tensor | None = None) -> torch.Tensor:
    """A number for each row of a forward, which is finite where the row is.

    Args:
        logits: float32 [rows, tokens or 1, vocab].
        hidden: The decoder's output, [rows, tokens, width]; None where the logits speak of all tokens.

    Returns:
        float32 [rows]. They may be added up.
    """
    largest = logits.amax(dim=(1, 2))
    return largest if hidden is None else largest + hidden.reshape(len(logits), -1).amax(dim=1)


def finite_states(arena: Arena, ids: torch.Tensor) -> torch.Tensor:
    """Whether a state is finite in all layers, bool []; `ids` are its blocks, int64 [state_blocks]."""
    states = arena.gather_states(ids[None])
    layers = [layer.index for layer in arena.layout.layers if layer.state is not None]
    fields = [field for layer in layers for field in arena.state_fields(states, layer).values()]
    return torch.stack([field.isfinite().all() for field in fields]).all()


def damage(arena: Arena, batch: RunBatch, row: int, rank: int = 0) -> int | None:
    """Look for numbers that are not finite in what a row of a batch that has run started from.

    Args:
        arena: The memory of this rank.
        batch: What was run.
        row: Row of the batch.
        rank: This rank among those that split tokens.

    Returns:
        Tokens of the shortest beginning of the row that is damaged, None if nothing is. The state that the row resumed
        from is looked at where the batch copied it; one of its own has been overwritten since.
    """
    start = int(batch.starts[row])
    found = [*_damaged_entries(arena, batch, row, rank)]
    source = _resumed_state(arena, batch, row)
    if source is not None and not bool(finite_states(arena, source)):
        found.append(start)
    return min(found, default=None)


def _damaged_entries(arena: Arena, batch: RunBatch, row: int, rank: int) -> Iterator[int]:
    """For each damaged layer the tokens up to and with its first entry that is not finite."""
    starts = batch.starts[row : row + 1]
    plans = {
        table.index: TokenPlan(table, batch.tables[table.index][row : row + 1], starts, 1, arena.device, rank)
        for table in arena.geometry.tables
        if table.kind is not TableKind.STATE and starts[0] > 0
    }
    tables = {group.spec.name: group.table.index for group in arena.geometry.groups}
    for layer in arena.layout.layers:
        plan = None if layer.tokens is None else plans.get(tables[layer.tokens.group])
        if plan is None:
            continue
        positions = plan.past_positions[0]
        before = (positions >= 0) & (positions < int(starts[0]))  # the token behind is the step's own
        for view in arena.entries(layer.index):
            entries = view[plan.past[0]].flatten(0, 1)[: plan.past_columns].float()  # fp8 cannot be asked
            broken = before & ~entries.isfinite().flatten(1).all(dim=1)
            if bool(broken.any()):
                yield int(positions[broken].min()) + 1


def _resumed_state(arena: Arena, batch: RunBatch, row: int) -> torch.Tensor | None:
    """Blocks of the state that a row's running state was copied from in this batch, int64 [state_blocks]."""
    table = next((table for table in arena.geometry.tables if table.kind is TableKind.STATE), None)
    if table is None:
        return None
    source = dict(zip(batch.copies[:, 1].tolist(), batch.copies[:, 0].tolist(), strict=True))
    running = batch.tables[table.index][row, : table.state_blocks].tolist()
    if not all(block in source for block in running):
        return None
    return torch.from_numpy(np.array([source[block] for block in running], dtype=np.int64)).to(arena.device)
