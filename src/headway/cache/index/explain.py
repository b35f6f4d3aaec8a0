"""Saying why: what became of every token of a prompt, at lookup.

Each token of a prompt lies on exactly one line: reused, or lost for one of a fixed list of reasons. Summed over
admitted requests the lines are a waterfall: without the lines that no memory could save (`NOTHING_MATCHED`, `PARTED`,
`LAST_TOKEN`, `OTHER_NAMESPACE`) it starts at the hit rate of an endless memory and ends at the one achieved.

A reason is a claim about the tokens of its line, and it is read from records that lie at positions: what was computed,
which checkpoints went and from where. Nothing is concluded from what merely lies on the same edge.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from headway.cache.index.below import Below, BelowLoss
from headway.cache.index.displaced import Displaced
from headway.cache.index.edge import Match
from headway.cache.policy.reuse import PATH
from headway.sizes import counted

__all__ = ["Evicted", "Explanation", "Loss", "Reason", "Waterfall", "explain_match"]


class Reason(Enum):
    """Why tokens of a prompt were not reused."""

    NOTHING_MATCHED = "nothing_matched"
    """No known prompt begins like this one (with draft groups: for more tokens than they look ahead)."""
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
    NO_ROOM = "no_room"
    """The pool cannot hold the whole prompt together with what resuming here would copy, so the hit was given up; or
    requests that run left no room to read it back from a lower tier."""
    COMPUTED_ANEW = "computed_anew"
    """Going on from here would have cost more than computing the tokens anew: the model continues token by token, or a
    lower tier of memory is slower than that."""
    OTHER_NAMESPACE = "other_namespace"
    """The tokens are known under another model, adapter or cache salt only."""
    STILL_COMPUTING = "still_computing"
    """A running request is computing them, or will."""
    TIER_MISSED = "tier_missed"
    """A lower tier of memory was said to have them, and they were gone."""
    TIER_FAILED = "tier_failed"
    """A lower tier of memory had them, and reading them back failed."""

    __hash__ = object.__hash__  # every lease counts its reasons: without the detour over the name


class Evicted(NamedTuple):
    """What went: more about a line of `Reason.EVICTED`.

    Attributes:
        position: The position that could be resumed at.
        kind: Kind of placement that had taken the checkpoint there; "path" in models that need no checkpoints.
        cause: Why it went: "evicted", "unreachable".
        age: Seconds since.
        uses: How often it was wanted, before and since; told of paths only.
    """

    position: int
    kind: str
    cause: str
    age: float
    uses: int = 0

    def __str__(self) -> str:
        """As a part of a sentence."""
        if self.kind == PATH:
            return f"{self.cause} {self.age:.1f} s ago"
        return f"the {self.kind} checkpoint at {self.position} was {self.cause} {self.age:.1f} s ago"


class Loss(NamedTuple):
    """Positions [start, stop) of a prompt were not reused, for one reason.

    Attributes:
        reason: Why.
        start: First position.
        stop: Position after the last.
        detail: What went, where the reason is `EVICTED`; what a lower tier did not give, where it is `TIER_MISSED` or
            `TIER_FAILED`; else None.
    """

    reason: Reason
    start: int
    stop: int
    detail: Evicted | BelowLoss | None = None


@dataclass(slots=True)
class Explanation:
    """What became of a prompt's tokens: first those reused, the rest on the lines of `losses`.

    Attributes:
        prompt_tokens: Length of the prompt.
        hit_tokens: Tokens reused from the cache's own memory.
        matched: Tokens that follow a known path.
        losses: Lines that cover [hit_tokens + loaded_tokens, prompt_tokens), ascending, without gap or overlap.
        displaced: Tokens among those lost that are known behind another text than here; looked for only where somebody
            asks for an explanation, so None on a lease.
        loaded_tokens: Tokens behind the hit that are read back from lower tiers of memory.
    """

    prompt_tokens: int
    hit_tokens: int
    matched: int
    losses: tuple[Loss, ...]
    displaced: Displaced | None = None
    loaded_tokens: int = 0

    @property
    def reasons(self) -> frozenset[Reason]:
        """The reasons that occur."""
        return frozenset(loss.reason for loss in self.losses)

    def without_hit(self, why: Reason) -> Explanation:
        """The same prompt when its hit is given up."""
        given_up = (Loss(why, 0, self.hit_tokens),) if self.hit_tokens else ()
        return Explanation(self.prompt_tokens, 0, self.matched, given_up + self.losses)

    def without_room(self, position: int) -> Explanation:
        """The same prompt when there is no room to read back up to `position` what lies below."""
        return replace(self, losses=_overwritten(self.losses, Loss(Reason.NO_ROOM, self.hit_tokens, position)))

    def with_below(self, below: Below) -> Explanation:
        """The same prompt when lower tiers are read: what they give is not lost, and what they did not give is theirs.

        What they know, the tree may not: where nothing matched, the prompt parts from what is known behind what is
        read.
        """
        start, losses = max(self.hit_tokens, below.position), self.losses
        losses = _overwritten(losses, Loss(Reason.COMPUTED_ANEW, start, min(below.declined, self.prompt_tokens)))
        for one in sorted(below.losses, key=lambda loss: -loss.position):
            reason = Reason.TIER_MISSED if one.missed else Reason.TIER_FAILED
            losses = _overwritten(losses, Loss(reason, start, min(one.position, self.prompt_tokens), one))
        if start > self.hit_tokens:
            last = Reason.LAST_TOKEN if start == self.prompt_tokens - 1 else Reason.PARTED
            losses = tuple(
                loss._replace(
                    start=max(loss.start, start), reason=last if loss.reason is Reason.NOTHING_MATCHED else loss.reason
                )
                for loss in losses
                if loss.stop > start
            )
        matched = max([self.matched, start, below.declined, *(loss.position for loss in below.losses)])
        return replace(self, matched=matched, losses=losses, loaded_tokens=start - self.hit_tokens)

    def __str__(self) -> str:
        """A sentence per line."""
        length = counted(self.prompt_tokens, "token")
        loaded = f", {self.loaded_tokens:,} read back from lower tiers" if self.loaded_tokens else ""
        lines = [f"{self.hit_tokens:,} of {length} reused{loaded}, {self.matched:,} follow a known path"]
        for loss in self.losses:
            tail = "" if loss.detail is None else f" ({loss.detail})"
            place = f"[{loss.start:,}, {loss.stop:,})"
            lines.append(f"  {place} {loss.reason.value}: {counted(loss.stop - loss.start, 'token')}{tail}")
        return "\n".join(lines if self.displaced is None else [*lines, f"  {self.displaced}"])


@dataclass
class Waterfall:
    """Tokens of all admitted requests, each on exactly one line.

    Attributes:
        requests: Requests admitted.
        prompt_tokens: Their prompt tokens.
        reused: Tokens that started from memory.
        lost: Tokens lost, by reason.
        loaded: Tokens that were read back from lower tiers.
    """

    requests: int = 0
    prompt_tokens: int = 0
    reused: int = 0
    lost: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(Reason, 0))
    loaded: int = 0

    def add(self, explanation: Explanation) -> None:
        """Count one admitted request."""
        self.requests += 1
        self.prompt_tokens += explanation.prompt_tokens
        self.reused += explanation.hit_tokens
        self.loaded += explanation.loaded_tokens
        for loss in explanation.losses:
            self.lost[loss.reason] += loss.stop - loss.start


def _overwritten(losses: tuple[Loss, ...], new: Loss) -> tuple[Loss, ...]:
    """`losses`, with `new` in place of what they say of its tokens."""
    if new.start >= new.stop:
        return losses
    before = [loss._replace(stop=min(loss.stop, new.start)) for loss in losses if loss.start < new.start]
    behind = [loss._replace(start=max(loss.start, new.stop)) for loss in losses if loss.stop > new.stop]
    return (*before, new, *behind)


def explain_match(
    at: Match, length: int, hit: int, matched: int, elsewhere: int, *, floats: bool, now: float
) -> Explanation:
    """Explain a lookup.

    Args:
        at: How far the prompt follows a known path.
        length: Tokens of the prompt.
        hit: Tokens reused.
        matched: Tokens that follow a known path (`at.position` and the lookahead behind it).
        floats: The model can resume anywhere: it has no windows, chunks or states.
        now: Clock, for the age of evictions.
        elsewhere: Tokens that another namespace knows.
    """
    usable = max(hit, min(at.position, length - 1))
    capped = max(usable, min(matched, length - 1))
    losses: list[Loss] = []
    if hit < usable:
        end = next((edge.computed for edge in at.edge.path() if edge.computed > edge.start), 0)
        computed = max(hit, min(end, usable))
        if hit < computed:
            losses += _trimmed(at, hit, computed, now) if floats else _unkept(at, hit, computed, now)
        if computed < usable:  # what is known and not computed lies before a running lease's place
            losses.append(Loss(Reason.STILL_COMPUTING, computed, usable))
    if usable < capped:
        losses.append(Loss(Reason.LOOKAHEAD, usable, capped))
    if capped < matched:
        losses.append(Loss(Reason.LAST_TOKEN, capped, matched))
    if matched < elsewhere:
        losses.append(Loss(Reason.OTHER_NAMESPACE, matched, elsewhere))
    if max(matched, elsewhere) < length:
        reason = Reason.PARTED if matched else Reason.NOTHING_MATCHED
        losses.append(Loss(reason, max(matched, elsewhere), length))
    return Explanation(length, hit, matched, tuple(losses))


def _unkept(at: Match, hit: int, computed: int, now: float) -> Iterator[Loss]:
    """Lines for [hit, computed) of a model with checkpoints: tokens that were computed and cannot be reused."""
    for lost in at.lost(hit, computed):
        if lost.cause is not None:
            detail = Evicted(lost.position, lost.kind, lost.cause, now - lost.when)
            yield Loss(Reason.EVICTED, hit, lost.position, detail)
            hit = lost.position
            break
    if hit < computed:
        yield Loss(Reason.STATE_NEVER_TAKEN, hit, computed)


def _trimmed(at: Match, hit: int, computed: int, now: float) -> Iterator[Loss]:
    """The line for [hit, computed) of a model that can resume anywhere: what was computed was kept, and went."""
    trims = [edge.trim for edge in at.edge.path() if edge.end > hit and edge.trim is not None]
    detail = Evicted(hit, PATH, trims[-1].cause, now - trims[-1].when) if trims else None
    yield Loss(Reason.EVICTED, hit, computed, detail)
