"""What is said of lower tiers of memory: when a tier is said to pay, to add little, and when nothing is said."""

from dataclasses import replace
from typing import Any

import pytest
from tests.tell.results import GB, run

from headway.tell import RunRecord, compare
from headway.tell.advice import Study, Variant, advice_text
from headway.tell.facts import facts_of
from headway.tell.labels import run_labels
from headway.tell.lower import LowerStep, lower_steps, on_lower, on_tiers
from headway.tell.run import Memory, TierUse


def tier(name: str, memory: int, tokens: int, prefill: float | None = 400.0, **more: Any) -> TierUse:
    moves = {"bytes_in": 10 * GB, "seconds_in": 20.0, "bytes_out": 30 * GB, "seconds_out": 80.0}
    counts = {"requests": 5, "declined": 0, "checkpoints": 90, "skipped": 0}
    found = {"used": memory, "source": "made up", **moves, **counts, "prefill_seconds": prefill} | more
    return TierUse(name=name, memory=memory, tokens=tokens, **found)


def tiered(hit: int, *tiers: TierUse, hours: float = 1.0, policy: dict[str, Any] | None = None) -> RunRecord:
    """A run of 1,000 prompt tokens."""
    sizes = {one.name: {"memory": one.memory, "read": 1e9} for one in tiers}
    made = {"placement": ["prompt_end"], "eviction": "value"} | (policy or {}) | {"tiers": sizes}
    memory = [Memory(0, 0.0, 0, 0, 0), Memory(10, 3600.0 * hours, 1000, 250, 5)]
    found = run(hit, {"parted": 1000 - hit}, policy=made, tiers=list(tiers))
    whole = replace(found.result.whole, loaded_tokens=sum(one.tokens for one in tiers))
    return replace(found, result=replace(found.result, whole=whole, memory=memory))


HOST, DISK = tier("host", 80 * GB, 130), tier("disk", 500 * GB, 60)


# ---- one run


def test_a_run_says_what_each_tier_gave_back_and_what_that_saves() -> None:
    """In an hour: (400 - 20 - 80) s of host memory; a disk is written beside the steps: 400 - 20 s."""
    text = on_tiers(facts_of(tiered(300, HOST, DISK)))
    assert text == (
        "The host memory (80 GB of a rank) gave back 13.0 of 100 tokens, 5.0 minutes of prefill saved per hour after "
        "paying for all moves. The disk (500 GB of a rank) gave back 6.0 of 100 tokens, 6.3 minutes of prefill saved "
        "per hour after paying for all moves."
    )


def test_what_is_not_known_is_not_said() -> None:
    unknown = on_tiers(facts_of(tiered(300, replace(HOST, prefill_seconds=None))))
    assert "minutes" not in unknown
    assert unknown.endswith("name the GPU (--gpu), and use a trace with arrival times.")
    assert "minutes" not in on_tiers(facts_of(tiered(300, HOST, hours=0.0))), "a trace without times has no hours"
    assert on_tiers(facts_of(run())) == ""
    nothing = on_tiers(facts_of(tiered(300, replace(HOST, tokens=0, prefill_seconds=0.0))))
    assert nothing == "The host memory (80 GB of a rank) gave back 0.0 of 100 tokens."


def test_a_link_that_is_too_slow_is_named() -> None:
    slow = replace(DISK, seconds_out=3420.0, skipped=30)
    assert "writing for 95% of the time, and still 25% of the checkpoints" in on_tiers(facts_of(tiered(300, slow)))
    assert "writing" not in on_tiers(facts_of(tiered(300, replace(slow, skipped=0))))
    assert "writing" not in on_tiers(facts_of(tiered(300, slow, hours=0.0)))


def test_what_was_read_back_has_a_line_of_its_own_and_counts_as_reused() -> None:
    facts = facts_of(tiered(300, HOST))
    assert facts.reused == 0.3
    assert [(line.name, line.tokens) for line in facts.waterfall] == [("parted", 700), ("loaded", 130), ("reused", 170)]
    assert "loaded" not in [line.name for line in facts_of(run()).waterfall]


