"""Requests come: lookups are judged, prompts are leased or refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from tests.model.lives import IMAGES, PLACEHOLDER, Live
from tests.model.oracle import due_positions
from tests.model.shadow import Lane, first_needed
from tests.model.wishes import Wishes
from tests.model.worlds import Plan, Probe

from headway.cache import Media, Prompt, Reason, TableKind
from headway.errors import UnservableError

__all__ = ["Arrivals"]

_BEGIN = 1


@dataclass
class Arrivals(Wishes):
    """What happens before the first step of a request."""

    def start(self, plan: Plan) -> Live | None:
        """Look up and lease a prompt. None where it is refused."""
        namespace, tokens = self._prompt_tokens(plan)
        if not tokens:
            return None
        n = len(tokens)
        prompt = Prompt(
            self.spelled(tokens),
            namespace=namespace,
            boundaries=tuple(sorted({max(1, n * e // 1000) for e in plan.edges})),
            breakpoints=tuple(sorted({max(1, n * m // 1000) for m in plan.marks})),
            pin=n * plan.pin // 1000,
            pin_seconds=plan.pin_seconds,
            no_store=plan.no_store,
        )
        return self._admit(prompt, plan.flavour, own_blocks=plan.own_blocks)

    def _admit(self, prompt: Any, flavour: int, *, own_blocks: bool = False) -> Live | None:
        tokens = prompt.tokens.tolist()
        path = self.names.path(prompt.namespace, tokens)
        hit = self.look(prompt)
        parted = self._parting(path, hit.matched)
        free = self._pool()
        try:
            lease = self.cache.lease(prompt, hit, own_blocks=own_blocks)
        except UnservableError as refusal:
            fits = self._most_blocks(len(tokens)) <= self.world.config.blocks
            assert not fits or "pinned" in str(refusal), "refused, and it would fit"  # noqa: PT017
            assert self._pool() == free, "a refused request changed the pool"
            return None
        assert self._least_blocks(len(tokens)) <= self.world.config.blocks, "admitted, and it can never fit"
        self._judge_lease_story(prompt, path, lease, hit)
        self.namespaces.add(prompt.namespace)
        self.admitted += len(tokens)
        self.past.append((prompt.namespace, tokens))
        del self.past[:-12]
        if lease.hit.tokens != hit.tokens:
            # The pool can hold the prompt, but not beside what it would copy from.
            assert lease.hit.tokens == 0
            assert not self.world.roomy
            assert lease.explanation.losses[0].reason is Reason.NO_ROOM
        assert lease.computed == lease.hit.tokens, "a lease does not begin at its hit"
        hit = lease.hit
        assert lease.tokens == len(tokens)
        due = due_positions(
            length=len(tokens),
            hit=hit.tokens,
            parted=parted,
            breakpoints=prompt.breakpoints,
            placement=self.world.config.placement,
            lookahead=self.geometry.lookahead,
            alignment=self.world.config.checkpoint_alignment,
        )
        lane = Lane(int(lease.row), path, hit.tokens, hit.tokens, hit.tokens)
        assert lane.row not in {live.row for live in self.lives}, "two leases in one row"
        live = Live(lease, prompt.namespace, list(tokens), len(tokens), not prompt.no_store, flavour, due, lane)
        live.own_blocks = [{} for _ in self.geometry.tables] if own_blocks else None
        self.lives.append(live)
        self.oracle.want(path)
        self.expect_wishes(live)
        self.check()
        return live

    def look(self, prompt: Any) -> Any:
        """Look a prompt up: it must change nothing, be sound, be the best, and give true reasons."""
        before, tokens = self._pool(), prompt.tokens.tolist()
        path = self.names.path(prompt.namespace, tokens)
        hit = self.cache.lookup(prompt)
        self.oracle.judge_hit(path, hit.tokens, hit.matched, self._running())
        self._check_bytes(hit, path)
        story = self.cache.explain(prompt)
        assert (story.hit_tokens, story.matched) == (hit.tokens, hit.matched), "explain and lookup disagree"
        assert Reason.NO_ROOM not in story.reasons, "only a lease gives a hit up"
        self._judge_story(prompt, path, story)
        self.oracle.judge_path(path, self.cache.path(prompt), hit.matched)
        assert self._pool() == before, "a lookup changed the pool"
        return hit

    def _running(self) -> list[list[int]]:
        """Prompts that are being computed for others too."""
        publishing = [live for live in self.lives if live.publish and live.attached and not live.doomed]
        return [live.lane.path[: live.prompt_length + 1] for live in publishing]

    def _judge_story(self, prompt: Any, path: list[int], story: Any) -> None:
        tokens = prompt.tokens.tolist()
        others = [self.names.path(other, tokens) for other in self.namespaces if other != prompt.namespace]
        self.oracle.judge_story(path, story, self._running(), others)

    def _judge_lease_story(self, prompt: Any, path: list[int], lease: Any, hit: Any) -> None:
        """What a lease says of its prompt: as it was before the lease entered it."""
        story = lease.explanation
        assert (story.hit_tokens, story.matched) == (lease.hit.tokens, hit.matched)
        self._judge_story(prompt, path, story)

    def _check_bytes(self, hit: Any, path: list[int]) -> None:
        """What a hit names must be on the ranks, whoever looks."""
        if not hit.tokens:
            return
        for table in self.geometry.tables:
            blocks = np.asarray(hit.blocks(table.index))
            what = f"hit of {hit.tokens}"
            if table.kind is TableKind.STATE:
                self.shadow.check_state(blocks, path[hit.tokens], what)
            else:
                first = first_needed(table, hit.tokens) // table.span
                row = np.full(first + len(blocks), -1, dtype=np.int32)
                row[first:] = blocks
                self.shadow.check_read(table, row, path, hit.tokens, what)

    def come_back(self, live: Live) -> None:
        """A preempted request asks again, with what it had answered as part of its prompt."""
        prompt = Prompt(self.spelled(live.tokens), namespace=live.namespace, no_store=not live.publish)
        self._admit(prompt, live.flavour)

    def probe(self, probe: Probe) -> None:
        """Look up something that is like an earlier sequence."""
        prompt = self.probed(probe)
        if prompt is not None:
            self.look(prompt)

    def wait(self, probe: Probe, live: Live) -> None:
        """Ask where something could resume once a running request has come so far, and see to it that it can."""
        prompt = self.probed(probe, live if probe.which % 2 else None)
        if prompt is None or live.doomed:
            return
        position, path = (
            self.cache.reach(self.cache.lookup(prompt), live.row),
            self.names.path(prompt.namespace, prompt.tokens.tolist()),
        )
        told = position + self.geometry.lookahead
        if position:
            assert live.publish and live.attached, "nobody waits for a request that leaves nothing behind"  # noqa: PT018
            assert live.lane.computed < position < len(path) - 1, f"the wait for {position} is of no use"
            assert path[told] == live.lane.path[told], f"the paths part before {position}"
            self.cache.keep_at(live.row, position)
            live.due |= {position}
            self.check()

    def probed(self, probe: Probe, like: Live | None = None) -> Prompt | None:
        """The prompt of a probe, if there is a sequence that it can be like: an earlier one, or one that runs."""
        lives = self.lives if like is None else [like]
        known = (self.past if like is None else []) + [(live.namespace, live.tokens) for live in lives]
        if not known:
            return None
        namespace, tokens = known[probe.which % len(known)]
        low, high = sorted(len(tokens) * cut // 1000 for cut in probe.cuts)
        new = [100 * (probe.stream + 1) + i for i in range(probe.more)]
        # All from `low` on missing, or a piece in the middle; then something new.
        tokens = tokens[: max(1, low)] + (tokens[max(1, high) :] if probe.middle else []) + new
        if probe.elsewhere:
            namespace = self.cache.namespace(salt="" if namespace else "t")
        return Prompt(self.spelled(tokens), namespace=namespace)

    def _parting(self, path: list[int], matched: int) -> int:
        """Where a prompt parts from a sequence that surely is known and goes on differently; 0 for nowhere."""
        if not self.world.ghosts_kept or not 0 < matched < len(path) - 1:
            return 0
        running = self._running()
        if self.oracle.bounds(path, running)[0] != matched:
            return 0
        known = self.oracle.surely.union(*running)
        others = [name for name in self.names.children[path[matched]].values() if name in known]
        return matched if others else 0

    def _least_blocks(self, n: int) -> int:
        """Blocks without which a prompt of n tokens cannot be held at its end."""
        total = 0
        for table in self.geometry.tables:
            if table.kind is TableKind.STATE:
                total += table.state_blocks
            elif table.kind is TableKind.PREFIX:
                total += -(-n // table.span)
        return total

    def _most_blocks(self, n: int) -> int:
        """Blocks with which a prompt of n tokens can be computed, however wasteful the order."""
        total = 1
        for table in self.geometry.tables:
            total += 2 * table.state_blocks if table.kind is TableKind.STATE else -(-n // table.span) + 1
        return total

    def _prompt_tokens(self, plan: Plan) -> tuple[int, list[int]]:
        namespace = self.cache.namespace(salt=plan.salt)
        tokens: list[int] = [_BEGIN] if plan.begin else []
        if plan.base >= 0 and self.past:
            namespace, base = self.past[plan.base % len(self.past)]
            tokens = base[: len(base) * plan.cut // 1000]
        text = [100 * (plan.stream + 1) + i for i in range(plan.length)]
        media = []
        if plan.image:
            size = IMAGES[plan.image]
            text = [PLACEHOLDER] * size + text
            media = [Media(0, size, plan.image)]
        symbols = self.cache.symbols(text, media=media).tokens.tolist()
        for i, symbol in enumerate(symbols):
            if media and i < media[0].length:
                assert symbol < 0, "a placeholder became a token"
                assert self.image_symbols.setdefault(symbol, plan.image) == plan.image, "two pictures, one symbol"
            else:
                assert symbol == text[i]
        room = max(0, 60 - len(symbols))
        return namespace, tokens[:room] + symbols
