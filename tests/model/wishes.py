"""Pins and breakpoints: what becomes of each, and that what is pinned stays and nothing else does."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.model.lives import Live, Lives
from tests.model.worlds import PIN_SECONDS

from headway.cache import Outcome, Prompt

__all__ = ["Pinned", "Wishes"]


@dataclass
class Pinned:
    """A prefix under a pin: its namespace, position and tokens (lookahead included), and when the pin ends."""

    namespace: int
    position: int
    tokens: list[int]
    until: float


@dataclass
class Wishes(Lives):
    """What was wished for.

    Attributes:
        pins: Pins by the key of the position that they protect.
        outcomes: Outcomes seen so far of every running lease's wishes, by row.
        refused: What the counters must say.
    """

    pins: dict[int, Pinned] = field(default_factory=dict)
    outcomes: dict[int, list[Outcome]] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)

    def check(self) -> None:
        """Judge what became of wishes since the last time, and whether everything pinned is there."""
        super().check()
        for live in self.lives:
            self.judge_wishes(live)
        assert self.cache.counters.refused == dict(self.refused), "refused wishes are counted wrongly"
        self._check_pins()

    def expect_wishes(self, live: Live) -> None:
        """What the wishes of a new lease must be."""
        prompt, lease, n = live.lease.prompt, live.lease, live.prompt_length
        asked = [("breakpoint", p) for p in prompt.breakpoints] + ([("pin", prompt.pin)] if prompt.pin else [])
        last = n - max(1, self.geometry.lookahead)
        grid = self.world.config.checkpoint_alignment if self.tails else 1
        right = sorted((kind, p, min(p, last) // grid * grid) for kind, p in asked)
        assert sorted((w.kind, w.asked, w.position) for w in lease.wishes) == right, f"{lease.wishes}, right is {right}"
        self.outcomes[live.row] = [Outcome.PENDING] * len(lease.wishes)
        self.judge_wishes(live)

    def judge_wishes(self, live: Live, ended: bool = False) -> None:
        """Every outcome that has come since the last time must be true now."""
        seen = self.outcomes.get(live.row)
        if seen is None:
            return
        for i, wish in enumerate(live.lease.wishes):
            if wish.outcome is seen[i]:
                if wish.outcome is Outcome.PENDING:
                    early = live.lane.computed < wish.position and live.publish and live.attached and not ended
                    assert early, f"{wish} is pending at {live.lane.computed}"
                continue
            assert seen[i] is Outcome.PENDING, f"{wish} was {seen[i]}"
            seen[i] = wish.outcome
            if wish.outcome is not Outcome.KEPT:
                self.refused[f"{wish.kind}:{wish.outcome.value}"] += 1
            wrong = getattr(self, "_" + wish.outcome.value)(live, wish, ended)
            assert not wrong, f"{wish} is not true: {wrong}"

    # What speaks against an outcome.

    def _there(self, live: Live, position: int) -> bool:
        if not 0 < position <= len(live.lane.path) - 1 - self.geometry.lookahead:
            return False
        if self.tails:
            return live.lane.path[position + self.geometry.lookahead] in self.oracle.checkpoints
        return self.oracle.resident_to(live.lane.path) >= position

    def _pending(self, live: Live, wish: Any, ended: bool) -> str:
        return "it had an outcome"

    def _kept(self, live: Live, wish: Any, ended: bool) -> str:
        if not self._there(live, wish.position):
            return "nothing can resume there"
        if wish.kind == "pin":
            key = live.lane.path[wish.position + self.geometry.lookahead]
            seconds = live.lease.prompt.pin_seconds
            until = self.now + (PIN_SECONDS if seconds is None else seconds)
            if key in self.pins and self.pins[key].until > self.now:
                until = max(until, self.pins[key].until)
            tokens = live.tokens[: wish.position + max(1, self.geometry.lookahead)]
            self.pins[key] = Pinned(live.namespace, wish.position, tokens, until)
        return ""

    def _no_checkpoint(self, live: Live, wish: Any, ended: bool) -> str:
        if wish.position > live.lease.hit.tokens:
            return f"the prompt resumed at {live.lease.hit.tokens}"
        return "there is one" if self._there(live, wish.position) else ""

    def _no_room(self, live: Live, wish: Any, ended: bool) -> str:
        if not live.lease.hit.tokens < wish.position <= live.lane.computed:
            return f"the lease is at {live.lane.computed}"
        if self.world.roomy or not self.stateful:
            return "there was room"
        return "there is one" if self._there(live, wish.position) else ""

    def _pin_share(self, live: Live, wish: Any, ended: bool) -> str:
        if not self._there(live, wish.position):
            return "nothing can resume there"
        held = [(pin.position, pin.until) for pin in self.pins.values() if pin.until > self.now]
        most = sum(self._most_pinned(position) for position, _ in [*held, (wish.position, 0.0)])
        config = self.world.config
        # A pin may also not take the room that its own request needs to go on alone.
        needed = most + self._most_pinned(live.prompt_length) + self.geometry.peak_blocks(live.prompt_length)
        enough = most <= config.pin_share * config.blocks and needed <= config.blocks
        return f"pins take {most} blocks at most" if enough else ""

    def _most_pinned(self, position: int) -> int:
        return sum(t.blocks_for(min(position, t.window or t.chunk or position)) + 1 for t in self.geometry.tables)

    def _not_placed(self, live: Live, wish: Any, ended: bool) -> str:
        placed = "breakpoint" in self.world.config.placement or not self.tails
        return "breakpoints are placed" if placed or wish.kind == "pin" else ""

    def _not_stored(self, live: Live, wish: Any, ended: bool) -> str:
        return "" if not live.publish or not live.attached else "the lease publishes"

    def _ended(self, live: Live, wish: Any, ended: bool) -> str:
        return "" if ended and live.lane.computed < wish.position else f"the lease is at {live.lane.computed}"

    # What is pinned.

    def pins_on(self, path: list[int]) -> list[int]:
        """Keys of the pins that hold on a path."""
        on = set(path)
        return [key for key, pin in self.pins.items() if key in on and pin.until > self.now]

    def _check_pins(self) -> None:
        """Whatever is pinned can be resumed at exactly there, within the share of pins; nothing else is pinned."""
        stats = self.stats
        if not self.pins:
            assert stats.pinned == 0
            return
        for key in [key for key, pin in self.pins.items() if pin.until <= self.now]:
            del self.pins[key]
        under: set[int] = set()
        for pin in self.pins.values():
            hit = self.cache.lookup(Prompt(self.spelled(pin.tokens), namespace=pin.namespace))
            assert hit.tokens == pin.position, f"of {pin.position} pinned tokens {hit.tokens} can be reused"
            for table in self.geometry.tables:
                under.update(hit.blocks(table.index).tolist())
        share = self.world.config.pin_share * self.world.config.blocks
        assert len(under) <= share, f"{len(under)} blocks are pinned, of at most {share}"
        assert stats.pinned <= len(under)
        assert self.lives or stats.pinned == len(under), f"{stats.pinned} blocks are pinned, right is {len(under)}"
