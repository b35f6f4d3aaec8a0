"""A stateful random test of all tiers: servers over the same stores, whose every entry carries the tag of its prefix.

Servers with one layout of ranks or another are started, stopped and killed over disks and stores that drop, delay,
stall, cut, alter, lie, fail and are full. Every read of an entry is checked against the exact prefix that it must be
of, on the device, in host memory and in objects; what stores really hold is judged from beside. Explanations add up,
what is said of a tier is true, nothing leaks, and what is whole below is found.

`HEADWAY_TIER_EXAMPLES` sets the number of examples (480 take about 30 s of one core), `HEADWAY_STEPS` how long each is
at most. `make slow` tries 50,000, or `HEADWAY_SLOW_TIER_EXAMPLES`, and says how often each thing happened. All
threads take turns on a clock of their own (`turns.py`), so a failure prints the steps that lead to it and the
`HEADWAY_SEED` with which it happens again.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from tests.model.test_machine import PARTS, SEED, search
from tests.model.tier_driver import Server, TierDriver
from tests.model.tier_worlds import ServerPlan, TierWorld, server_plans, tier_worlds
from tests.model.turns import Turns, standing_in
from tests.model.worlds import Plan, plans

from headway.tiers.faults import KINDS, Fault

EXAMPLES = int(os.environ.get("HEADWAY_TIER_EXAMPLES", "480"))
SLOW_EXAMPLES = int(os.environ.get("HEADWAY_SLOW_TIER_EXAMPLES", "50000"))
STEPS = int(os.environ.get("HEADWAY_STEPS", "16"))

AT_ONCE = 250
"""Examples of one seed: Hypothesis remembers them all."""
MUST_HAPPEN = (
    "a restart",
    "another layout",
    "read back what another layout wrote",
    "a kill",
    "a kill in the middle of writes",
    "two servers at once",
    "in a tier: full",
    "no space left on a disk",
    "in a tier: late",
    "in a tier: corrupt",
    "in a tier: missing",
    "a tier is switched off",
    "a tier evicts",
    "a copy failed",
    "something happens during a load",
    "forgotten: path",
    "forgotten: reset",
    "read back from host",
    "read back from disk",
    "read back from store",
    *(f"fault: {kind}" for kind in sorted({kind for kinds in KINDS.values() for kind in kinds})),
    *(f"somebody breaks an object: {how}" for how in ("alter", "cut", "remove")),
)
"""What the shares of examples are looked at for."""
SEEN: Counter[str] = Counter()
"""In how many examples each thing happened."""

_WHICH = st.integers(0, 7)
_SELDOM = st.sampled_from([False] * 7 + [True])
_LESS = st.sampled_from([0, 0, 0, 1, 2, 3, 5])
_CUTS = st.sampled_from([1000, 1000, 700, 400])
_FAULTS = st.sampled_from(
    [(kind, operation) for operation, kinds in KINDS.items() for kind in kinds if kind != "stall"]
)


class TierMachine(RuleBasedStateMachine):
    """Everything that servers, their clients, their operators and their stores do."""

    driver: TierDriver

    @initialize(world=tier_worlds(), first=server_plans(), plan=plans(), order=st.integers(0, 2**32))
    def build(self, world: TierWorld, first: ServerPlan, plan: Plan, order: int) -> None:
        self.driver = TierDriver(world, Turns(order))
        self.driver.start(first)
        self.serve(0, plan, 3)

    def pick(self, which: int) -> Server:
        return self.driver.servers[which % len(self.driver.servers)]

    @rule(which=_WHICH, plan=plans(), answer=st.integers(1, 6))
    def submit(self, which: int, plan: Plan, answer: int) -> None:
        server = self.pick(which)
        if len(server.requests) < 8:
            self.driver.submit(server, plan, answer)
            self.driver.after(server)

    @rule(which=_WHICH, plan=plans(), answer=st.integers(1, 6))
    def serve(self, which: int, plan: Plan, answer: int) -> None:
        """A request, and all that is under way beside it, to their ends."""
        server = self.pick(which)
        self.driver.submit(server, plan, answer)
        server.run()
        self.driver.after(server)

    @rule(which=_WHICH, past=_WHICH, more=st.integers(1, 6), answer=st.integers(1, 6), less=_LESS, other=_SELDOM)
    def come_back(self, which: int, past: int, more: int, answer: int, less: int = 0, other: bool = False) -> None:
        """The next turn of a conversation, or its last one in other words, or somebody else's."""
        server = self.pick(which)
        self.driver.come_back(server, past, more, answer, less, other=other)
        server.run()
        self.driver.after(server)

    @rule(which=_WHICH, steps=st.integers(1, 6))
    def go_on(self, which: int, steps: int) -> None:
        server = self.pick(which)
        for _ in range(steps):
            server.step()
        self.driver.after(server)

    @rule(
        which=_WHICH,
        past=_WHICH,
        less=_LESS,
        cut=_CUTS,
        event=st.sampled_from(["path", "reset", "crowd", "crowd", "abort"]),
        plan=plans(),
    )
    def meanwhile(self, which: int, past: int, less: int, cut: int, event: str, plan: Plan) -> None:
        """While a request waits for what lies below, something else happens."""
        server = self.pick(which)
        self.driver.come_back(server, past, 2, 3, less)
        server.step(wait=False)
        self.driver.happened["something happens during a load"] += server.scheduler.loading
        if event == "crowd":
            self.driver.submit(server, plan, 3)
            self.driver.submit(server, plan, 3)
        elif event != "abort":
            self.driver.forget(server, past, cut, event)
        elif server.requests:
            server.scheduler.abort(server.requests[-1])
        server.run()
        self.driver.after(server)

    @rule(which=_WHICH, one=_WHICH)
    def abort(self, which: int, one: int) -> None:
        server = self.pick(which)
        if server.requests:
            server.scheduler.abort(server.requests[one % len(server.requests)])
            self.driver.after(server)

    @rule(which=_WHICH)
    def settle(self, which: int) -> None:
        self.driver.settle(self.pick(which))

    @rule(which=_WHICH, past=_WHICH, cut=_CUTS)
    def find(self, which: int, past: int, cut: int) -> None:
        self.driver.find(self.pick(which), past, cut)

    @rule(
        which=_WHICH,
        how=st.sampled_from(["stop", "kill"]),
        writes=st.sampled_from([99, 99, 0, 1, 2, 3, 5, 8, 13]),
        broken=st.sampled_from(["", "", "", "remove", "cut", "alter"]),
        plan=server_plans(),
        past=_WHICH,
        cut=_CUTS,
        then=st.sampled_from(["find", "find", "come back", "come back", "in parts", "all"]),
        less=_LESS,
    )
    def restart(
        self,
        which: int,
        how: str,
        writes: int,
        broken: str,
        plan: ServerPlan,
        past: int,
        cut: int,
        then: str,
        less: int,
    ) -> None:
        """A server ends, well or not, and another one starts, perhaps with other ranks, and is asked the same."""
        server = self.pick(which)
        if how == "stop":
            self.driver.stop(server)
        else:
            self.driver.kill(server, writes)
        if broken:
            self.driver.tamper(plan.seed, broken)
        server = self.driver.start(plan)
        if then == "find":
            self.driver.find(server, past, cut)
        elif then in ("come back", "in parts"):
            if then == "in parts":
                self.driver.come_back(server, past, 1, 1, less, cut)
                server.run()
                past += 1
            self.come_back(-1, past, 2, 3, other=less == 5)
            self.come_back(-1, past + 1, 1, 1, less)
        else:
            for each in range(4):
                self.driver.come_back(server, each, 2, 3)
            server.run()
            self.driver.after(server)

    @rule(
        which=_WHICH,
        what=st.sampled_from(["another", "path", "reset", "store", "store", "device", "step", "tamper"]),
        plan=server_plans(),
        past=_WHICH,
        cut=_CUTS,
        fault=_FAULTS,
        times=st.integers(1, 4),
    )
    def mishap(
        self, which: int, what: str, plan: ServerPlan, past: int, cut: int, fault: tuple[Any, Any], times: int
    ) -> None:
        """A second server on the same stores, something is forgotten, or the next calls of one kind fail."""
        server = self.pick(which)
        if what == "another" and len(self.driver.servers) < 2:
            self.driver.start(plan)
        elif what in ("path", "reset"):
            self.driver.forget(server, past, cut, what)
        elif what == "store":
            kind, operation = fault
            for store in server.faulty:
                store.rules = [*store.rules[-3:], Fault(kind, operation, skip=past, times=times, seconds=0.003)]
        elif what == "device":
            server.device.fail_move = server.device.fail_write = times
        elif what == "step":
            server.device.fail_step, server.step_failures = times, True
        elif what == "tamper":
            self.driver.tamper(plan.seed, ["remove", "cut", "alter"][times % 3])

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            try:
                if sys.exc_info()[0] is None:
                    self.driver.close()
                    SEEN.update(["examples", *self.driver.tell()])
            finally:
                self.driver.turns.close()


def search_tiers(number: int, examples: int) -> None:
    with standing_in():
        search(number, examples, TierMachine, STEPS)


@pytest.fixture(autouse=True)
def _quiet() -> object:
    """What fails on purpose is logged a thousand times."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.timeout(1700)
@pytest.mark.parametrize("part", range(PARTS))
def test_tiers_beside_what_they_hold(part: int) -> None:
    search_tiers(SEED + part, -(-EXAMPLES // PARTS))


@pytest.mark.slow
@pytest.mark.timeout(12 * 3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_tiers_beside_what_they_hold_for_long(part: int) -> None:
    SEEN.clear()
    first, most = SEED + PARTS + 1_000_000 * part, -(-SLOW_EXAMPLES // PARTS)
    for number in range(-(-most // AT_ONCE)):
        search_tiers(first + number, min(AT_ONCE, most - number * AT_ONCE))
    print(f"seeds from {first} on")
    for what, times in SEEN.most_common():
        print(f"{times:7,} {what}")
    seldom = [what for what in MUST_HAPPEN if SEEN[what] < SEEN["examples"] // 200]
    assert most < 1000 or not seldom, f"these happen in less than one of 200 examples: {seldom}"
