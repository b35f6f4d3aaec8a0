"""Ranks without processes: one thread each, so that all that is said among them is said in memory, and fast."""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from headway.cache import CacheGeometry, ParallelLayout
from headway.runtime.forward.batch import RunBatch, RunResult
from headway.runtime.forward.runner import ModelRunner
from headway.runtime.interface import AS_COMPUTED, StoredTypes
from headway.runtime.model.inspection import inspect_model
from headway.runtime.model.stored import stored_layout
from headway.runtime.parallel.communicator import Rehearsal
from headway.runtime.parallel.context_parallel import HeadMerge
from headway.runtime.parallel.prefill_context import TokenRanks
from headway.runtime.parallel.tensor_parallel import layout_of_share, split_model

T = TypeVar("T")


class Exchange:
    """What the ranks of one group have said in the present round."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.said: list[torch.Tensor | None] = [None] * size
        self.barrier = threading.Barrier(size)
        self.calls: list[list[str]] = [[] for _ in range(size)]
        self.passed: list[queue.Queue[torch.Tensor]] = [queue.Queue() for _ in range(size)]

    def all(self, rank: int, name: str, part: torch.Tensor) -> list[torch.Tensor]:
        self.calls[rank].append(name)
        self.said[rank] = part
        self.barrier.wait(60)
        heard = [part for part in self.said if part is not None]
        self.barrier.wait(60)
        assert len(heard) == self.size
        return heard


class ThreadCommunicator:
    """One rank's end of an `Exchange`."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self.rank, self.size = rank, exchange.size
        self.exchange = exchange

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.exchange.all(self.rank, "all_gather", part))

    def reduce_scatter(self, parts: torch.Tensor) -> torch.Tensor:
        heard = self.exchange.all(self.rank, "reduce_scatter", parts)
        return torch.stack([part[self.rank] for part in heard]).sum(dim=0)

    def all_to_all(self, parts: torch.Tensor) -> torch.Tensor:
        return torch.stack([part[self.rank] for part in self.exchange.all(self.rank, "all_to_all", parts)])

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.exchange.all(self.rank, "all_reduce", part)).sum(dim=0)

    def broadcast(self, part: torch.Tensor, root: int) -> torch.Tensor:
        return self.exchange.all(self.rank, "broadcast", part)[root].clone()

    def pass_on(self, part: torch.Tensor) -> Callable[[], object]:
        self.exchange.calls[self.rank].append("pass_on")
        if self.rank + 1 < self.size:
            self.exchange.passed[self.rank + 1].put(part)
        return lambda: None

    def take(self, like: torch.Tensor) -> torch.Tensor:
        self.exchange.calls[self.rank].append("take")
        return like if self.rank == 0 else self.exchange.passed[self.rank].get(timeout=60)


class Ranks:
    """Threads that run the same thing, one a rank; after each, all have made the same calls.

    Tokens are split over groups of `dcp` consecutive ranks, or over all. With `pcp`, so many times as many share the
    tokens of long forwards: rank r + i * size has what rank r has.
    """

    def __init__(self, size: int, form: str = "ag_rs", dcp: int | None = None, pcp: int = 1) -> None:
        self.exchange = Exchange(size * pcp)
        self.all = [ThreadCommunicator(self.exchange, rank) for rank in range(size * pcp)]
        self.parts: list[ThreadCommunicator] = []
        self.sharing = self.parted(size)
        groups: list[Any] = self.parted(dcp or size) if dcp != 1 else [Rehearsal(1)] * len(self.all)
        tokens: list[Any] = [None] * size if pcp == 1 else [TokenRanks(ranks) for ranks in self.parted(pcp, size)]
        self.merges = [HeadMerge(group, form, ranks) for group, ranks in zip(groups, tokens, strict=True)]
        self._threads = ThreadPoolExecutor(size * pcp)

    def parted(self, size: int, step: int = 1) -> list[ThreadCommunicator]:
        """Each rank's end of its group of `size` ranks, `step` apart."""
        if size == len(self.all):
            return self.all
        made = {}
        for rank in range(len(self.all)):
            place = rank // step % size
            exchange = made.setdefault(rank - place * step, Exchange(size))
            self.parts.append(ThreadCommunicator(exchange, place))
        return self.parts[-len(self.all) :]

    def __call__(self, task: Callable[[int], T]) -> list[T]:
        results = list(self._threads.map(task, range(self.exchange.size)))
        for exchange in {id(part.exchange): part.exchange for part in (*self.all, *self.parts)}.values():
            assert all(calls == exchange.calls[0] for calls in exchange.calls)
        return results


def layout_of(size: int, interleave: int, dcp: int | None = None, pcp: int = 1) -> ParallelLayout:
    """Decode context parallelism over `size` ranks, or over groups of `dcp` of them."""
    return ParallelLayout(tp=size, dcp=dcp or size, pcp=pcp, interleave=interleave)


def shares_of(model: PreTrainedModel, ranks: Ranks) -> list[PreTrainedModel]:
    """What each rank has of a model whose weights all of them share."""

    def share(rank: int) -> PreTrainedModel:
        split_model(copies[rank], ranks.sharing[rank])
        return copies[rank]

    copies = [copy.deepcopy(model) for _ in ranks.all]
    return ranks(share)


class RankedRunner:
    """As a `ModelRunner`, but every batch runs on all ranks, which must agree on every logit.

    With `split`, each has its share of the weights.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        geometry: CacheGeometry,
        blocks: int,
        form: str = "ag_rs",
        single_steps: bool = False,
        split: bool = False,
        types: StoredTypes = AS_COMPUTED,
    ) -> None:
        tp, dcp, pcp = geometry.layout.tp, geometry.layout.dcp, geometry.layout.pcp
        size = tp * pcp
        self.ranks = Ranks(tp, form, dcp, pcp)
        layouts = [inspect_model(model)] * size
        if split:
            models = shares_of(model, self.ranks)
            layouts = self.ranks(lambda rank: layout_of_share(layouts[0], models[rank], tp).over(dcp))
        else:
            models = [model if rank == 0 else copy.deepcopy(model) for rank in range(size)]
        merges = self.ranks.merges if dcp * pcp > 1 else [None] * size
        self.runners = [
            ModelRunner(model, stored_layout(layout, types), geometry, blocks, single_steps, merge)
            for model, layout, merge in zip(models, layouts, merges, strict=True)
        ]

    @property
    def arenas(self) -> list[torch.Tensor]:
        """The bytes of each rank, uint8 [blocks, block_bytes]."""
        return [runner.arena.data for runner in self.runners]

    def run(self, batch: RunBatch) -> RunResult:
        results = self.ranks(lambda rank: self.runners[rank].run(batch))
        assert all(torch.equal(result.logits, results[0].logits) for result in results[1:]), "ranks drift apart"
        return results[0]
