"""Every scenario of this directory, each a test of its own; and the form, its errors and the command."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer import Typer
from typer.testing import CliRunner

from headway.conformance import Scenario, ScenarioError, load, read, run
from headway.conformance.command import check

HERE = Path(__file__).parent
SCENARIOS = load(HERE)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_scenario(scenario: Scenario) -> None:
    report = run(scenario)
    assert report.ok, "\n".join(report.lines())


def test_every_scenario_says_why() -> None:
    assert [scenario.name for scenario in SCENARIOS if not scenario.why] == []


def test_names_are_unique_over_all_files() -> None:
    names = [scenario.name for scenario in SCENARIOS]
    assert sorted(set(names)) == sorted(names)


def test_every_case_of_the_table_has_its_scenarios() -> None:
    """README.md names a scenario or a reason for every case; what it names exists."""
    names = {scenario.name for scenario in SCENARIOS}
    rows = [line.split("|")[1:-1] for line in (HERE / "README.md").read_text().splitlines() if line.startswith("| ")]
    cases = {cells[0].strip(): cells[1].strip() for cells in rows if cells[0].strip()[:3].isupper()}
    assert len(cases) >= 50
    for case, answer in cases.items():
        mine = {name for name in names if name.startswith(f"{case}-")}
        told = set(answer.replace("`", "").replace(",", " ").split()) & names
        assert mine <= told, f"{case}: the table leaves out {mine - told}"
        assert told or answer.startswith("not here:"), f"{case}: neither a scenario nor a reason"


# The form.


def world(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "name": "w",
        "groups": [{"name": "attn", "kind": "full", "bytes_per_token": 64}],
        "block_tokens": 4,
        "blocks": 50,
        "steps": [{"run": "A", "prompt": [["p", 0, 9]]}],
    }
    return base | changes


def step(**step: Any) -> dict[str, Any]:
    return world(steps=[{"run": "A", "prompt": [["p", 0, 9]], **step}])


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ([], "list of scenarios"),
        (world(bloks=3), "scenario 'w': unknown key 'bloks'"),
        (step(outputs=2), "scenario 'w': step 1 (run A): unknown key 'outputs'"),
        (step(expect={"hits": [0, 0]}), "step 1 (run A): expect: 'hits' cannot be expected here"),
        (step(expect={"hit": [3, 1]}), "'hit' must be a whole number or [lowest, highest]"),
        (step(expect={"error": "boom"}), "must be one of config, exhausted, unservable"),
        (step(prompt=[["p", 3]]), "a prompt segment is"),
        (step(output=0), "'output' is 0, it must be at least 1"),
        (step(start="A"), "a step does one thing, this one has run and start"),
        (world(steps=[{"prompt": []}]), "step 1: no action"),
        (world(steps=[{"finish": "A"}]), "request 'A' is not running"),
        (world(steps=[{"start": "A", "prompt": [["p", 0, 9]]}, {"commit": "A"}]), "(commit A): `begin` names no"),
        (world(steps=[{"repeat": 2, "steps": [{"abort": "A{i}"}]}]), "step 1[0].1 (abort A0): request 'A0' is not"),
        (world(groups=[{"name": "a", "kind": "mamba"}]), "group 1: 'kind' is 'mamba', it must be one of full,"),
        (
            world(groups=[{"name": "a", "kind": "full", "bytes": 3}]),
            "unknown key 'bytes'; 'bytes_per_token' is missing",
        ),
        (world(layout={"dcp": "two"}), "scenario 'w': layout: 'dcp' must be a whole number, got a string"),
        (world(layout=3), "scenario 'w': layout: expected an object, got a whole number"),
        (world(steps=[{"run": "A"}]), "scenario 'w': step 1 (run A): 'prompt' is missing"),
        (world(steps=[{"run": 3, "prompt": []}]), "scenario 'w': step 1: run: expected a string, got a whole number"),
        (step(breakpoints=[3, "x"]), "step 1 (run A): 'breakpoints[1]' must be a whole number, got a string"),
        (step(prompt=[{"image": "cat"}]), "step 1 (run A): prompt: 'tokens' is missing"),
        (step(expect={"losses": {"EVICTED": "few"}}), "expect: losses: 'EVICTED' must be a whole number or [lowest"),
        (step(expect={"geometry": {"attn": {"span": -1}}}), "geometry: attn: 'span' is -1, it must be at least 0"),
        (step(expect={"geometry": {"attn": {"columns": {"tokens": 3}}}}), "attn: columns: 'blocks' is missing"),
        (world(steps=[{"wait": "long"}]), "scenario 'w': step 1 (wait): 'wait' must be a number, got a string"),
        (world(steps=[{"repeat": 0, "steps": []}]), "scenario 'w': step 1: 'repeat' is 0, it must be at least 1"),
        (step(output=1 << 24), "'prompt' and 'output' have 16,777,225 tokens together"),
        (step(prompt=[["p", 0, 1 << 40]]), "at most 16,777,216 can be played"),
        (step(breakpoints=[0]), "scenario 'w': step 1 (run A): breakpoints must lie in (0, 9]"),
        (world(blocks="many"), "'blocks' must be a whole number, got a string"),
        (world(blocks=True), "'blocks' must be a whole number, got a boolean"),
    ],
)
def test_what_is_not_of_the_form_is_named(bad: Any, words: str) -> None:
    with pytest.raises(ScenarioError, match=re.escape(words)):
        read_and_run([bad] if bad else {})


def read_and_run(value: Any) -> None:
    for scenario in read(value):
        run(scenario)


def test_two_scenarios_of_one_name_are_refused() -> None:
    with pytest.raises(ScenarioError, match="two scenarios are called 'w'"):
        read([world(), world()])


def test_a_wrong_answer_names_step_expected_and_actual() -> None:
    steps = [
        {"run": "A", "prompt": [["p", 0, 9]]},
        {
            "run": "B",
            "prompt": [["p", 0, 9]],
            "expect": {"hit": [3, 5], "reasons": ["EVICTED"], "geometry": {"attn": {"span": 8}}},
        },
        {"expect": {"leases": 1, "free_blocks": 47}},
    ]
    report = run(read([world(steps=steps)])[0])
    assert [str(failure) for failure in report.failures] == [
        "step 2 (run B): hit: expected 3 to 5, got 8",
        "step 2 (run B): reasons: expected EVICTED among them, got LAST_TOKEN",
        "step 2 (run B): geometry.attn.span: expected 8, got 4",
        "step 3 (expect): leases: expected 1, got 0",
    ]


def test_an_expected_error_must_come_and_another_must_not() -> None:
    refused = {"start": "A", "prompt": [["p", 0, 900]]}
    failures = run(read([world(steps=[refused])])[0]).failures
    assert failures[0].expected == "none"
    assert failures[0].actual.startswith("unservable")
    fits = {"start": "A", "prompt": [["p", 0, 9]], "expect": {"error": "unservable"}}
    failures = run(read([world(steps=[fits])])[0]).failures
    assert (failures[0].expected, failures[0].actual) == ("unservable", "none")
    assert run(read([world(expect={"error": "config"})])[0]).failures[0].actual == "none"
    bad = run(read([world(layout={"tp": 3, "dcp": 2})])[0]).failures[0]
    assert bad.step == "configuration"
    assert bad.actual.startswith("config (")


def test_a_step_that_is_granted_nothing_can_be_expected() -> None:
    steps = [
        {"start": "A", "prompt": [["a", 0, 12]]},
        {"start": "B", "prompt": [["b", 0, 12]]},
        {"step": "A", "expect": {"granted": 12}},
        {"step": "B", "expect": {"granted": 0, "error": "exhausted"}},
    ]
    report = run(read([world(steps=steps, blocks=3)])[0])
    assert report.ok, report.lines()


def test_pins_end_when_time_passes() -> None:
    """`wait` moves the cache's clock: a pinned path outlives pressure while its time lasts, and no longer."""
    steps: list[dict[str, Any]] = [
        {"run": "A", "prompt": [["p", 0, 40]], "pin": 40},
        {"run": "F", "prompt": [["f", 0, 160]]},
        {"start": "B", "prompt": [["p", 0, 40]], "expect": {"hit": 39}},
        {"abort": "B"},
        {"wait": 11},
        {"run": "G", "prompt": [["g", 0, 200]]},
        {"start": "C", "prompt": [["p", 0, 40]], "expect": {"hit": 0}},
    ]
    report = run(read([world(steps=steps, pin_seconds=10)])[0])
    assert report.ok, report.lines()


