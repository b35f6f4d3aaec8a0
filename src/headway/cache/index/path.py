"""What is known of one prompt's path, for tools that show it."""

from __future__ import annotations

from typing import NamedTuple

from headway.cache.index.edge import Edge, Match
from headway.cache.index.explain import Evicted

__all__ = ["KeptCheckpoint", "Path", "PathPart", "describe_path"]


class KeptCheckpoint(NamedTuple):
    """A checkpoint on a path.

    Attributes:
        position: Tokens before it.
        kind: Kind of placement that took it.
        uses: How often it was wanted.
        pinned: A pin protects it.
    """

    position: int
    kind: str
    uses: int
    pinned: bool


class PathPart(NamedTuple):
    """A part of a path between two places where known sequences part.

    Attributes:
        start: Its first position.
        stop: Position after its last, or where the prompt leaves it.
        end: Where the part itself ends; above `stop` if the prompt leaves it, or ends, inside.
        resident: Position up to which its entries are kept.
        computed: Position up to which it was ever computed.
        checkpoints: What can be resumed at, ascending; empty in models that can resume anywhere.
        lost: What went, ascending.
        pins: Positions up to which a pin protects the path.
        leases: Running leases that end on it.
        branches: Known continuations at its end.
    """

    start: int
    stop: int
    end: int
    resident: int
    computed: int
    checkpoints: tuple[KeptCheckpoint, ...]
    lost: tuple[Evicted, ...]
    pins: tuple[int, ...]
    leases: int
    branches: int


class Path(NamedTuple):
    """What is known of a prompt's path.

    Attributes:
        matched: Positions that follow a known path (tokens, less the lookahead of draft groups).
        parts: From the first token on, without gap.
    """

    matched: int
    parts: tuple[PathPart, ...]


def describe_path(at: Match, now: float) -> Path:
    """The path to `at` as plain records."""
    edges = list(at.edge.path())[::-1]
    return Path(at.position, tuple(_part(edge, at.position, now) for edge in edges))


def _part(edge: Edge, stop: int, now: float) -> PathPart:
    return PathPart(
        edge.start,
        min(edge.end, stop),
        edge.end,
        edge.resident,
        edge.computed,
        tuple(KeptCheckpoint(c.position, c.kind, c.uses, c.pinned) for c in edge.checkpoints if not c.floats),
        tuple(
            Evicted(c.position, c.kind, c.cause, now - c.when, c.uses)
            for _, c in sorted(edge.lost.items())
            if c.cause is not None
        ),
        tuple(sorted(pin.position for pin in edge.pins)),
        len(edge.anchors),
        len(edge.children),
    )
