"""Files as they are found: marks, cut and damaged lines, lengths that cannot be, sessions, requests out of order."""

import json
import random
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headway.cli import main
from headway.errors import ConfigError, TraceError
from headway.replay import Trace, read_trace

GOOD = {"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}


def lines(*objects: Any) -> str:
    return "".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in objects)


def read(path: Path, text: str, **more: Any) -> Trace:
    path.write_text(text, encoding="utf-8")
    return read_trace(path, **more)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "t.jsonl"


def test_a_byte_order_mark_is_left_out(path: Path) -> None:
    assert len(read(path, "\ufeff" + lines(GOOD, GOOD))) == 2
    assert len(read(path, "\ufeff" + json.dumps([GOOD, GOOD], indent=1))) == 2


def test_a_last_line_that_is_written_in_half_is_told(path: Path) -> None:
    trace = read(path, lines(GOOD, GOOD) + json.dumps(GOOD)[:20])
    assert len(trace) == 2
    assert trace.notes == (f"The last line is written in half and was left out: {path}, line 3.",)
    assert read(path, lines(GOOD) + json.dumps(GOOD)).notes == (), "a whole line without an end is one"
    with pytest.raises(TraceError, match="line 2: not JSON"):
        read(path, lines(GOOD, json.dumps(GOOD)[:20]))
    with pytest.raises(TraceError, match="line 1: not JSON"):
        read(path, json.dumps(GOOD)[:20])


def test_damaged_lines_are_left_out_up_to_a_number(path: Path) -> None:
    text = lines(GOOD, "{", GOOD, {**GOOD, "hash_ids": 3}, 7, GOOD)
    trace = read(path, text, skip_bad=3)
    assert len(trace) == 3
    assert trace.notes == (
        f"3 damaged lines were left out; the first: {path}, line 2: not JSON: Input data was truncated",
    )
    with pytest.raises(TraceError, match=r"line 5: expected a JSON object.*; 2 were left out before it \(--skip-bad N"):
        read(path, text, skip_bad=2)
    with pytest.raises(TraceError, match=r"line 2: not JSON.*\(--skip-bad N leaves out up to N damaged lines\)"):
        read(path, text)


def test_of_a_damaged_request_nothing_is_kept(path: Path) -> None:
    bad = {"prompt": [1, 2, 3], "answer": [4], "boundaries": [99]}
    good = {"prompt": [1, 2, 3], "answer": [4], "boundaries": [2]}
    head = {"headway_recording": 1, "content": "tokens"}
    trace = read(path, lines(head, good, bad, {"prompt": [1, -2]}, {"prompt": [1, 1 << 40]}, good), skip_bad=3)
    assert [trace.prompt(i).tolist() for i in range(2)] == [[1, 2, 3]] * 2
    assert [trace.marks(i).tolist() for i in range(2)] == [[2], [2]]
    assert [trace.answer(i).tolist() for i in range(2)] == [[4], [4]]


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ({**GOOD, "output_length": 10**15}, "output_length"),
        ({**GOOD, "input_length": 10**15}, "input_length"),
        ({"timestamp": 0, "chat_id": 1, "hash_ids": [1], "input_length": 10**15}, "input_length"),
        ({"input_length": 10**15, "session_id": 1}, "input_length"),
        ({"requests": [{"t": 0, "in": 10**15, "hash_ids": []}]}, r"requests\[0\]\.in"),
        ({"requests": [{"t": 0, "in": 5, "out": 1e15, "hash_ids": []}]}, r"requests\[0\]\.out"),
        ({"prompt": "x", "output_length": 10**15}, "output_length"),
        (
            {"prompt": "x", "choices": [{"text": "y"}], "usage": {"completion_tokens": 10**15}},
            r"usage\.completion_tokens",
        ),
    ],
)
def test_lengths_that_cannot_be_are_refused_by_line_and_field(path: Path, line: dict[str, Any], field: str) -> None:
    renderer = "bytes" if "prompt" in line else None
    with pytest.raises(TraceError, match=rf"line 1: field '{field}': expected a whole number of at most 67108864"):
        read(path, lines(line), tokenizer=renderer)


