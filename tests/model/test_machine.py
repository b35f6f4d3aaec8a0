"""A stateful random test: the real cache beside an oracle and a shadow device.

`HEADWAY_EXAMPLES` sets the number of examples (1,000 in CI), `HEADWAY_STEPS` how long each is at most. `make slow`
tries 20,000, or `HEADWAY_SLOW_EXAMPLES`. A failure prints the shortest steps found that lead to it (with
`HEADWAY_SHRINK=0` the first ones found), and the `HEADWAY_SEED` with which to run it again.
"""

from __future__ import annotations

import os
import random
import sys
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from tests.model.driver import Driver
from tests.model.lives import Live
from tests.model.worlds import PIN_SECONDS, Plan, Probe, World, plans, probes, worlds

PARTS = 4
"""Independent searches, so that several processes share the work."""

SEED = int(os.environ.get("HEADWAY_SEED", random.SystemRandom().randrange(2**32)))
EXAMPLES = int(os.environ.get("HEADWAY_EXAMPLES", "1000"))
STEPS = int(os.environ.get("HEADWAY_STEPS", "50"))
SLOW_EXAMPLES = int(os.environ.get("HEADWAY_SLOW_EXAMPLES", "20000"))
PHASES = (Phase.generate,) if os.environ.get("HEADWAY_SHRINK") == "0" else (Phase.generate, Phase.shrink)

_CHUNKS = st.lists(st.sampled_from([1, 2, 3, 4, 6, 9, 64]), min_size=1, max_size=3)
_COUNTS = st.lists(st.integers(0, 3), min_size=1, max_size=3)
_WHICH = st.integers(0, 7)


