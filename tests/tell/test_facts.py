"""Facts are derived once: they add up, and terminal, page, JSON and advice say the same."""

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
from rich.console import Console
from tests.tell.results import GB, latency, run

from headway.errors import ConfigError
from headway.replay import ReplayConfig, generate, record_of, replay_trace
from headway.replay.ask.catalogue import model_of
from headway.tell import RunRecord, compare, facts_of, with_facts
from headway.tell.advice import Study, Variant, advice_text
from headway.tell.facts import Refused, Share, Trend, hit_rates, trend_of
from headway.tell.page import report_page
from headway.tell.reasons import LINES, MEANING, REMEDIES, UNSAVABLE
from headway.tell.run import Kind, LostPrefixes, Memory, SharedStretch, Span
from headway.tell.terminal import show, show_runs

LOST = {"parted": 300, "last_token": 10, "state_never_taken": 100, "evicted": 190}
REFUSED = {"refused": 2, "refused_tokens": 100, "needed": 30 * GB}


def test_a_waterfall_has_every_token_once_in_the_order_in_which_it_falls() -> None:
    facts = facts_of(run(300, LOST, **REFUSED))
    assert [(line.name, line.kind) for line in facts.waterfall] == [
        ("parted", "new"),
        ("last_token", "new"),
        ("evicted", "lost"),
        ("state_never_taken", "lost"),
        ("reused", "reused"),
    ]
    assert sum(line.share for line in facts.waterfall) == pytest.approx(1.0)
    assert facts.new == pytest.approx(310 / 900)
    assert facts.loss is not None
    assert (facts.loss.name, facts.loss.tokens) == ("evicted", 190)


def test_refused_requests_stand_apart_from_all_figures() -> None:
    """Ten were served, with 900 tokens; two of 100 tokens were not."""
    facts = facts_of(run(300, LOST, **REFUSED))
    assert facts.refused == Refused(2, 12, pytest.approx(0.1), 30 * GB)
    assert (facts.requests, facts.reused) == (10, pytest.approx(300 / 900))
    assert facts_of(run(300, LOST)).refused is None


def test_what_is_not_worth_a_remedy_is_no_loss() -> None:
    assert facts_of(run(300, {"parted": 691, "evicted": 9})).loss is None
    assert facts_of(run(300, {"parted": 689, "evicted": 11})).loss is not None


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({}, "give more memory, or make states smaller (--state-dtype)"),
        (
            {"layout": {"tp": 8, "dcp": 1, "pcp": 1}},
            "give more memory, split the attention over more ranks (--dcp), or make states smaller (--state-dtype)",
        ),
        (
            {"layout": {"tp": 8, "dcp": 1, "pcp": 1}, "memory": [Memory(10, 9.0, 1000, 50, 1)]},
            "give more memory, or split the attention over more ranks (--dcp)",
        ),
    ],
)
def test_a_remedy_is_one_that_the_run_leaves_open(change: dict[str, Any], remedy: str) -> None:
    made = run(layout=change.get("layout"))
    made = replace(made, result=replace(made.result, memory=change.get("memory", made.result.memory)))
    loss = facts_of(made).loss
    assert loss is not None
    assert loss.remedy == remedy
    plain = replace(made, groups=made.groups[1:])
    assert "--dcp" not in facts_of(plain).lost[0].remedy, "no attention that could be split"


def test_every_line_has_a_meaning_and_every_one_that_can_be_mended_a_remedy() -> None:
    assert set(LINES) == set(MEANING)
    assert set(LINES) - set(REMEDIES) == {*UNSAVABLE, "tier_missed", "tier_failed"}


def test_a_preset_has_no_placement_to_change() -> None:
    lines = {line.name: line for line in facts_of(run(300, LOST, policy={"preset": "vllm-0.32"})).waterfall}
    assert lines["state_never_taken"].remedy == ""
    assert lines["evicted"].remedy != ""


