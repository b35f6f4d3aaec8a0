"""A stateful random test of all tiers: servers over the same stores, whose every entry carries the tag of its prefix.

Servers with one layout of ranks or another are started, stopped and killed over disks and stores that drop, delay,
stall, cut, alter, lie, fail and are full. Every read of an entry is checked against the exact prefix that it must be
of, on the device, in host memory and in objects; what stores really hold is judged from beside. Explanations add up,
what is said of a tier is true, nothing leaks, and what is whole below is found.

`HEADWAY_TIER_EXAMPLES` sets the number of examples (120 take about 70 s of one core). `make slow` tries 50,000, or
`HEADWAY_SLOW_TIER_EXAMPLES`. A failure prints the steps that lead to it and the `HEADWAY_SEED` with which to run it
again; threads take part, so now and then it takes several runs to see it again.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.errors import HypothesisException, StopTest
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from tests.model.test_machine import PARTS, SEED, search
from tests.model.tier_driver import Server, TierDriver
from tests.model.tier_worlds import ServerPlan, TierWorld, server_plans, tier_worlds
from tests.model.worlds import Plan, plans

from headway.tiers.faults import KINDS, Fault

EXAMPLES = int(os.environ.get("HEADWAY_TIER_EXAMPLES", "120"))
SLOW_EXAMPLES = int(os.environ.get("HEADWAY_SLOW_TIER_EXAMPLES", "50000"))

_WHICH = st.integers(0, 7)
_CUTS = st.sampled_from([1000, 1000, 700, 400])
_FAULTS = st.sampled_from(
    [(kind, operation) for operation, kinds in KINDS.items() for kind in kinds if kind != "stall"]
)


class TierMachine(RuleBasedStateMachine):
    """Everything that servers, their clients, their operators and their stores do."""

    driver: TierDriver

    @initialize(world=tier_worlds(), first=server_plans(), plan=plans())
    def build(self, world: TierWorld, first: ServerPlan, plan: Plan) -> None:
        self.driver = TierDriver(world)
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

    @rule(which=_WHICH, past=_WHICH, more=st.integers(1, 6), answer=st.integers(1, 6))
    def come_back(self, which: int, past: int, more: int, answer: int) -> None:
        """The next turn of a conversation."""
        server = self.pick(which)
        self.driver.come_back(server, past, more, answer)
        server.run()
        self.driver.after(server)

    @rule(which=_WHICH, steps=st.integers(1, 6))
    def go_on(self, which: int, steps: int) -> None:
        server = self.pick(which)
        for _ in range(steps):
            server.step()
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
        then=st.sampled_from(["find", "find", "come back", "all"]),
    )
    def restart(
        self, which: int, how: str, writes: int, broken: str, plan: ServerPlan, past: int, cut: int, then: str
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
        elif then == "come back":
            self.come_back(-1, past, 2, 3)
        else:
            for each in range(8):
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
        if not hasattr(self, "driver"):
            return
        try:
            if sys.exc_info()[0] is None:
                self.driver.close()
        finally:
            if sys.exc_info()[0] is not None:
                if not isinstance(sys.exc_info()[1], StopTest | HypothesisException):
                    _failed.append(traceback.format_exc())
                for server in self.driver.servers:
                    for store in server.faulty:
                        store.released.set()
                    server.objects.close(0.0)


_failed: list[str] = []


def search_tiers(number: int, examples: int) -> None:
    """Try random runs. What failed first is told in any case: Hypothesis may only see that runs are not the same."""
    _failed.clear()
    try:
        search(number, examples, TierMachine)
    except BaseException as error:
        error.add_note("\n".join(["What failed first:", *_failed[:1]]))
        raise


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
    number = SEED + PARTS + part
    print(f"seed {number}")
    search_tiers(number, -(-SLOW_EXAMPLES // PARTS))
