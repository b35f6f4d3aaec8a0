"""What the judge on traces is fed and what it writes: neither needs vLLM."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.traces import __main__ as judge
from tests.vllm.traces.cells import Cell, cells
from tests.vllm.traces.table import render
from tests.vllm.traces.workload import conversation, sessions


def common(a: list[int], b: list[int]) -> int:
    """Tokens that two prompts share from their start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def write_mooncake(path: Path, *rows: tuple[int, int, list[int]]) -> Path:
    lines = [
        {"timestamp": i, "input_length": length, "output_length": answer, "hash_ids": ids}
        for i, (length, answer, ids) in enumerate(rows)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_prompt_that_goes_on_from_another_repeats_its_tail(tmp_path: Path) -> None:
    path = write_mooncake(
        tmp_path / "t.jsonl",
        (1100, 50, [1, 2, 3]),
        (1600, 50, [1, 2, 4, 5]),  # goes on from the first
        (1640, 50, [1, 2, 4, 6]),  # shares its block, and is too short to hold the second and its answer
        (1140, 50, [1, 2, 7]),  # too short to hold the first and its answer
    )
    load = conversation(path, 10)
    first, second, third, fourth = (load.prompt(i) for i in range(4))
    assert [len(p) for p in (first, second, third, fourth)] == [1100, 1600, 1640, 1140]
    assert common(first, second) == 1100, "all of the first, tail included"
    assert common(second, third) == 1536, "the block in which both go on is the same"
    assert common(first, fourth) == 1024
    assert load.answer(0, 5) == [], "Mooncake's prompts contain no answers"


def test_tails_of_several_turns_are_chained(tmp_path: Path) -> None:
    turns = [(1100, 2, [1, 2, 3]), (1200, 2, [1, 2, 4]), (1300, 2, [1, 2, 5])]
    load = conversation(write_mooncake(tmp_path / "t.jsonl", *turns), 10)
    assert [common(load.prompt(i), load.prompt(i + 1)) for i in range(2)] == [1100, 1200]


def write_sessions(folder: Path) -> Path:
    folder.mkdir()
    for number in range(3):
        requests = [
            {"t": 10.0 * i + number, "type": "n", "in": 64 * (3 + i) + 10, "out": 20, "hash_ids": list(range(1, 4 + i))}
            for i in range(4)
        ]
        requests.append({"t": 99.0, "type": "n", "in": 64_000, "out": 1, "hash_ids": list(range(1, 1001))})
        session = {"block_size": 64, "hash_id_scope": "local", "requests": requests}
        with gzip.open(folder / f"s{number}.json.gz", "wt") as file:
            json.dump(session, file)
    return folder


def test_each_session_gives_as_many_requests_and_waits_for_its_answers(tmp_path: Path) -> None:
    load = sessions(write_sessions(tmp_path / "agents"), files=2, requests=7, longest=1000)
    assert len(load) == 6, "three each: four would be eight"
    threads = [load.thread(i) for i in range(6)]
    assert threads[0] != threads[1]
    assert threads == threads[:2] * 3, "in the order of arrival"
    first, second = load.prompt(0), load.prompt(2)
    assert common(first, second) == len(first) == 202
    assert load.answer(0, 20) == second[202:222], "the next prompt contains the answer"
    assert common(first, load.prompt(1)) == 0, "ids mean nothing outside of their session"


def record(engine: str, reused: int, **changes: Any) -> dict[str, Any]:
    cell = vars(Cell("kimi-k3", "conversation", 14.5, engine)) | changes
    counts = {"requests": 3, "prompt_tokens": 1000, "reused": reused, "steps": 1234, "preemptions": 1, "rejected": 0}
    spent = {"ms_arriving": 0.25, "ms_scheduling": 1.0, "ms_updating": 0.5, "waterfall": {"evicted": 90}}
    return {"cell": cell, "checked": 7, "aborted": 1, "resets": 2} | counts | spent


def test_the_table_compares_with_vllm_and_says_where_it_is_ahead() -> None:
    text = render([record("headway", 300), record("vllm-512", 400), record("vllm", 100)])
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| kimi-k3")]
    assert [row[3:6] for row in rows] == [
        ["vllm", "10.0%", "1.00"],
        ["headway", "30.0%", "3.00"],
        ["vllm-512", "40.0%", "4.00"],
    ]
    assert "vllm-512 is 10.0% ahead" in text
    assert "evicted 9.0%" in text
    assert "- vllm is" not in text
    checked = render([record("headway", 300, checked=True, asynchronous=True, drafts=3)])
    assert "asynchronous, 3 drafts | 7 | 1 | 1 | 2" in checked


def test_finished_cells_are_kept_unless_what_decides_them_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(judge, "version", lambda _: "0.33.0")
    wanted = [cell for cell in cells() if cell.trace == "agents" and cell.memory == 58 and cell.model == "kimi-k3"]
    out = tmp_path / "cells.jsonl"
    lines = [judge.key(cell, 2) | record(cell.engine, 100) | {"cell": vars(cell)} for cell in wanted[:2]]
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--traces", ".", "--out", str(out), "--only", "kimi-k3/agents/58", "--show"]
    assert judge.main(options) == 0
    assert f"{len(wanted)} cells, {len(wanted) - 2} to run" in capsys.readouterr().out
    monkeypatch.setattr(judge, "code_digest", lambda: "other")
    judge.main(options)
    assert f"{len(wanted)} cells, {len(wanted) - 1} to run" in capsys.readouterr().out, "vLLM's own cell still counts"
