"""What a run writes down: every token of a prompt on one line, and memory now and then."""

import numpy as np
import pytest

from headway.cache import Counters, Explanation, Loss, Reason
from headway.formats import Trace, TraceBuilder
from headway.replay.run.ledger import Ledger
from headway.tell.reasons import LINES


def trace(*prompts: int) -> Trace:
    """Prompts of that many tokens, in blocks of 10."""
    builder = TraceBuilder("made", "test", 10)
    for time, tokens in enumerate(prompts):
        builder.add_unknown(tokens, 1, time)
    return builder.build()


def ledger(tokens: int, match: int) -> Ledger:
    return Ledger(trace(tokens), np.array([match]))


def lines(found: Ledger) -> dict[str, int]:
    return {line: tokens for line, tokens in zip(LINES, found.lost[:, 0].tolist(), strict=True) if tokens}


def test_symbols_become_tokens_and_the_last_may_have_fewer() -> None:
    """Three symbols of 10 tokens, the last of 5: one is reused, one was evicted, the tail is new."""
    found = ledger(25, 20)
    losses = (Loss(Reason.EVICTED, 1, 2), Loss(Reason.PARTED, 2, 3))
    found.explain(0, Explanation(3, 1, 2, losses), 3, 10)
    assert (found.hits.tolist(), lines(found)) == ([10], {"evicted": 10, "parted": 5})


def test_what_only_an_endless_memory_knows_is_forgotten_or_still_computed() -> None:
    losses = (Loss(Reason.PARTED, 1, 3),)
    for unknown in ("forgotten", "still_computing"):
        found = ledger(25, 20)
        found.explain(0, Explanation(3, 1, 1, losses), 3, 10, unknown=unknown)
        assert (found.hits.tolist(), lines(found)) == ([10], {unknown: 10, "parted": 5})


def test_a_resend_is_hit_up_to_its_last_token() -> None:
    whole = Explanation(3, 2, 3, (Loss(Reason.LAST_TOKEN, 2, 3),))
    resent, other = ledger(25, 24), ledger(25, 24)
    resent.explain(0, whole, 3, 10, resends=True)
    assert (resent.hits.tolist(), lines(resent)) == ([24], {"last_token": 1})
    other.explain(0, whole, 3, 10)
    assert (other.hits.tolist(), lines(other)) == ([20], {"evicted": 4, "last_token": 1})


@pytest.mark.parametrize(
    ("hit", "kept", "computed", "match", "expected"),
    [
        (10, 10, 20, 20, {"state_never_taken": 10, "parted": 5}),
        (10, 20, 20, 20, {"evicted": 10, "parted": 5}),
        (10, 0, 10, 20, {"still_computing": 10, "parted": 5}),
        (0, 0, 0, 0, {"nothing_matched": 25}),
        (24, 24, 24, 24, {"last_token": 1}),
    ],
)
def test_an_imitated_engine(hit: int, kept: int, computed: int, match: int, expected: dict[str, int]) -> None:
    found = ledger(25, match)
    found.note(0, hit, kept, computed)
    assert (int(found.hits[0]), lines(found)) == (hit, expected)
    assert hit + sum(expected.values()) == 25


def test_refused_prompts_are_on_their_own_line() -> None:
    found = ledger(25, 20)
    found.refuse(0, 99)
    assert (found.refused, lines(found), found.match(0)) == ({0: 99}, {}, 20)


def test_states_are_counted_once() -> None:
    found = ledger(25, 0)
    used, unused = found.take("junction"), found.take("junction")
    found.resume(used)
    found.resume(used)
    found.evict(used)
    found.evict(unused)
    counters = found.counters
    assert (counters.taken, counters.resumed, counters.reused) == ({"junction": 2}, {"junction": 2}, {"junction": 1})
    assert (counters.evicted, counters.evicted_unused, found.kept) == ({"junction": 2}, {"junction": 1}, 0)


def test_memory_is_sampled_and_the_first_half_kept() -> None:
    calls: list[tuple[int, int]] = []
    counters, matches = Counters(), np.zeros(120, dtype=np.int64)
    found = Ledger(trace(*[10] * 120), matches, lambda done, of: calls.append((done, of)), counters)
    due = []
    for done in range(120):
        counters.taken["junction"] = done
        if found.sample_is_due(done):
            due.append(done)
            found.sample(done, float(done), 100, 250)
    assert due == list(range(0, 120, 2)), "sixty samples"
    assert found.half.taken == {"junction": 60}, "of that moment, whatever comes later"
    assert found.memory[3].checkpoints == 100, "not more than is used"
    assert (found.memory[3].request, found.memory[3].count) == (6, 6)
    assert calls == [(done, 120) for done in due]
