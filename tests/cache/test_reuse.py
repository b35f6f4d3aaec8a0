"""What is learned of how often and how soon requests come back, and what eviction is told of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.cache.engine import ATTENTION, STATE, Engine, tokens

from headway.cache import Candidate, EvictionPolicy, Prompt
from headway.cache.index.edge import LostCheckpoint, Match
from headway.cache.index.pool import BlockPool
from headway.cache.index.tree import PrefixTree
from headway.cache.policy.eviction import Value
from headway.cache.policy.reuse import PATH, ReuseRates


def seen(kind: str, taken: int, waits: Sequence[int], more: int = 0) -> ReuseRates:
    """After `taken` of a kind: for each of `waits` one was first wanted after so many ticks; `more` uses came later."""
    rates = ReuseRates()
    for _ in range(taken):
        rates.took(kind)
    for wait in waits:
        rates.wanted(kind, wait)
    for _ in range(more):
        rates.wanted(kind)
    return rates


def test_before_anything_is_known_all_kinds_are_the_same() -> None:
    """A first use after 200 ticks is assumed, of which 0.3 count, and every second one is wanted: 1 / (60 / 0.5)."""
    rates = ReuseRates()
    kinds = ("prompt_end", "answer_end", "junction", "boundary", "interval:64")
    assert [rates.rate(kind) for kind in kinds] == pytest.approx([1 / 120] * 5)


def test_a_new_checkpoint_is_judged_by_its_kind() -> None:
    """Of 8, three were wanted, one of them four times: (6 + 1) / (8 + 2) each.

    First after 100, 200 and 400 ticks: the geometric mean with the assumed ones is 200 still. So 0.7 uses in 60 ticks.
    """
    assert seen("junction", 8, [100, 200, 400], more=3).rate("junction") == pytest.approx(0.7 / 60)


def test_a_kind_that_is_wanted_sooner_is_expected_sooner() -> None:
    """Five first uses after 50 ticks and the five assumed after 200: their geometric mean is 100."""
    assert seen("answer_end", 8, [50] * 5).rate("answer_end") == pytest.approx(0.6 / 30)


def test_an_old_checkpoint_is_judged_by_itself() -> None:
    """Taken 4,880 ticks ago and used last 880 ago: 2,880 count. Never used: all 4,880 do."""
    rates = ReuseRates()
    assert rates.rate("junction", uses=9, lived=4880, idle=880) == pytest.approx(10 / (120 + 2880))
    assert rates.rate("junction", uses=0, lived=4880, idle=4880) == pytest.approx(1 / 5000)


def test_a_preempted_request_is_sure_to_come_back() -> None:
    """Whatever was seen of the kind: one use within 0.3 of the usual wait."""
    assert seen("preempt", 98, []).rate("preempt") == pytest.approx(1 / 60)


def test_old_evidence_fades() -> None:
    """What nobody uses any more is worth half of what it was after `memory` checkpoints, and less and less."""
    rates = ReuseRates(memory=10)
    for _ in range(10):
        rates.took("junction")
        rates.wanted("junction")
    before = rates.rate("junction")
    for _ in range(12):
        rates.took("junction")
    assert rates.rate("junction") < before / 2


class Oldest(EvictionPolicy):
    """Evicts the least recently used, and notes what it is told."""

    def __init__(self) -> None:
        self.told: dict[tuple[str, int], Candidate] = {}

    def priority(self, candidate: Candidate) -> float:
        self.told[candidate.kind, candidate.position] = candidate
        return float(candidate.used)


def test_a_checkpoint_goes_on_with_the_uses_of_the_one_that_went_from_its_place() -> None:
    """Thirty blocks; a prompt of 33 tokens keeps 8 and a state of 2. It is used twice, then two others send it away.

    The next request would have resumed there: a third use. It takes the checkpoint again, which starts with three.
    """
    policy = Oldest()
    engine = Engine.of(ATTENTION, STATE, blocks=30, eviction=policy, placement=("prompt_end", "junction"))
    text = tokens((1, 33))
    assert [engine.run(text) for _ in range(3)] == [0, 32, 32]
    engine.run(tokens((2, 49)))
    engine.run(tokens((3, 49)))
    assert engine.hit(text) == 0
    policy.told.clear()
    assert engine.run(text) == 0
    assert policy.told["prompt_end", 32].uses == 3
    assert engine.run(text) == 32
    assert policy.told["prompt_end", 32].uses == 4


def test_uses_of_what_had_gone_count_for_the_kind() -> None:
    """Every prompt comes twice, and both times what it left has just been sent away: nothing is ever reused.

    Still half of all prompt ends are wanted, so a new one is expected to be used more often than one of a cache whose
    prompts come once.
    """

    def rate_of_a_new_one(order: list[int]) -> float:
        policy = Oldest()
        engine = Engine.of(ATTENTION, STATE, blocks=24, eviction=policy, placement=("prompt_end",))
        assert [engine.run(tokens((i, 49))) for i in order] == [0] * len(order)
        engine.run(tokens((99, 33)))
        return policy.told["prompt_end", 32].rate

    once = rate_of_a_new_one(list(range(1, 41)))
    twice = rate_of_a_new_one([i for pair in range(1, 21, 2) for i in (pair, pair + 1, pair, pair + 1)])
    assert twice > 2 * once


@pytest.mark.parametrize("groups", [(ATTENTION,), (ATTENTION, STATE)], ids=["paths", "states"])
def test_what_is_kept_and_never_wanted_makes_its_kind_expected_less(groups: tuple[object, ...]) -> None:
    policy = Oldest()
    engine = Engine.of(*groups, blocks=30, eviction=policy, placement=("prompt_end",))
    rates = []
    for stream in range(1, 30):
        policy.told.clear()
        engine.run(tokens((stream, 49)))
        engine.run(tokens((100 + stream, 9)))
        rates.append(max(told.rate for told in policy.told.values() if told.uses == 0))
    assert rates[-1] < rates[5] / 2


def test_a_priority_that_has_fallen_is_noticed() -> None:
    """A used often and long ago, B taken since: as time goes by A falls behind B, though nothing happens to either."""

    class Idle(EvictionPolicy):
        """Worth what it was used for, until 6 ticks have gone by."""

        def __init__(self) -> None:
            self.now = 0

        def priority(self, candidate: Candidate) -> float:
            self.now = max(self.now, candidate.used)
            return candidate.uses + 1 if self.now - candidate.used < 6 else 0

    engine = Engine.of(ATTENTION, STATE, blocks=44, eviction=Idle(), placement=("prompt_end",))
    often, other = tokens((1, 33)), tokens((2, 33))
    assert [engine.run(often) for _ in range(3)] == [0, 32, 32]
    assert [engine.run(other) for _ in range(2)] == [0, 32]
    for i in range(3, 9):
        engine.run(tokens((i, 49)))
    assert engine.hit(often) == 0


def test_a_path_has_to_show_sooner_what_it_is_worth() -> None:
    """0.05 of 200 ticks count, and every second one is wanted."""
    assert ReuseRates().rate(PATH) == pytest.approx(1 / 20)


def test_the_price_follows_the_victims() -> None:
    """A victim moves it by a twentieth of the way to rate x saved / blocks: 20 first, then 30."""
    policy = Value()
    for rate in (2.0, 3.0):
        policy.evicted(Candidate("junction", 1, 0, rate, 40.0, 4, 0, 0.0))
    assert policy.price == pytest.approx(1.0 + (30.0 - 1.0) / 20)


def test_a_path_goes_on_with_the_uses_that_it_would_have_had() -> None:
    """Twelve blocks; a prompt of 33 tokens takes nine, so the second sends most of the first away."""
    policy = Oldest()
    engine = Engine.of(ATTENTION, blocks=12, eviction=policy)
    text = tokens((1, 33))
    engine.run(text)
    engine.run(tokens((2, 45)))
    assert engine.hit(text) < 32
    engine.run(text)
    policy.told.clear()
    engine.run(tokens((3, 45)))
    assert max(told.uses for told in policy.told.values() if told.kind == PATH) == 1


def test_uses_of_trimmed_paths_count_for_paths() -> None:
    """As above, for a model that needs no checkpoints."""

    def rate_of_a_new_one(order: list[int]) -> float:
        policy = Oldest()
        engine = Engine.of(ATTENTION, blocks=12, eviction=policy)
        assert [engine.run(tokens((i, 45))) for i in order] == [0] * len(order)
        policy.told.clear()
        engine.run(tokens((99, 33)))
        engine.run(tokens((98, 45)))
        return max(told.rate for told in policy.told.values() if told.position >= 33 and told.uses == 0)

    once = rate_of_a_new_one(list(range(1, 41)))
    twice = rate_of_a_new_one([i for pair in range(1, 21, 2) for i in (pair, pair + 1, pair, pair + 1)])
    assert twice > 2 * once


def test_what_went_from_a_stretch_is_found_deepest_first() -> None:
    """In the stretch alone, and at one position the one that went last."""
    tree = PrefixTree(0, (), BlockPool(1), floats=False)
    at = tree.enter(Match(tree.root(0), 0), tokens((1, 20)).tobytes())
    for i, position in enumerate((8, 4, 8, 12, 2, 10)):
        tree.remember(at.edge, LostCheckpoint(position, "junction", float(i), "evicted", i, 0))
    assert [(lost.position, lost.born) for lost in at.lost(2, 10)] == [(10, 5), (8, 2), (4, 1)]


def test_of_every_kind_that_went_the_deepest_counts_as_wanted() -> None:
    """Breakpoints at 8 and 16 and a prompt end went. Each kind would have served the next request once."""
    engine = Engine.of(ATTENTION, STATE, blocks=30, eviction="lru", placement=("prompt_end", "breakpoint"))
    engine.run(tokens((1, 33)), breakpoints=(8, 16))
    for stream in (2, 3, 4):
        engine.run(tokens((stream, 60)))
    assert engine.hit(tokens((1, 33))) == 0
    engine.start(tokens((1, 33)))
    (part,) = engine.cache.path(Prompt(tokens((1, 33)))).parts
    assert [(lost.position, lost.kind, lost.uses) for lost in part.lost] == [
        (8, "breakpoint", 0),
        (16, "breakpoint", 1),
        (32, "prompt_end", 1),
    ]


def test_a_checkpoint_does_not_go_on_with_the_uses_of_another_prompt() -> None:
    """A's checkpoint behind the common ten tokens was used twice and went; B takes one of its own as deep as that."""
    policy = Oldest()
    engine = Engine.of(ATTENTION, STATE, blocks=40, eviction=policy, history_tokens=0, placement=("prompt_end",))
    engine.run(tokens((1, 10), (2, 31)), pin=10)
    assert [engine.run(tokens((1, 10), (2, 31))) for _ in range(2)] == [40, 40]
    for stream in range(10, 22):
        engine.run(tokens((stream, 60)))
    assert engine.hit(tokens((1, 10), (2, 31))) == 10
    policy.told.clear()
    engine.run(tokens((1, 10), (3, 31)))
    assert policy.told["prompt_end", 40].uses == 0