def test_shares_of_what_there_is() -> None:
    facts = facts_of(run())
    assert (facts.cache, facts.requests, facts.reused, facts.endless, facts.future) == ("this cache", 10, 0.3, 0.5, 0.4)
    assert facts.taken == pytest.approx(0.6)
    assert facts_of(run(clairvoyant=None)).future is None
    assert facts_of(run(policy={"preset": "sglang-0.5"})).cache == "sglang-0.5"


def test_what_the_memory_holds() -> None:
    memory = facts_of(run()).memory
    assert (memory.checkpoint_bytes, memory.checkpoint_tokens) == (50_000_000, 50_000)
    assert (memory.used, memory.limit, memory.checkpoint_share, memory.checkpoints) == (1000, 20 * GB, 0.25, 5)
    assert facts_of(run(memory=None)).memory.limit is None, "endless"
    assert facts_of(replace(run(), result=replace(run().result, memory=[]))).memory.used == 0


def test_kinds_are_ranked_only_where_there_are_enough() -> None:
    facts = facts_of(run()).checkpoints
    assert (facts.taken, facts.unused_share) == (150, pytest.approx(82 / 150))
    assert (facts.best, facts.worst) == (Share("junction", 0.8), Share("prompt_end", 0.1))
    rare = facts_of(run(kinds={"prompt_end": Kind(100, 10, 12, 0, 0), "junction": Kind(19, 19, 19, 0, 0)})).checkpoints
    assert (rare.best, rare.worst) == (None, None)
    assert facts_of(run(kinds={})).checkpoints.taken == 0


def test_trends() -> None:
    spans = [Span(i, i + 1, float(i), 100, 10 * i, 95) for i in range(10)]
    assert facts_of(run(over_time=spans)).hit_rate == Trend(0.0, 0.9, 0.0, 0.9, "rises", "filling")
    falls = facts_of(run(over_time=spans[::-1])).hit_rate
    assert falls == Trend(0.9, 0.0, 0.0, 0.9, "falls"), "the memory is nearly empty: it is not outgrown"
    assert facts_of(run(over_time=spans[:9])).hit_rate is None, "too short"
    assert facts_of(run(latency=latency(4.0, growth=3.0))).wait == Trend(4.0, 12.0, 4.0, 12.0, "rises")
    assert facts_of(run(latency=latency(4.0, growth=1.9))).wait is None
    assert facts_of(run()).wait is None


@pytest.mark.parametrize(
    ("values", "direction"),
    [
        ([0.1, 0.2, 0.3, 0.4], "rises"),
        ([0.1, 0.4, 0.35, 0.4], "rises"),
        ([0.1, 0.9, 0.2, 0.3], "varies"),
        ([0.3, 0.1, 0.9, 0.31], "varies"),
        ([0.4, 0.3, 0.35, 0.1], "falls"),
        ([0.4, 0.9, 0.1, 0.2], "varies"),
        ([0.30, 0.31, 0.30, 0.315], "steady"),
        ([0.30, 0.90, 0.30, 0.30], "varies"),
    ],
)
def test_a_trend_looks_at_the_whole_curve(values: list[float], direction: str) -> None:
    assert trend_of(values, 0.02).direction == direction


def full(at: int) -> list[Memory]:
    """The memory is full from request `at` on."""
    return [Memory(i, float(i), 20 * GB if i >= at else GB, 0, 0) for i in range(11)]


def cause(hits: Sequence[int], endless: Sequence[int], memory: list[Memory], lost: dict[str, int]) -> str:
    spans = [Span(i, i + 1, float(i), 100, h, e) for i, (h, e) in enumerate(zip(hits, endless, strict=True))]
    made = run(300, lost, over_time=spans)
    trend = facts_of(replace(made, result=replace(made.result, memory=memory))).hit_rate
    assert trend is not None
    return trend.cause


def test_why_a_hit_rate_moves_is_said_only_where_it_is_so() -> None:
    up, flat, down = range(0, 100, 10), [95] * 10, range(90, -10, -10)
    evicted, never = {"parted": 400, "evicted": 300}, {"parted": 400, "state_never_taken": 300}
    assert cause(up, flat, full(5), evicted) == "filling"
    assert cause(up, flat, full(1), evicted) == "", "it was full nearly from the first"
    assert cause(up, [*range(5, 105, 10)], full(5), evicted) == "traffic"
    assert cause(down, flat, full(2), evicted) == "memory"
    assert cause(down, flat, full(9), evicted) == "", "the memory was not full"
    assert cause(down, flat, full(2), never) == "", "nothing was evicted"
    assert cause(down, [*range(95, -5, -10)], full(2), evicted) == "traffic"


