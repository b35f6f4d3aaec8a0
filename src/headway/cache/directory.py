"""Shadows at many sizes of memory over one stream of whole requests: what a cache would reuse, without the cache.

One tree serves all of them, so a request is looked up once. It remembers everything that it was told.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headway.cache.config import CacheConfig
from headway.cache.index.edge import Match
from headway.cache.index.pool import BlockPool
from headway.cache.index.shadow import EndedRequest, Shadows, shadow_of
from headway.cache.index.tree import PrefixTree
from headway.cache.policy.eviction import Adaptive, Lru
from headway.cache.policy.placement import Place, Placement
from headway.cache.shape.prompt import Prompt

__all__ = ["Directory"]


class Directory:
    """What least recently used, and the default policy, would reuse with pools of several sizes."""

    def __init__(self, config: CacheConfig, sizes: Sequence[int], *, adaptive: bool) -> None:
        """Nothing is known yet.

        Args:
            config: The cache; its number of blocks and its policy are not used.
            sizes: Blocks of each pool.
            adaptive: Run the default policy too, which takes about four times as long.
        """
        geometry, cost = config.geometry(), config.cost
        self._geometry, self._sizes, self._floats = geometry, list(sizes), not geometry.tail_tables
        self._placement = Placement(config.placement, config.checkpoint_alignment, geometry.lookahead)
        self._lru = [shadow_of(i, Lru(), geometry, cost) for i in range(len(sizes))]
        self._adaptive: list[Shadows] = []
        number = len(sizes)
        for _ in sizes if adaptive else ():
            self._adaptive.append(Shadows(Adaptive(), geometry, cost, number))
            number += len(self._adaptive[-1].each)
        self._tree = PrefixTree(geometry.lookahead, (), BlockPool(1), floats=False)
        self._tree.lay([*self._lru, *(one for shadows in self._adaptive for one in shadows.each)])

    def request(self, prompt: Prompt, sequence: bytes) -> tuple[list[int], list[int]]:
        """A request comes and ends.

        Args:
            prompt: Its prompt.
            sequence: int32 as bytes, all of it that is computed, the prompt first.

        Returns:
            The positions at which it resumes at each size: under least recently used, and under the default policy.
        """
        tree, length = self._tree, len(prompt.tokens)
        at = tree.find(prompt.namespace, prompt.data)
        places = [] if self._floats else list(self._places(prompt, at))
        goes_on = at.goes_on(length)
        limit, start = min(at.position, length - 1), at if at.position else Match(tree.root(prompt.namespace), 0)
        known = tree.follow(start, sequence[4 * start.position :])
        end = tree.enter(known, sequence[4 * known.position :])
        total = end.position
        if self._placement.answer_end and not self._floats and total and (not places or places[-1].position < total):
            places.append(Place(total, "answer_end"))
        edges = [edge for edge in end.edge.path() if edge.start < total]
        tree.shade(edges)
        told = EndedRequest(edges, min(limit, total), total, [p for p in places if p.position <= total], goes_on)
        return self._run(told, length)

    def _run(self, told: EndedRequest, length: int) -> tuple[list[int], list[int]]:
        lru, adaptive = [0] * len(self._sizes), [0] * len(self._adaptive)
        for i, blocks in enumerate(self._sizes):
            if not told.total or (
                not self._geometry.fits_anyway(blocks, length) and not self._geometry.fits(blocks, length, 0)
            ):
                continue
            lru[i] = self._lru[i].request(told, blocks)
            if adaptive:
                self._adaptive[i].ended(told, blocks)
                adaptive[i] = self._adaptive[i].hit
        return lru, adaptive

    def _places(self, prompt: Prompt, at: Match) -> Iterator[Place]:
        """Where a prompt could leave checkpoints, whatever the hit is."""
        length = len(prompt.tokens)
        parted = 0 < at.position < length - self._geometry.lookahead and (
            at.position < at.edge.end or bool(at.edge.children)
        )
        first = [place for place in self._placement.telling(prompt.boundaries) if place.kind == "boundary"]
        yield from self._placement.plan(prompt, 0, at.position if parted else None, first)
