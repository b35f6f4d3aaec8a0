"""Saying why: what became of every token of a prompt, at lookup.

Each token of a prompt lies on exactly one line: reused, or lost for one of a fixed list of reasons. Summed over
admitted requests the lines are a waterfall: without the lines that no memory could save (`NOTHING_MATCHED`, `PARTED`,
`LAST_TOKEN`, `OTHER_NAMESPACE`) it starts at the hit rate of an endless memory and ends at the one achieved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from headway.cache.index.tree import Match, Node

__all__ = ["Explanation", "Loss", "Reason", "Waterfall", "explain_match"]


class Reason(Enum):
    """Why tokens of a prompt were not reused."""

    NOTHING_MATCHED = "nothing_matched"
    """No known prompt begins like this one."""
    PARTED = "parted"
    """Known prompts go on differently from here, or end."""
    STATE_NEVER_TAKEN = "state_never_taken"
    """The tokens were computed, but nobody kept a checkpoint there."""
    EVICTED = "evicted"
    """What was kept had to make room."""
    LOOKAHEAD = "lookahead"
    """Entries of a draft depend on later tokens that did not match."""
    LAST_TOKEN = "last_token"
    """The last token of a prompt is always computed: its logits are the answer."""
    OTHER_NAMESPACE = "other_namespace"
    """The tokens are known under another model, adapter or cache salt only."""
    STILL_COMPUTING = "still_computing"
    """A running request is computing them now."""
    TIER_MISSED = "tier_missed"
    """Reserved, as there are no lower tiers yet: no lower tier of memory had them."""
    TIER_FAILED = "tier_failed"
    """Reserved: a lower tier had them, but the load failed."""


class Loss(NamedTuple):
    """Positions [start, stop) of a prompt were not reused, for one reason.

    Attributes:
        reason: Why.
        start: First position.
        stop: Position after the last.
        detail: More for a human: when and by what a checkpoint went, for example. May be empty.
    """

    reason: Reason
    start: int
    stop: int
    detail: str = ""


@dataclass(slots=True)
class Explanation:
    """What became of a prompt's tokens: [0, hit_tokens) reused, the rest on the lines of `losses`.

    Attributes:
        prompt_tokens: Length of the prompt.
        hit_tokens: Tokens reused.
        matched: Tokens that follow a known path.
        losses: Lines that cover [hit_tokens, prompt_tokens), ascending, without gap or overlap.
    """

    prompt_tokens: int
    hit_tokens: int
    matched: int
    losses: tuple[Loss, ...]

    @property
    def reasons(self) -> frozenset[Reason]:
        """The reasons that occur."""
        return frozenset(loss.reason for loss in self.losses)

    def __str__(self) -> str:
        """A sentence a line."""
        lines = [f"{self.hit_tokens} of {self.prompt_tokens} tokens reused, {self.matched} follow a known path"]
        for loss in self.losses:
            tail = f" ({loss.detail})" if loss.detail else ""
            lines.append(f"  [{loss.start}, {loss.stop}) {loss.reason.value}: {loss.stop - loss.start} tokens{tail}")
        return "\n".join(lines)


@dataclass
class Waterfall:
    """Tokens of all admitted requests, each on exactly one line.

    Attributes:
        requests: Requests admitted.
        prompt_tokens: Their prompt tokens.
        reused: Tokens that started from memory.
        lost: Tokens lost, by reason.
    """

    requests: int = 0
    prompt_tokens: int = 0
    reused: int = 0
    lost: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(Reason, 0))

    def add(self, explanation: Explanation) -> None:
        """Count one admitted request."""
        self.requests += 1
        self.prompt_tokens += explanation.prompt_tokens
        self.reused += explanation.hit_tokens
        for loss in explanation.losses:
            self.lost[loss.reason] += loss.stop - loss.start


def explain_match(
    at: Match, length: int, hit: int, matched: int, *, tail: bool, now: float, elsewhere: int = 0
) -> Explanation:
    """Explain a lookup.

    Args:
        at: How far the prompt follows a known path.
        length: Tokens of the prompt.
        hit: Tokens reused.
        matched: Tokens that follow a known path (`at.position` and the lookahead behind it).
        tail: The model resumes at checkpoints only.
        now: Clock, for the age of evictions.
        elsewhere: Tokens that another namespace knows, where this one knows nothing.
    """
    usable = max(hit, min(at.position, length - 1))
    capped = max(usable, min(matched, length - 1))
    losses: list[Loss] = []
    if hit < usable:
        computed = max(hit, min(_seen(at), usable))
        losses.extend(_forgotten(at, hit, computed, tail=tail, now=now))
        if computed < usable:
            reason = Reason.STILL_COMPUTING if at.node.active else Reason.STATE_NEVER_TAKEN
            losses.append(Loss(reason, computed, usable))
    if usable < capped:
        losses.append(Loss(Reason.LOOKAHEAD, usable, capped, "a draft's entries depend on these tokens"))
    if capped < matched:
        losses.append(Loss(Reason.LAST_TOKEN, capped, matched))
    if elsewhere:
        losses.append(Loss(Reason.OTHER_NAMESPACE, 0, elsewhere))
    if max(matched, elsewhere) < length:
        reason = Reason.PARTED if matched else Reason.NOTHING_MATCHED
        losses.append(Loss(reason, max(matched, elsewhere), length))
    return Explanation(length, hit, matched, tuple(losses))


def _seen(at: Match) -> int:
    """Position up to which the matched path was ever computed."""
    for node in at.node.path():
        if node.seen > node.start:
            return min(node.seen, at.position)
    return 0


def _forgotten(at: Match, hit: int, computed: int, *, tail: bool, now: float) -> Iterator[Loss]:
    """Lines for [hit, computed): tokens that were computed once and cannot be reused now."""
    gone = at.deepest_lost(hit, computed).values() if tail else ()
    lost = max(gone, key=lambda one: (one.position, one.when), default=None)
    if lost is not None:
        age = f"the {lost.kind} checkpoint at {lost.position} was {lost.cause} {now - lost.when:.1f} s ago"
        yield Loss(Reason.EVICTED, hit, lost.position, age)
        hit = lost.position
    if hit < computed:
        detail = "" if tail else _trimmed(at, now)
        yield Loss(Reason.STATE_NEVER_TAKEN if tail else Reason.EVICTED, hit, computed, detail)


def _trimmed(at: Match, now: float) -> str:
    nodes: Iterator[Node] = at.node.path()
    trimmed = [node.trimmed for node in nodes if node.trimmed is not None]
    if not trimmed:
        return ""
    when, cause = trimmed[-1]
    return f"{cause} {now - when:.1f} s ago"