def test_pins_are_for_what_many_requests_pass_and_memory_holds() -> None:
    def few(*worst: SharedStretch, lost: int = 200) -> bool:
        return facts_of(run(prefixes=LostPrefixes(len(worst), lost, list(worst)))).prefixes.few

    many = SharedStretch(0, 64, 6, 0, 9, 150, 30)
    assert few(many)
    assert not few(replace(many, requests=4)), "few requests pass it"
    assert not few(replace(many, lost_tokens=90)), "it is less than half of the loss"
    assert not few(replace(many, lost_tokens=9), lost=9), "it loses less than 1% of the tokens"
    assert not few(replace(many, stop=6_000_000)), "6 million tokens of 1,000 bytes are more than a quarter of 20 GB"


def test_hit_rates_over_time_are_pooled() -> None:
    spans = [Span(i, i + 1, float(i), 100, 10 * i, 50) for i in range(10)]
    assert hit_rates(spans, 5) == [(2, 0.05, 0.5), (4, 0.25, 0.5), (6, 0.45, 0.5), (8, 0.65, 0.5), (10, 0.85, 0.5)]
    assert len(hit_rates(spans, 3)) == 3
    assert len(hit_rates(spans, 99)) == 10
    assert hit_rates([], 5) == []


def test_a_run_that_refuses_requests_is_never_the_best() -> None:
    found = compare([run(900, **REFUSED), run(100), run(200)])
    assert (found.best, found.worst) == (2, 1)
    assert found.telling(2) == [0, 2], "the last of all is the one that refuses"
    assert compare([run(100, **REFUSED), run(200, **REFUSED)]).best == 1


def test_runs_side_by_side() -> None:
    runs = [run(200), run(350, memory=40 * GB), run(350, memory=7 * GB), run(100, layout={"tp": 8, "dcp": 1, "pcp": 1})]
    found = compare(runs)
    assert (found.best, found.worst, found.focus) == (1, 3, 1), "the first of equals"
    assert compare(runs, focus=2).focus == 2
    assert [len(set(found.labels)), len(found.labels)] == [4, 4]
    assert list(found.sizes.values()) == [[2, 0, 1]], "from the smallest memory to the largest; one more differs in dcp"
    assert found.telling(2) == [1, 3]
    assert found.telling(4) == [0, 1, 2, 3]
    assert found.timed == []
    with pytest.raises(ConfigError, match="at least one run"):
        compare([])


def test_what_moves_from_the_worst_to_the_best() -> None:
    equal = run(100, {"parted": 500, "evicted": 400})
    assert compare([equal, replace(equal, memory=GB)]).moved is None, "nothing falls by 0.0 points"
    moved = compare([run(100, {"parted": 800, "evicted": 100}), run(200, {"parted": 600, "evicted": 200})]).moved
    assert moved is None, "evicted rises: it never falls by -10 points"
    worst = run(100, {"parted": 500, "evicted": 300, "state_never_taken": 100})
    best = run(300, {"parted": 500, "evicted": 150, "state_never_taken": 50})
    moved = compare([worst, best]).moved
    assert moved is not None
    assert (moved.line.name, moved.share) == ("evicted", pytest.approx(0.15))
    assert compare([best]).moved is None


def test_json_has_the_facts_and_is_read_back_without_them() -> None:
    made = run(300, LOST, latency=latency(0.2), **REFUSED)
    text = json.dumps(with_facts(made))
    assert json.loads(text)["facts"] == json.loads(json.dumps(asdict(facts_of(made))))
    assert RunRecord.from_dict(json.loads(text)) == made