def test_requests_out_of_order_are_told(path: Path) -> None:
    trace = read(path, lines(*({**GOOD, "timestamp": 1000 * t} for t in (3, 1, 2))))
    assert trace.times.tolist() == [1.0, 2.0, 3.0]
    assert trace.notes == ("1 requests stood behind later ones: all were sorted by time.",)
    assert read(path, lines(*({**GOOD, "timestamp": t} for t in (1, 2, 2)))).notes == ()


def weka(starts: Sequence[float]) -> dict[str, Any]:
    return {"requests": [{"t": t, "in": 64, "out": 1, "hash_ids": [1]} for t in starts]}


def test_sessions_start_apart(path: Path) -> None:
    text = lines(weka([0, 60]), weka([0, 60]), weka([0]))
    assert read(path, text).times.tolist() == [0, 0, 0, 60, 60]
    spread = read(path, text, spread=3600.0)
    assert spread.times.tolist() == [0, 60, 1200, 1260, 2400]
    assert spread.notes == (), "sessions that overlap are not out of order"
    turns = [{"input_length": 5, "session_id": name, "delay": 1000} for name in "aabb"]
    assert read(path, lines(*turns), spread=100.0).times.tolist() == [1, 2, 51, 52]
    with pytest.raises(ConfigError, match=r"--spread: .* does not say which requests form a session"):
        read(path, lines(GOOD), spread=3600.0)


def test_dialogues_as_tau_bench_writes_them(path: Path) -> None:
    said = [("system", "Rules."), ("user", "Hi"), ("assistant", "Yes?"), ("user", "Book"), ("assistant", "Done")]
    dialogue = {"task_id": 1, "reward": 1.0, "traj": [{"role": r, "content": c} for r, c in said]}
    for text in (lines(dialogue, dialogue), json.dumps([dialogue, dialogue], indent=1)):
        trace = read(path, text, tokenizer="bytes", spread=100.0)
        assert trace.times.tolist() == [0, 1, 50, 51]
        assert bytes(trace.prompt(0).tolist()) == b"<|system|>Rules.\n<|user|>Hi\n<|assistant|>"
        assert [bytes(trace.answer(i).tolist()) for i in range(2)] == [b"Yes?", b"Done"]
    with pytest.raises(TraceError, match="line 1: field 'traj': no message of the assistant answers others"):
        read(path, lines({"traj": [{"role": "user", "content": "x"}]}), tokenizer="bytes")


def test_blocks_of_no_tokens_are_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match="--block-tokens 0: a block has at least one token"):
        read(path, lines(GOOD), block_tokens=0)


def test_the_options_of_a_command(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_text(lines(GOOD, "{", GOOD))
    by_hand = ["--attention-bytes", "1000", "--memory", "10MB"]
    for options, code, words in (
        (["--skip-bad", "1"], 0, "headway: 1 damaged line was left out; the first: "),
        ([], 2, "--skip-bad N leaves out"),
        (["--skip-bad", "1", "--spread", "2"], 2, "does not say which requests form a session"),
        (["--block-tokens", "0"], 2, "--block-tokens 0"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["replay", str(path), *by_hand, *options])
        assert ended.value.code == code
        assert words in " ".join(capsys.readouterr().err.split())
    for options in (["--skip-bad", "1"], ["--spread", "1"]):
        with pytest.raises(SystemExit) as ended:
            main(["replay", *options])
        assert ended.value.code == 2
        assert "says how a trace is read" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["replay", "--block-tokens", "0"])
    assert ended.value.code == 2


def test_memory_of_reading_is_that_of_the_symbols(path: Path) -> None:
    """Sessions of long prompts that grow: a block id takes at most 12 bytes, whatever ids and order there are."""
    chance = random.Random(1)
    with path.open("w") as file:
        for _ in range(30):
            ids = [chance.randrange(1 << 60) for _ in range(500)]
            prompts = [{"t": 10.0 * n, "in": 64 * 10 * n, "out": 9, "hash_ids": ids[: 10 * n]} for n in range(1, 50)]
            file.write(json.dumps({"requests": prompts}) + "\n")
    read_trace(path, limit=1)
    tracemalloc.start()
    try:
        trace = read_trace(path)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    ids = len(trace.symbols)
    assert ids > 360_000
    assert held < 6 * ids
    assert peak < 12 * ids + (1 << 20), "and one session as objects"