class CacheMachine(RuleBasedStateMachine):
    """Everything that a scheduler does with the cache, in any order."""

    driver: Driver

    @initialize(world=worlds(), first=plans())
    def build(self, world: World, first: Plan) -> None:
        self.driver = Driver(world)
        self.driver.start(first)

    def running(self) -> bool:
        return bool(self.driver.lives)

    def pick(self, which: int) -> Live:
        return self.driver.lives[which % len(self.driver.lives)]

    def some(self, which: int, many: int) -> list[Live]:
        lives = self.driver.lives
        first = which % len(lives)
        return (lives[first:] + lives[:first])[: 1 + many]

    @precondition(lambda self: len(self.driver.lives) < 8)
    @rule(plan=plans())
    def start(self, plan: Plan) -> None:
        self.driver.start(plan)

    @precondition(lambda self: len(self.driver.lives) < 8)
    @rule(plan=plans(), chunks=_CHUNKS, answer=st.integers(0, 5))
    def serve(self, plan: Plan, chunks: list[int], answer: int) -> None:
        """A whole request, while others wait."""
        live = self.driver.start(plan)
        if live is not None:
            self.driver.go_on(live, chunks, answer)

    @precondition(running)
    @rule(which=_WHICH, chunks=_CHUNKS, answer=st.integers(0, 5))
    def go_on(self, which: int, chunks: list[int], answer: int) -> None:
        """The rest of a running request."""
        live = self.pick(which)
        if not live.doomed:
            self.driver.go_on(live, chunks, answer)

    @precondition(running)
    @rule(
        which=_WHICH,
        many=st.integers(0, 7),
        chunks=_CHUNKS,
        drafts=_COUNTS,
        accepted=_COUNTS,
        shorter=st.integers(0, 9),
        fails=st.integers(0, 15),
    )
    def step(
        self, which: int, many: int, chunks: list[int], drafts: list[int], accepted: list[int], shorter: int, fails: int
    ) -> None:
        """One whole step of one or several requests."""
        self.driver.land_all()
        flight = self.driver.begin(self.some(which, many), chunks * 8, drafts * 8)
        if flight:
            self.driver.complete(flight, accepted, shorter=shorter if shorter < 3 else 0, fails=fails == 1)

    @precondition(lambda self: self.running() and len(self.driver.flights) < 3)
    @rule(which=_WHICH, many=st.integers(0, 1), chunks=_CHUNKS, drafts=_COUNTS, twice=st.booleans())
    def begin(self, which: int, many: int, chunks: list[int], drafts: list[int], twice: bool) -> None:
        """Set a step on its way, perhaps two; other things happen before they land."""
        some = self.some(which, many)
        self.driver.begin(some, chunks * 8, drafts * 8)
        if twice:
            self.driver.begin(some, chunks * 8, [0] * 8)

    @precondition(lambda self: bool(self.driver.flights))
    @rule(accepted=_COUNTS, shorter=st.integers(0, 5), fails=st.integers(0, 5))
    def land(self, accepted: list[int], shorter: int, fails: int) -> None:
        """The oldest step lands, or fails."""
        shorter = shorter if shorter < 3 else 0
        self.driver.complete(self.driver.flights[0], accepted, shorter=shorter, fails=fails == 1)

    @precondition(running)
    @rule(
        which=_WHICH,
        how=st.sampled_from(["preempt", "come back", "abort", "finish", "finish"]),
        back=st.sampled_from([0, 0, 1, 3]),
    )
    def end(self, which: int, how: str, back: int) -> None:
        """A request ends, wherever it stands, or some tokens before."""
        live = self.pick(which)
        if how != "finish" or live.lane.computed >= live.prompt_length:
            self.driver.end(live, "preempt" if how == "come back" else how, back)
        if how == "come back" and live not in self.driver.lives:
            self.driver.come_back(live)

    @precondition(running)
    @rule(which=_WHICH, lift=st.integers(0, 3))
    def bookmark(self, which: int, lift: int) -> None:
        """A request remembers where it stands, or no longer."""
        self.driver.bookmark(self.pick(which), lift == 1)

    @precondition(running)
    @rule(probe=probes(), which=_WHICH)
    def wait(self, probe: Probe, which: int) -> None:
        """Something waits for a running request."""
        self.driver.wait(probe, self.pick(which))

    @rule(several=st.lists(probes(), min_size=1, max_size=3), rare=st.integers(0, 15))
    def probe(self, several: list[Probe], rare: int) -> None:
        """Look something up; seldom, a reset or time that passes."""
        for probe in several:
            self.driver.probe(probe)
        if rare == 1:
            self.driver.reset()
        elif rare in (2, 3):
            self.driver.now += PIN_SECONDS * 0.6

    @rule(probe=probes(), what=st.sampled_from(["unpin", "forget", "namespace", "foreign"]))
    def operate(self, probe: Probe, what: str) -> None:
        """Lift pins, forget a part, or try a hit of another cache."""
        if what == "unpin":
            self.driver.unpin(probe)
        elif what == "forget":
            self.driver.forget(probe)
        elif what == "foreign":
            self.driver.refuse_a_foreign_hit(probe)
        elif probe.more == 3:
            self.driver.forget_namespace(probe.which)

    @rule(how=st.sampled_from(["deepcopy", "pickle", "save", "available"]))
    def copy(self, how: str) -> None:
        """Go on with a copy, or try on a copy what can be had."""
        if how == "available":
            self.driver.take_all_that_is_available()
        else:
            self.driver.go_on_with_a_copy(how)

    def teardown(self) -> None:
        if hasattr(self, "driver") and sys.exc_info()[0] is None:  # a failure on its way out says more than this
            self.driver.close()


@pytest.mark.timeout(1700)
@pytest.mark.parametrize("part", range(PARTS))
def test_cache_beside_oracle_and_device(part: int) -> None:
    search(SEED + part, -(-EXAMPLES // PARTS))


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_cache_beside_oracle_and_device_for_long(part: int) -> None:
    number = SEED + PARTS + part
    print(f"seed {number}")
    search(number, -(-SLOW_EXAMPLES // PARTS))


def search(number: int, examples: int, kind: type[RuleBasedStateMachine] = CacheMachine, steps: int = STEPS) -> None:
    """Try random runs, from one seed."""
    machine = type(kind.__name__, (kind,), {})
    try:
        with mock.patch("headway.cache.lease.open._NEAR", 1):  # prompts here are short
            run_state_machine_as_test(
                seed(number)(machine),
                settings=settings(
                    max_examples=examples,
                    stateful_step_count=steps,
                    phases=PHASES,
                    deadline=None,
                    database=None,
                    print_blob=True,
                    suppress_health_check=list(HealthCheck),
                ),
            )
    except BaseException as error:
        name, which = ("TIER_", "tiers_beside") if kind is not CacheMachine else ("", "device")
        again = f"HEADWAY_SEED={number} HEADWAY_{name}EXAMPLES={PARTS * examples}"
        error.add_note(f"To run it again: {again} pytest tests/model -k '{which} and 0'")
        raise