@pytest.mark.parametrize("preset", [None, "vllm", "sglang", "marconi,alpha=1"])
@pytest.mark.parametrize("memory", [10**9, None])
def test_a_real_run_is_read_back_as_it_was(preset: str | None, memory: int | None) -> None:
    model, trace = model_of("kimi-linear", ReplayConfig((), None).layout), generate("mixed", 40, seed=3)
    config = ReplayConfig(model.groups, memory, cost=model.cost, preset=preset, layers=model.layers)
    made = record_of(replay_trace(trace, config, clairvoyant=True), config, model, trace)
    assert RunRecord.from_dict(json.loads(json.dumps(with_facts(made)))) == made


def said(made: RunRecord) -> str:
    console = Console(file=io.StringIO(), width=200, record=True)
    show(made, console)
    return console.export_text()


def test_a_narrow_terminal_keeps_each_bar_in_one_line() -> None:
    made = run(300, LOST)
    console = Console(file=io.StringIO(), width=80, record=True)
    show(made, console)
    bars = [text for text in console.export_text().splitlines() if "█" in text and "%" in text]
    assert len(bars) == sum(line.tokens > 0 for line in facts_of(made).waterfall), "none goes on in a second line"
    assert sum(text.count("█") for text in bars) >= 18


def test_terminal_page_and_advice_say_the_same() -> None:
    made = run(300, LOST, **REFUSED)
    facts = facts_of(made)
    terminal, page = said(made), report_page(compare([made]))
    variant = Variant("dcp 8", {"tp": 8, "dcp": 8, "kv_dtype": "bf16", "state_dtype": "fp32"}, made)
    advice = advice_text(Study(variant, [variant], variant, [], variant, []))
    for text in (terminal, page):
        table, cell = text[text.rindex("Where the") :], " {} " if text is terminal else '"text">{}<'
        places = [table.index(cell.format(line.name)) for line in facts.waterfall]
        assert places == sorted(places), "in one order"
        for line in facts.waterfall:
            assert f"{line.share:.1%}" in text
            assert line.meaning.replace("'", "&#39;" if text is page else "'") in text
    sentence = "2 of 12 requests need more than the whole memory and would be refused (10.0% of the prompt tokens)."
    assert all(sentence in " ".join(text.split()) for text in (terminal, page, advice))


def test_a_terminal_says_first_that_requests_were_refused_and_last_how_it_was_made() -> None:
    made = run(300, LOST, **REFUSED)
    text = said(replace(made, model=replace(made.model, notes=["a note with [brackets]"]))).strip()
    assert text.startswith("2 of 12 requests need more than the whole memory and would be refused")
    assert "With 30.0 GB per rank, all would be served." in text
    assert "\n- a note with [brackets]\n" in text
    assert text.endswith("that says nothing about the model.")
    assert "refused" not in said(run())


def test_names_of_traces_are_text_and_no_markup() -> None:
    assert "[red]t[/].jsonl" in said(run(trace="[red]t[/].jsonl"))
    console = Console(file=io.StringIO(), width=200, record=True)
    show_runs(compare([run(trace="[red]t[/].jsonl"), run(200, trace="other")]), console)
    assert "[red]t[/].jsonl: 2 runs" in console.export_text()


def test_the_curves_of_a_terminal() -> None:
    text = said(run())
    assert "in use over time: |" in text
    assert "1.0 kB of 20.0 GB at the end, 250 B of it in 5 checkpoints" in text
    assert "| between 30% and 30%" in text
    grown = [Memory(i, float(i), 20 * GB * i // 8, 0, 0) for i in range(9)]
    assert "|" + " ▁▂▃▄▅▆▇█" + "|" in said(replace(run(), result=replace(run().result, memory=grown)))


def test_runs_on_a_terminal() -> None:
    console = Console(file=io.StringIO(), width=200, record=True)
    show_runs(compare([run(memory=7 * GB), run(400, latency=latency(0.2), **REFUSED)]), console)
    text = console.export_text()
    for words in (
        "made.jsonl: 2 runs",
        "7 GB",
        "first token: half",
        "200 ms",
        "250",
        "2 of 12",
        "evicted 18.2%",
    ):
        assert words in text
    assert "times are estimates: roofline of a toy" in " ".join(text.split())