# The command.

app = Typer()
app.command()(check)
runner = CliRunner()


def write(path: Path, *worlds: dict[str, Any]) -> str:
    path.write_text(json.dumps(worlds))
    return str(path)


def test_check_exits_0_where_all_is_right(tmp_path: Path) -> None:
    result = runner.invoke(app, [write(tmp_path / "good.json", world())])
    assert result.exit_code == 0
    assert result.stdout.splitlines() == ["ok    w", "1 scenario, all right"]


def test_check_exits_1_where_an_answer_is_wrong(tmp_path: Path) -> None:
    result = runner.invoke(app, [write(tmp_path / "bad.json", step(expect={"hit": 4}, output=1))])
    assert result.exit_code == 1
    assert "w: step 1 (run A): hit: expected 4, got 0" in result.stdout
    assert result.stdout.splitlines()[-1] == "1 scenario, 1 wrong"


def test_check_prints_one_object_a_scenario(tmp_path: Path) -> None:
    file = write(tmp_path / "two.json", world(name="right"), step(expect={"hit": 4}) | {"name": "wrong"})
    result = runner.invoke(app, [file, "--json"])
    assert result.exit_code == 1
    first, second = (json.loads(line) for line in result.stdout.splitlines())
    assert first == {"name": "right", "ok": True, "failures": []}
    failure = {"step": "step 1 (run A)", "key": "hit", "expected": "4", "actual": "0"}
    assert second == {"name": "wrong", "ok": False, "failures": [failure]}


@pytest.mark.parametrize(
    ("text", "words"),
    [("[", "not JSON"), ("[" * 100_000, "not JSON"), ("{}", "list of scenarios"), ("[]", "is empty")],
)
def test_files_that_cannot_be_read_say_so(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(ScenarioError, match=words):
        load(file)


def test_a_missing_file_and_an_empty_directory_say_so(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="cannot be read"):
        load(tmp_path / "none.json")
    with pytest.raises(ScenarioError, match=r"no \*\.json files"):
        load(tmp_path)
