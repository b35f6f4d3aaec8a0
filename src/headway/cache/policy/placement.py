"""Which positions get a checkpoint.

A state checkpoint can weigh as much as the attention entries of 16,000 tokens (Kimi-K3), so it is placed where requests
come back to, not on a grid:

    prompt_end   the end of the prompt, less what must be recomputed anyway: serves the resend and the next turn
    answer_end   the end of the answer: serves the next turn; costs no copy, the running state is donated
    junction     where this prompt parts from a path that others took: serves whoever shares that part next
    breakpoint   positions that the caller marks
    boundary     message boundaries that the caller passes: the first (end of the instructions) and two of the last
                 ones, if they are expected to pay for their memory
    interval:N   every N tokens

How often and how soon requests come back to each kind is learned (`headway.cache.policy.reuse`) and used twice: to
admit boundaries, and by eviction.

Where later requests part from a conversation depends on what clients send and templates show: behind its last message,
where the generation prompt is no part of the next turn; before the last message, where another question is asked or the
last is edited; before the last two, where what comes with the question is new each turn. So the last ends are kinds of
their own, `boundary:-1`, `boundary:-2` and so on from the last, and the two that are expected to save most are taken.
Those that are not are remembered as if they had gone: requests that would have come back to them count all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from headway.cache.shape.prompt import Prompt
from headway.errors import ConfigError

__all__ = ["DEFAULT_PLACEMENT", "LAST_END", "Place", "Placement", "check_placement"]

LAST_END = "boundary:-"
"""How the kinds of the last message boundaries begin."""
_LAST_ENDS = 4
"""Message boundaries, from the last one, of which it is learned whether requests come back to them."""
DEFAULT_PLACEMENT = ("prompt_end", "answer_end", "junction", "breakpoint", "boundary")
"""Every kind but the grid, which is not placed where requests come back to."""
_KINDS = frozenset(DEFAULT_PLACEMENT)


def _interval(kind: str) -> int | None:
    head, _, number = kind.partition(":")
    if head != "interval":
        return None
    if not (number.isascii() and number.isdecimal() and len(number) <= 12) or int(number) < 1:
        raise ConfigError(f"placement={kind!r}: write interval:N with N at least 1, for example interval:4096")
    return int(number)


def check_placement(kinds: Iterable[str]) -> None:
    """Refuse unknown kinds of placement.

    Raises:
        ConfigError: Names the kinds that exist.
    """
    if isinstance(kinds, str) or not hasattr(kinds, "__iter__"):
        raise ConfigError(f"placement must be a list of kinds, not {kinds!r}")
    listed: Iterable[object] = kinds
    for kind in listed:
        if not isinstance(kind, str) or (_interval(kind) is None and kind not in _KINDS):
            known = ", ".join(DEFAULT_PLACEMENT)
            raise ConfigError(f"placement={kind!r} is unknown; known are {known} and interval:N")


class Place(NamedTuple):
    """A position that should get a checkpoint, and why."""

    position: int
    kind: str


class Placement:
    """Decides the positions of one request.

    Attributes:
        answer_end: Whether a finished request's state is kept.
        breakpoints: Whether positions that the caller marks are.
        junctions: Whether places where paths part are.
        interval: N of interval:N, or 0.
    """

    def __init__(self, kinds: Sequence[str], alignment: int, lookahead: int) -> None:
        """Placement of the given kinds on a grid of `alignment`, for groups with `lookahead`."""
        check_placement(kinds)
        self._kinds = frozenset(kinds)
        self._alignment = alignment
        self._lookahead = lookahead
        self.answer_end = "answer_end" in self._kinds
        self.breakpoints = "breakpoint" in self._kinds
        self.junctions = "junction" in self._kinds
        self.interval = min((n for n in map(_interval, kinds) if n), default=0)

    def floor(self, position: int) -> int:
        """The last position at or before `position` where a state can be exported."""
        return position // self._alignment * self._alignment

    def place(self, length: int, position: int) -> int:
        """The last position at or before `position` where a prompt of `length` tokens can get a checkpoint."""
        return self.floor(min(position, length - max(1, self._lookahead)))

    def next_interval(self, position: int) -> int | None:
        """The first position behind `position` that interval:N asks for, or None."""
        if not self.interval:
            return None
        beyond = (position // self._alignment + 1) * self._alignment  # the next place where a state can be exported
        return self.floor(-(-beyond // self.interval) * self.interval)

    def plan(self, prompt: Prompt, hit: int, junction: int | None, boundaries: Iterable[Place]) -> list[Place]:
        """Positions of (hit, end of the prompt) that should get a checkpoint while it is computed, ascending.

        Args:
            prompt: The prompt, with the positions that the caller marked.
            hit: Position from which it resumes; one less where a checkpoint can be kept at that very position.
            junction: Where it parts from a known path, or None.
            boundaries: Its message boundaries that were admitted.
        """
        length = len(prompt.tokens)
        last = self.place(length, length)
        wanted = {self.place(length, p): kind for p, kind in boundaries}
        if self.interval:
            place = self.next_interval(hit)
            while place is not None and place <= last:
                wanted[place] = f"interval:{self.interval}"
                place = self.next_interval(place)
        if "prompt_end" in self._kinds:
            wanted[last] = "prompt_end"
        if self.junctions and junction is not None:
            wanted[self.floor(junction)] = "junction"
        if prompt.breakpoints and self.breakpoints:
            wanted.update((self.place(length, p), "breakpoint") for p in prompt.breakpoints)
        if prompt.pin:
            wanted[self.place(length, prompt.pin)] = "breakpoint"
        return [Place(p, kind) for p, kind in sorted(wanted.items()) if p > hit]

    def telling(self, boundaries: Sequence[int]) -> list[Place]:
        """The message boundaries that requests may come back to: the first, then the last ones, from the last on."""
        ends = sorted(set(boundaries)) if boundaries and "boundary" in self._kinds else []
        last = [Place(p, f"{LAST_END}{i}") for i, p in enumerate(reversed(ends[1:]), start=1)]
        return [Place(p, "boundary") for p in ends[:1]] + last[:_LAST_ENDS]
