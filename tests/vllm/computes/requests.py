"""A random workload that shares, made before it runs: the same requests whatever the cache and its timing."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tests.vllm.computes.models import VOCABULARY

__all__ = ["Plan", "plan_requests"]

_LONGEST = 500
"""Tokens of prompt and answer together."""


@dataclass
class Plan:
    """One request.

    Attributes:
        parent: The request whose prompt it shares, or -1.
        keep: Tokens of that prompt that it takes.
        turn: It takes all of that prompt and answer.
        tail: Tokens of its own behind them.
        length: Tokens to answer.
        arrives: Step from which on it may be asked.
        aborts: Steps after which it is given up, or 0.
    """

    parent: int
    keep: int
    turn: bool
    tail: list[int] = field(default_factory=list)
    length: int = 8
    arrives: int = 0
    aborts: int = 0


def plan_requests(seed: int, count: int) -> list[Plan]:
    """`count` requests: new prompts, the same again, siblings that part anywhere, and next turns."""
    draw = random.Random(seed)
    plans: list[Plan] = []
    sizes: list[int] = []
    arrives = 0
    for _ in range(count):
        arrives += draw.choice((0, 0, 1, 3, 9))
        made = _one(draw, plans, sizes)
        made.arrives = arrives
        if draw.random() < 0.08:
            made.aborts = draw.randrange(1, 12)
        plans.append(made)
        base = sizes[made.parent] + plans[made.parent].length if made.turn else made.keep
        sizes.append(base + len(made.tail))
    return plans


def _one(draw: random.Random, plans: list[Plan], sizes: list[int]) -> Plan:
    length = draw.choice((1, 8, 24, 70))
    kind = draw.choice(("new", "again", "sibling", "sibling", "turn", "turn")) if plans else "new"
    parent = draw.choice((draw.randrange(len(plans)), len(plans) - 1)) if plans else -1
    if kind == "turn":
        able = [i for i, one in enumerate(plans) if not one.aborts and sizes[i] + one.length + 60 + length < _LONGEST]
        if able:
            return Plan(draw.choice(able[-4:]), 0, True, _text(draw, draw.randrange(1, 60)), length)
        kind = "new"
    if kind == "new":
        return Plan(-1, 0, False, _text(draw, draw.choice((2, 30, 64, 150, 300, 400))), length)
    # A sibling takes a part of its parent's prompt as that one is when it is asked: a turn's holds an answer.
    size = sizes[parent]
    if kind == "again" or size < 2:
        return Plan(parent, size, False, [], min(length, _LONGEST - size))
    keep = draw.randrange(1, min(size, _LONGEST - 160))
    return Plan(parent, keep, False, _text(draw, draw.randrange(1, 90)), length)


def _text(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(3, VOCABULARY) for _ in range(length)]
