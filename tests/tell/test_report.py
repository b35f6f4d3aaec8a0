"""A report says what the numbers say, in one file that needs nothing else."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.tell.results import GB, figures, latency, run

from headway.cli import main
from headway.errors import ConfigError
from headway.replay import ReplayConfig, generate, replay_trace
from headway.replay.ask.catalogue import model_of
from headway.replay.ask.record import record_of
from headway.tell import compare, facts_of, sentences
from headway.tell.labels import run_labels
from headway.tell.page import report_page
from headway.tell.run import GroupSize, Kind, LostPrefixes, RunRecord, SharedStretch, Span

VOID = {"meta", "br", "path", "use", "circle", "rect", "line", "stop"}


class Reader(HTMLParser):
    """Collects ids, outside references and the text; fails on tags that do not nest."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.outside: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        given = dict(attrs)
        if given.get("id"):
            self.ids.append(str(given["id"]))
        self.outside += [str(v) for k, v in attrs if k in ("src", "href", "xlink:href") and not str(v).startswith("#")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    return reader


def page_of(runs: list[RunRecord], **more: Any) -> str:
    return report_page(compare(runs, **more))


def test_a_page_needs_nothing_outside_itself() -> None:
    page = read(page_of([run(), run(350, memory=40 * GB), run(100, layout={"tp": 8, "dcp": 1, "pcp": 1})]))
    assert page.outside == []
    assert "script" not in page.tags
    assert "link" not in page.tags
    assert len(page.ids) == len(set(page.ids)), "figures of one page must not share ids"
    for title in ("What is reused", "by reason", "over memory", "Where the tokens went", "Over time", "by prefix"):
        assert title in page.text


def test_references_inside_a_figure_are_kept() -> None:
    page = page_of([run()])
    ids = set(re.findall(r'\bid="([^"]+)"', page))
    used = re.findall(r"url\(#([^)]+)\)", page) + re.findall(r'href="#([^"]+)"', page)
    assert used
    assert set(used) <= ids


def test_what_a_trace_says_is_text_and_no_markup() -> None:
    page = page_of([run(trace="<script>alert(1)</script>.jsonl")])
    assert "<script>" not in page
    assert "&lt;/script&gt;" in page or "script&gt;.jsonl" in page


def test_a_real_run_of_every_shape() -> None:
    for name, memory, requests in (("kimi-linear", 10**9, 60), ("kimi-linear", None, 60), ("kimi-linear", 10**8, 1)):
        model = model_of(name, ReplayConfig((), None).layout)
        config = ReplayConfig(model.groups, memory, cost=model.cost)
        trace = generate("mixed", requests, seed=8)
        found = record_of(replay_trace(trace, config, clairvoyant=True), config, model, trace)
        assert f"{found.result.whole.token_hit_rate:.1%}" in read(page_of([found])).text


def test_a_model_without_checkpoints_and_nothing_lost() -> None:
    page = read(page_of([run(500, {"parted": 500}, kinds={}, memory=None)]))
    assert "All others were reused" in page.text


def test_many_runs_show_the_best_and_the_worst() -> None:
    runs = [run(200 + i, memory=(i + 1) * GB) for i in range(40)]
    page = page_of(runs)
    assert "41 GB" not in page
    for memory in ("1 GB", "40 GB"):
        assert page.count(f">{memory}<") >= 2, "both ends are in the figures and in the table"


def test_times_are_shown_where_there_are_any() -> None:
    assert "How long requests wait" not in read(page_of([run()])).text
    alone = read(page_of([run(latency=latency(0.2))]))
    assert "half of the requests have their first token within 200 ms and 95% within 400 ms" in alone.text
    assert "Times are estimates: roofline of a toy." in alone.text
    assert "Waits grow" not in alone.text
    assert len(alone.ids) == len(set(alone.ids))
    runs = [run(latency=latency(4.0, growth=3.0)), run(memory=7 * GB), run(memory=9 * GB, latency=latency(0.3))]
    page = read(page_of(runs)).text
    assert "20 GB: By estimate, half of the requests have their first token within 4 s" in page
    assert "Waits grow all along, from 4 s in the first eighth of the requests to 12 s in the last" in page
    assert "0.9 s" not in page
    assert "900 ms" in page, "99% of the run with 9 GB"


def test_refused_requests_are_told_first_and_change_no_rate() -> None:
    lost = {"parted": 400, "evicted": 100}
    refused = run(200, lost, refused=2, refused_tokens=300, needed=30 * GB)
    told = (
        "2 of 12 requests need more than the whole memory and would be refused (30.0% of the prompt tokens). With 30.0 "
        "GB per rank, all would be served. The figures are those of the others."
    )
    found = compare([refused], labels=["this run"])
    assert sentences.on_rates(found).startswith(told)
    assert sentences.on_rates(found).removeprefix(told + " ") == sentences.on_rates(compare([run(200, lost)]))
    assert sentences.on_waterfall(facts_of(refused)) == sentences.on_waterfall(facts_of(run(200, lost)))
    assert "refused" not in sentences.on_rates(compare([run(200, lost)]))
    page = read(page_of([refused, run(100, lost)])).text
    assert "12 requests, 1,000 prompt tokens; model toy; 2 runs side by side" in page, "those refused are of the trace"
    both = sentences.on_rates(compare([refused, run(100, lost)]))
    assert both.endswith("1 run refused more requests, and cannot be compared.")
    assert "The worst run" not in both


def test_no_runs() -> None:
    with pytest.raises(ConfigError, match="at least one run"):
        page_of([])


def test_labels_are_what_differs() -> None:
    one = {"tp": 8, "dcp": 1, "pcp": 1}
    assert run_labels([run()]) == ["this run"]
    assert run_labels([run(), run(memory=None)]) == ["20 GB", "endless"]
    assert run_labels([run(), run(layout=one)]) == ["dcp 8", "dcp 1"]
    assert run_labels([run(), run(layout=one), run(layout=one)]) == ["dcp 8", "dcp 1", "dcp 1 (2)"]
    lru = {"placement": ["prompt_end", "junction"], "eviction": "lru"}
    assert run_labels([run(), run(policy=lru)]) == ["prompt_end, value", "prompt_end+junction, lru"]
    assert run_labels([run(policy={"preset": None}), run(policy={"preset": "vllm-0.32"})]) == ["headway", "vllm-0.32"]
    clock = {"timing": {"gpu": "h200", "speed": "x1", "at once": 64}}
    slow, fast = run(policy=clock), run(policy={"timing": clock["timing"] | {"speed": "x2"}})
    assert run_labels([slow, fast]) == ["speed x1", "speed x2"]
    assert run_labels([run(policy={"eviction": "lru"}), fast]) == ["lru, clock order", "h200, speed x2, at once 64"]


def test_sizes_are_in_a_label_only_where_nothing_else_tells_runs_apart() -> None:
    small = [GroupSize("attention", "FullAttention", 4000), GroupSize("state", "Recurrent", 50_000_000)]
    fp8, split = replace(run(), groups=small), replace(run(layout={"tp": 8, "dcp": 1, "pcp": 1}), groups=small)
    assert run_labels([run(), split]) == ["dcp 8", "dcp 1"]
    assert run_labels([run(), fp8]) == ["attention 8.0 kB", "attention 4.0 kB"]
    assert run_labels([run(), fp8, split]) == [
        "attention 8.0 kB, dcp 8",
        "attention 4.0 kB, dcp 8",
        "attention 4.0 kB, dcp 1",
    ]


def test_names_and_focus_can_be_given() -> None:
    page = read(page_of([run(300), run(400)], labels=["as it is", "more"], focus=0)).text
    assert "Where the tokens went: as it is" in page
    assert "The best of 2 runs (more)" in page


def test_memory_is_a_curve_only_where_nothing_else_differs() -> None:
    lru = {"placement": ["prompt_end"], "eviction": "lru"}
    assert "Hit rate over memory" not in read(page_of([run(), run(memory=7 * GB, policy=lru)])).text
    page = read(page_of([run(), run(400, memory=40 * GB), run(memory=7 * GB, policy=lru)])).text
    assert "From 20 GB to 40 GB per rank, the hit rate goes from 30.0% to" in page


def test_sentences() -> None:
    assert sentences.on_rates(compare([run()], labels=["this run"])) == (
        "This cache reuses 30.0% of the prompt tokens, which saves 30.0% of the prefill compute. An endless memory "
        "would reuse 50.0%, so 60% of what this traffic has to give is taken. A cache of the same size that knows the "
        "future reaches 40.0%."
    )
    low = run(450, {"parted": 500, "evicted": 50})
    assert "knows the future" not in sentences.on_rates(compare([low])), "an estimate below what was reached"
    nothing = run(0, {"nothing_matched": 1000})
    assert sentences.on_rates(
        compare([replace(nothing, result=replace(nothing.result, whole=figures(0, {"parted": 9}, 0)))])
    ) == ("No prompt begins like an earlier one: there is nothing to reuse, whatever the memory.")
    vllm = run(300, {"parted": 500, "state_never_taken": 200}, policy={"preset": "vllm-0.32"})
    assert sentences.on_rates(compare([vllm], labels=["this run"])).startswith("The preset vllm-0.32 reuses 30.0%")
    assert "To mend it" not in sentences.on_waterfall(facts_of(vllm)), "a preset has no --placement"
    assert "try other places for checkpoints" in sentences.on_waterfall(
        facts_of(run(300, {"parted": 50, "state_never_taken": 20}))
    )
    for never in (10, 490):
        lost = {"parted": 10_000 - never, "state_never_taken": never}
        assert sentences.on_waterfall(facts_of(run(40_000, lost))).endswith(
            "new: no cache of prefixes can save them. Hardly any other token was lost."
        ), "a loss of less than 1 of 100 needs no remedy"
    assert "All others were reused" in sentences.on_waterfall(facts_of(run(300, {"parted": 500})))
    assert "All others were reused" not in sentences.on_waterfall(facts_of(run(0, {"parted": 500})))
    assert sentences.on_waterfall(facts_of(run())) == (
        "Of 100 prompt tokens, 50.0 were new: no cache of prefixes can save them. The largest loss is evicted, 20.0 of "
        "100: was kept, and had to make room. To mend it: give more memory, or make states smaller (--state-dtype)."
    )
    assert sentences.on_reasons(
        compare([run(100, {"parted": 500, "evicted": 400}), run()], labels=["low", "high"])
    ) == ("From the worst run (low) to the best (high), evicted falls by 20.0 points: was kept, and had to make room.")
    equal = compare([run(memory=7 * GB), run()])
    assert sentences.on_reasons(equal).startswith("No two runs that refuse equally few requests")
    rises = compare([run(100, {"parted": 800, "evicted": 100}), run(200, {"parted": 600, "evicted": 200})])
    assert sentences.on_reasons(rises) == "No line of the best run is smaller than in the worst.", "never by -10.0"
    # A state of 50 MB against 8,000 bytes a token over 8 ranks: 50,000 tokens. 250 of 1,000 bytes are checkpoints.
    assert sentences.on_memory(facts_of(run())) == (
        "One checkpoint takes 50.0 MB of a rank, as much as the attention of 50,000 tokens. At the end 25% of the "
        "memory in use is checkpoints (5 of them) and 75% is attention."
    )
    # 82 of 150 were evicted unused; 40 of 50 junctions were reused, and 10 of 100 ends of prompts.
    assert sentences.on_checkpoints(facts_of(run())) == (
        "150 checkpoints were taken; 55% of them were evicted before anybody used them. junction pays best (80% "
        "reused), prompt_end least (10%)."
    )
    same = run(kinds={"prompt_end": Kind(100, 0, 0, 0, 0), "junction": Kind(50, 0, 0, 0, 0)})
    assert "pays best" not in sentences.on_checkpoints(facts_of(same)), "of two kinds that never pay none is best"
    told = sentences.on_prefixes(facts_of(run()))
    assert "[0, 64), which 6 requests pass: 150 tokens" in told
    assert "pin them" in told
    spread = LostPrefixes(9, 200, [SharedStretch(0, 64, 2, 0, 9, 150, 30)])
    assert "pin them" not in sentences.on_prefixes(facts_of(run(prefixes=spread)))


def test_time_has_a_direction_only_where_the_whole_curve_has() -> None:
    def told(*hits: int, endless: int = 95) -> str:
        spans = [Span(i, i + 1, float(i), 100, hit, endless) for i, hit in enumerate(hits)]
        return sentences.on_time(facts_of(run(over_time=spans)))

    assert told(*range(0, 100, 10)) == (
        "The hit rate rises, from 0.0% of the tokens in the first tenth of the requests to 90.0% in the last. The "
        "memory was not full at first: trust the later figures more."
    )
    assert told(*range(90, -10, -10)).startswith("The hit rate falls, from 90.0%")
    assert "outgrows" not in told(*range(90, -10, -10)), "the memory is nearly empty"
    both_ends_low = told(0, 50, 90, 90, 90, 90, 90, 90, 50, 3)
    assert both_ends_low == "The hit rate goes up and down: between 0.0% and 90.0% in every tenth of the requests."
    assert told(*[30] * 10).startswith("The hit rate is steady: between 30.0% and 30.0%")
    assert told(*[30] * 9) == "The trace is short: the hit rate has no trend yet."


def test_what_more_memory_buys() -> None:
    more = sentences.on_memory_sizes(compare([run(400, memory=80 * GB), run()]))
    assert "From 20 GB to 80 GB per rank, the hit rate goes from 30.0% to" in more
    assert "More memory hardly helps" in sentences.on_memory_sizes(compare([run(memory=80 * GB), run()]))
    all_there_is = {"parted": 500}
    enough = sentences.on_memory_sizes(compare([run(500, all_there_is, memory=80 * GB), run(500, all_there_is)]))
    assert enough.endswith("That is all that an endless memory would reuse.")
    assert "hardly helps" not in enough, "nothing is lost"
    refused = run(250, memory=7 * GB, refused=1, refused_tokens=10, needed=9 * GB)
    told = sentences.on_memory_sizes(compare([refused, run(), run(400, memory=80 * GB)]))
    assert told.startswith("7 GB per rank does not serve all requests. From 20 GB to 80 GB per rank")
    assert "Fewer than two sizes" in sentences.on_memory_sizes(compare([refused, run()]))


def test_the_command_joins_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = tmp_path / "one.json", tmp_path / "runs.jsonl"
    one.write_text(json.dumps(run().as_dict(), indent=2))
    two.write_text(json.dumps({"key": "k", "run": run(memory=7 * GB).as_dict()}) + "\n")
    out = tmp_path / "page.html"
    with pytest.raises(SystemExit) as ended:
        main(["report", str(one), str(two), "--html", str(out)])
    assert ended.value.code == 0
    assert "2 runs" in capsys.readouterr().err
    assert "7 GB" in out.read_text()
    with pytest.raises(SystemExit) as ended:
        main(["report", str(one), "--html", str(tmp_path / "absent" / "page.html")])
    assert ended.value.code == 2
    one.write_text('{"result": 3}')
    with pytest.raises(SystemExit) as ended:
        main(["report", str(one), "--html", str(out)])
    assert ended.value.code == 2
    assert "one.json, line 1: field" in capsys.readouterr().err
    one.write_text('{"timestamp": 3, "hash_ids": [1]}')
    with pytest.raises(SystemExit):
        main(["report", str(one), "--html", str(out)])
    assert f"replay it first: headway replay {one}" in capsys.readouterr().err


def test_how_it_was_made_is_told_alike() -> None:
    clock = {"timing": {"gpu": "h200", "speed": "x20", "at once": 64, "tokens per step": 8192}}
    for made, words in (
        (run(), "Requests end before the next begins."),
        (run(policy=clock, latency=latency(0.2)), "Arrivals are at 20 x the recorded rate, at most 64 requests run"),
        (run(preset="vllm-0.32,running=16"), "Imitates vllm-0.32,running=16; what is modelled"),
        (run(outputs="continuation"), "is taken to contain its answer"),
        (replace(run(), cost={"linear": 1.0, "quadratic": 1.0, "source": "a paper"}), "its source: a paper."),
        (run(), "This model's compute is not known"),
    ):
        assert any(words in told for told in sentences.on_making(made))
        page = read(page_of([made])).text
        for told in sentences.on_making(made):
            assert told in page