# ---- one tier more at a time


def step(before: float, after: float, minutes: float | None = 5.0, name: str = "host") -> LowerStep:
    return LowerStep(name, 80 * GB, before, after, minutes)


def test_what_a_tier_brings_is_said_with_its_time_where_that_is_known() -> None:
    assert on_lower([step(0.174, 0.302)]) == (
        "80 GB of host memory per rank: 30.2% of the tokens instead of 17.4%, 5.0 minutes of prefill saved per hour "
        "after paying for all moves."
    )
    assert (
        on_lower([step(0.174, 0.302, None)]) == "80 GB of host memory per rank: 30.2% of the tokens instead of 17.4%."
    )
    seconds = on_lower([step(0.174, 0.302, 0.01)])
    assert seconds.endswith(", 0.6 seconds of prefill saved per hour after paying for all moves.")
    assert on_lower([step(0.174, 0.302, -1.0)]).endswith("but its moves take as long as the prefill that they save.")
    assert on_lower([]) == ""


@pytest.mark.parametrize(("after", "little"), [(0.306, True), (0.3069, True), (0.3071, False), (0.35, False)])
def test_less_than_half_a_point_is_little(after: float, little: bool) -> None:
    text = on_lower([step(0.174, 0.302), step(0.302, after, name="disk")])
    assert ("a disk below it adds little" in text) == little
    assert ("80 GB of disk below it: " in text) != little


def test_a_first_tier_may_add_little_too() -> None:
    assert on_lower([step(0.3, 0.302)]) == "80 GB of host memory per rank adds little (30.2% instead of 30.0%)."


def test_steps_are_found_among_runs() -> None:
    """Of three sizes of host memory the smallest of those that give nearly the most; the disk is that below it."""
    small = tier("host", 40 * GB, 50)
    runs = [tiered(174), tiered(224, small), tiered(302, HOST), tiered(400, small, DISK), tiered(362, HOST, DISK)]
    runs.append(tiered(306, tier("host", 200 * GB, 134)))
    facts = [facts_of(one) for one in runs]
    first, second = lower_steps(facts, range(6))
    assert (first.name, first.memory, first.before, first.after) == ("host", 80 * GB, 0.174, 0.302)
    assert (second.name, second.before, second.after) == ("disk", 0.302, 0.362)
    assert first.minutes == pytest.approx(5.0)
    assert second.minutes == pytest.approx(380 / 60)
    assert lower_steps(facts, [2, 4]) == [], "no run without tiers"
    assert lower_steps(facts, [0]) == []


def test_runs_side_by_side_compare_what_differs_in_tiers_alone() -> None:
    other = {"eviction": "lru"}
    runs = [tiered(174), tiered(302, HOST), tiered(100, policy=other), tiered(280, HOST, policy=other)]
    assert [one.before for one in compare(runs).lower] == [0.174]
    assert [one.before for one in compare(runs, focus=3).lower] == [0.1]
    assert compare(runs[1:3]).lower == []
    assert run_labels(runs[:2]) == ["no host memory", "host memory 80 GB"]


def test_advice_says_it_where_such_runs_were_done() -> None:
    values = {"tp": 8, "dcp": 8, "kv_dtype": "bf16", "state_dtype": "fp32"}
    base, below = Variant("dcp 8", values, tiered(174)), Variant("80 GB of host memory", values, tiered(302, HOST))
    line = "- 80 GB of host memory per rank: 30.2% of the tokens instead of 17.4%"
    assert line in advice_text(Study(base, [base], base, [], base, [], lower=[below]))
    assert "per rank:" not in advice_text(Study(base, [base], base, [], base, []))
    with_host = replace(base, values=values | {"host_memory": "80GB", "disk": "500GB"})
    assert "--host-memory 80GB --disk FOLDER:SIZE" in advice_text(
        Study(with_host, [with_host], with_host, [], with_host, [])
    )
