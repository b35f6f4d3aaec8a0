"""`headway incident`: its four steps without a model, what it draws, and (slow) the whole command."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console
from tests.incident.invented import GROUPS, requests
from typer.testing import CliRunner

from headway.cli import app
from headway.errors import ConfigError
from headway.incident import command
from headway.incident.block_tables import found_by, tables_of, two_sizes
from headway.incident.command import Story, incident, show
from headway.incident.ranks import RANKS, Served
from headway.incident.sessions import Request, recorded
from headway.incident.steps import STEPS, configuration, hits_of, run_steps, what_fails


def served(asked: list[Request], ranks: int = 4) -> Served:
    """Ranks that did all of it right."""
    return Served(GROUPS, [one.answer for one in asked], hits_of(recorded(asked), GROUPS, ranks), 10, 3)


@pytest.mark.parametrize("ranks", RANKS)
def test_each_rule_reuses_more_than_the_one_before(ranks: int) -> None:
    runs = run_steps(recorded(requests()), GROUPS, ranks)
    assert what_fails(runs) == []
    one_geometry, common, resumed, headway = (run.result.whole for run in runs)
    assert one_geometry.hit_tokens == 0
    assert one_geometry.lost["state_never_taken"] == one_geometry.endless_tokens, "every known token is lost to states"
    assert common.lost["state_never_taken"] > resumed.lost["state_never_taken"] > 100
    assert headway.lost.get("state_never_taken", 0) < 5
    assert headway.hit_tokens > 0.99 * headway.endless_tokens


def test_a_rule_that_is_no_better_is_told() -> None:
    runs = run_steps(recorded(requests()), GROUPS, 4)
    assert what_fails([runs[1], runs[1], *runs[2:]]) == [
        "step 1 reuses 52.85%, and one geometry must find nothing",
        "step 2 reuses 52.85%, no more than the step before it",
    ]


def test_every_turn_resumes_behind_the_answer_before_it() -> None:
    asked = requests()
    hits = dict(zip((one.name for one in asked), hits_of(recorded(asked), GROUPS, 4), strict=True))
    before = {one.name: len(one.tokens) + len(one.answer) - 1 for one in asked}
    assert hits["A2"] == before["A1"]
    assert hits["A4"] == before["A3"]
    assert hits["A4'"] == before["A3'"], "a branch has its own state"
    assert hits["C2'"] == before["C1"], "and begins at that of the turn it leaves"


def test_block_tables_hold_every_token_under_the_hit_once() -> None:
    asked = requests()
    number = [one.name for one in asked].index("A4")
    hit = found_by(recorded(asked), configuration(STEPS[-1], GROUPS, 4), number)
    latents, state = tables_of(hit, 4)
    assert latents.title.startswith("full and draft: split by tokens over 4 ranks; an id covers 64 tokens, 16 per rank")
    assert latents.rows[0] == ("all ranks", "0-63", "64-127", "128-191", "192-255", f"256-{hit.tokens - 1}")
    assert [row[1] for row in latents.rows[1:]] == ["0-60 by 4", "1-61 by 4", "2-62 by 4", "3-63 by 4"]
    held = [token for row in latents.rows[1:] for cell in row[1:] for token in tokens_of(cell)]
    assert sorted(held) == list(range(hit.tokens))
    assert len(state.rows) == 4
    assert {row[1] for row in state.rows} == {f"its heads' state after token {hit.tokens - 1}"}
    fault = two_sizes(4, 338)
    assert fault.rows[1][1:] == ("0-127", "128-255")
    assert fault.rows[2][1:] == ("0-31", "32-63")


def tokens_of(cell: str) -> list[int]:
    """The tokens that a cell such as `0-60 by 4` stands for."""
    ends, _, distance = cell.partition(" by ")
    if not distance:
        return [int(token) for token in cell.split(", ") if token != "-"]
    first, last = map(int, ends.split("-"))
    return list(range(first, last + 1, int(distance)))


def told(monkeypatch: pytest.MonkeyPatch, change: bool) -> tuple[int, str]:
    """Run the command with ranks that are made up; `change` makes one of them answer otherwise."""
    asked = requests()
    right = served(asked)
    other = [right.answers[0] + 1, *right.answers[1:]]
    monkeypatch.setattr(command, "write_model", lambda *_: None)
    monkeypatch.setattr(command, "answered_by_one", lambda *_: asked)
    monkeypatch.setattr(command, "served_by_ranks", lambda *_: replace(right, answers=other) if change else right)
    result = CliRunner().invoke(app, ["incident", "--json"])
    return result.exit_code, result.stdout


def test_it_exits_with_1_where_tokens_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = told(monkeypatch, change=False)
    found = json.loads(text)
    assert (code, found["faults"]) == (0, [])
    rates = [round(step["run"]["result"]["whole"]["token_hit_rate"], 4) for step in found["steps"]]
    assert rates == [0.0, 0.5285, 0.5990, 0.7751]
    assert [step["published"] for step in found["steps"]] == [None, 0.156, 0.719, None]
    code, text = told(monkeypatch, change=True)
    assert code == 1
    assert json.loads(text)["faults"][0].startswith("request A1: the ranks answered")


def test_a_number_of_ranks_that_shows_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="--ranks 2: use 4 or 8"):
        incident(ranks=2)


def test_the_story_is_told_on_a_terminal() -> None:
    asked, out = requests(), io.StringIO()
    trace, ranks = recorded(asked), served(asked)
    hit = found_by(trace, configuration(STEPS[-1], GROUPS, 4), 11)
    story = Story(4, asked, ranks, run_steps(trace, GROUPS, 4), tables_of(hit, 4), [])
    show(story, Console(file=out, width=100))
    text = out.getvalue()
    assert [f"Step {n}: {step.name}" in text for n, step in enumerate(STEPS, 1)] == [True] * 4
    assert "15.60%" in text
    assert "All steps hold." in text


@pytest.mark.slow
def test_the_whole_story_with_ranks() -> None:
    result = CliRunner().invoke(app, ["incident", "--json"])
    assert result.exit_code == 0, result.stdout[-2000:]
    found = json.loads(result.stdout)
    assert found["faults"] == []
    assert found["served"]["drafted"] > 0
    assert np.sum(found["served"]["hits"]) == found["steps"][-1]["run"]["result"]["whole"]["hit_tokens"]
