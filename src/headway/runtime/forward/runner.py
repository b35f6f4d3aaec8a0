"""Runs a transformers model over the arena: copies, forwards, exports, in that order.

`ModelRunner.run` is all that an engine calls in a step. A step writes only to blocks that its own rows hold, so a
forward that raises leaves every other row's memory as it was, and the engine may fail the step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from headway.cache import CacheGeometry
from headway.errors import ConfigError
from headway.runtime.forward.arena import Arena
from headway.runtime.forward.batch import RunBatch, RunResult
from headway.runtime.forward.finite import damage, extremes, finite_states
from headway.runtime.forward.plan import ForwardPlan, PlanRules, forwards
from headway.runtime.forward.views import PagedCache
from headway.runtime.interface import RowFault
from headway.runtime.model.attention import AttentionSwitch
from headway.runtime.model.inspection import cache_argument
from headway.runtime.model.layout import ModelLayout
from headway.runtime.model.rotary import LongSet
from headway.runtime.model.short_chunks import short_chunks
from headway.runtime.parallel.context_parallel import HeadMerge

__all__ = ["IN_FORWARD", "Judge", "ModelRunner"]

Judge = Callable[[ForwardPlan, torch.Tensor], NDArray[np.bool_]]
"""Called after a forward with its plan and its logits, float32 [rows, tokens or 1, vocab]: bool [rows], whether the
states that the forward left count. Where they do not, the row's running state stays as it was before."""


IN_FORWARD = "raised inside a forward of the model"
"""Note on an exception that the model itself raised, its attention included."""


class ModelRunner:
    """A model on one device with its arena.

    Not thread-safe: one thread runs it, and while it does nobody else calls the model.

    Args:
        model: The transformers model, on its device.
        layout: `headway.runtime.model.inspection.inspect_model(model)`.
        geometry: Geometry of the prefix cache (`PrefixCache.geometry`), made from `layout.groups`.
        blocks: Blocks of the pool.
        single_steps: Compute a continuation of several tokens one token at a time, for a model whose self-check says
            that it must (`SelfCheck.single_steps`).
        merge: Merges attention over the ranks among which the geometry splits tokens. All of them run the same batches
            in the same order. None for one rank.

    Attributes:
        arena: The memory of this rank.
        device: The model's device.
        merge: The ranks that split tokens, or None.

    Raises:
        ConfigError: A geometry that is not of this model's groups, or for another number of ranks.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layout: ModelLayout,
        geometry: CacheGeometry,
        blocks: int,
        single_steps: bool = False,
        merge: HeadMerge | None = None,
    ) -> None:
        size = 1 if merge is None else merge.shards
        if geometry.layout.shards != size:
            raise ConfigError(
                f"the geometry splits tokens over {geometry.layout.shards} ranks and {size} run(s): make them equal"
            )
        self.model = model
        model.train(False)
        self.layout = layout
        self.device = torch.device(model.device)
        self.arena = Arena(layout, geometry, blocks, self.device)
        self.merge = merge
        self._rank = 0 if merge is None else merge.shard
        self._tokens = None if merge is None else merge.tokens
        place = (0, 1) if self._tokens is None else (self._tokens.ranks.rank, self._tokens.ranks.size)
        self._rules = PlanRules(layout.uniform_starts, single_steps, place)
        self._switch = AttentionSwitch(model)
        self._decoder = _decoder_of(model)
        self._long_set = LongSet(model, layout.long_rope)
        self._cache_argument = cache_argument(model)
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    @torch.no_grad()
    def run(self, batch: RunBatch, judge: Judge | None = None) -> RunResult:
        """Do the batch's copies, compute every row, then do its exports.

        Args:
            batch: What to compute.
            judge: Says after each forward whose states count; without one all do.

        Returns:
            The logits that follow each row's last token, and all of a row's where the batch asks for them.
        """
        self._copy(batch.copies[:, 0], batch.copies[:, 1])
        last = torch.empty((batch.rows, self.layout.vocab_size), dtype=torch.float32, device=self.device)
        every: list[list[torch.Tensor]] = [[] for _ in range(batch.rows)]
        wanted = np.zeros(batch.rows, dtype=np.bool_) if batch.all_logits is None else batch.all_logits
        found = torch.zeros(batch.rows, dtype=torch.float32, device=self.device)
        for plan in forwards(batch, self.arena.geometry, self._rules, self.device, self._rank):
            asked = wanted[plan.rows]
            logits, extreme = self._forward(plan, bool(asked.any()), judge)
            rows = torch.from_numpy(plan.rows).to(self.device)
            last[rows] = logits[:, -1]
            found.index_add_(0, rows, extreme)
            for i in np.flatnonzero(asked):
                every[plan.rows[i]].append(logits[i])
        for export in batch.exports:
            self._copy(export.source, export.destination)
            found[export.row].masked_fill_(~finite_states(self.arena, self._ids(export.source)), torch.nan)
        return RunResult(last, tuple(torch.cat(parts) if parts else None for parts in every), found.isfinite())

    def faults(self, batch: RunBatch, result: RunResult) -> dict[int, RowFault]:
        """Rows of a batch that has just run whose numbers are not finite, and what is the matter with each.

        It waits for the device: call it once the step's tokens have been read.
        """
        failed = np.flatnonzero(~result.finite.cpu().numpy()).tolist()
        return {row: RowFault(damage(self.arena, batch, row, self._rank)) for row in failed}

    def _copy(self, source: NDArray[np.int32], destination: NDArray[np.int32]) -> None:
        self.arena.copy_blocks(self._ids(source), self._ids(destination))

    def _ids(self, blocks: NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(np.asarray(blocks, dtype=np.int64)).to(self.device)

    def _forward(self, plan: ForwardPlan, whole: bool, judge: Judge | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one forward: logits, float32 [rows, tokens or 1, vocab], and a number per row, finite if the row is."""
        cache = PagedCache(self.arena, plan, self.merge)
        options: dict[str, Any] = {self._cache_argument: cache}
        if self._keeps_logits and not whole:
            options["logits_to_keep"] = 1
        hidden: list[torch.Tensor] = []
        tap: AbstractContextManager[Any] = nullcontext()
        first, stop = plan.own
        if stop - first > 1 and self._keeps_logits and not whole:  # else logits speak of all tokens
            tap = self._decoder.register_forward_hook(lambda module, args, output: hidden.append(output[0]))
        with (
            self._switch.attending(cache),
            self._long_set.used(plan.long),
            short_chunks(self.model, stop - first),
            tap,
        ):
            try:
                output: Mapping[str, Any] = self.model(
                    input_ids=plan.tokens[:, first:stop],
                    position_ids=plan.positions[:, first:stop],
                    use_cache=True,
                    **options,
                )
            except Exception as error:
                error.add_note(IN_FORWARD)
                raise
        logits: torch.Tensor = output["logits"].float()
        extreme = extremes(logits, *hidden).float()
        if self._tokens is not None and plan.shared:
            logits = self.of_all(plan, logits) if whole else self._tokens.from_last(logits[:, -1:])
        cache.store(None if judge is None else judge(plan, logits))
        return logits, extreme

    def of_all(self, plan: ForwardPlan, own: torch.Tensor) -> torch.Tensor:
        """Put together what the ranks found for the tokens that they computed of a forward: [rows, tokens, ...]."""
        return self._tokens.gather(own, plan.count, dim=1) if self._tokens is not None and plan.shared else own


def _decoder_of(model: PreTrainedModel) -> torch.nn.Module:
    """The part of a model whose output, its first one, is the last hidden vectors."""
    network: Any = model
    found: torch.nn.Module = network.get_decoder()
    return found
