"""`headway replay` from the outside."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from headway.cli import main

BY_HAND = ("--attention-bytes", "1000", "--memory", "1GB")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["replay", *arguments])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    code, out, err = run(capsys, *arguments, "--json")
    assert code == 0, err
    return json.loads(out)


def test_without_a_trace_it_shows_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--limit", "80")
    assert code == 0
    for words in ("this cache", "knowing the future", "endless memory", "reused", "prompt_end", "memory of one rank"):
        assert words in out
    assert "kimi-linear" in out


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "--limit", "80", "--model", "kimi-k3", "--tp", "8", "--dcp", "8", "--memory", "20GB")
    assert found["memory"] == 20_000_000_000
    assert [group["bytes"] for group in found["groups"]] == [27_648, 56_171_520]
    whole = found["result"]["whole"]
    assert whole["hit_tokens"] + sum(whole["lost"].values()) == whole["prompt_tokens"]
    assert found["result"]["clairvoyant"]["hit_tokens"] <= whole["endless_tokens"]
    assert found["trace"] == {"format": "generated", "block_tokens": 64}


def test_lower_tiers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    asked = ("--limit", "200", "--model", "kimi-linear", "--memory", "1GB", "--host-memory", "20GB", "--gpu", "h200")
    found = as_json(capsys, *asked, "--disk", "100GB", "--disk-link", "2GB/s")
    whole, tiers = found["result"]["whole"], found["result"]["tiers"]
    assert [tier["name"] for tier in tiers] == ["host", "disk"]
    assert 0 < whole["loaded_tokens"] < whole["hit_tokens"]
    assert sum(tier["tokens"] for tier in tiers) == pytest.approx(whole["loaded_tokens"], rel=0.01)
    assert whole["hit_tokens"] + sum(whole["lost"].values()) == whole["prompt_tokens"]
    assert tiers[0]["saved_seconds"] > 0
    assert found["policy"]["tiers"]["disk"]["read"] == 2e9
    if importlib.util.find_spec("matplotlib"):
        asked += ("--html", str(tmp_path / "page.html"))
    code, out, _ = run(capsys, *asked)
    assert code == 0
    text = " ".join(out.split())
    assert "loaded" in out
    assert "Lower tiers of memory" in out
    assert "The host memory (20 GB of a rank) gave back" in text
    if importlib.util.find_spec("matplotlib"):
        page = (tmp_path / "page.html").read_text()
        assert "Lower tiers of memory" in page
        assert "read back from lower tiers of memory" in page


def test_a_trace_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    line = {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}
    path.write_text((json.dumps(line) + "\n") * 3)
    bytes_by_hand = ("--attention-bytes", "1000", "--state-bytes", "5000", "--memory", "1GB")
    found = as_json(capsys, str(path), *bytes_by_hand, "--eviction", "lru", "--placement", "prompt_end,interval:512")
    assert found["result"]["whole"]["hit_tokens"] == 2 * 1099
    assert found["cost"]["source"] == "assumed"
    code, out, _ = run(capsys, str(path), *bytes_by_hand, "--outputs", "continuation")
    assert code == 0
    assert "taken to contain its answer" in " ".join(out.split())


@pytest.mark.parametrize("preset", ["vllm", "sglang", "marconi"])
def test_presets(capsys: pytest.CaptureFixture[str], preset: str) -> None:
    code, out, err = run(capsys, "--limit", "60", "--preset", preset)
    assert code == 0, err
    assert f"whole trace: {preset}-" in out, "with the version that it was checked against"
    assert f"Imitates {preset}-" in " ".join(out.split())


def test_a_clock(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--limit", "30", "--clock", "trace", "--gpu", "h100", "--memory", "4GB", "--speed", "20")
    code, out, err = run(capsys, *arguments)
    assert code == 0, err
    for words in ("for the first token", "in the queue", "estimated", "Times are estimates", "20 x the recorded rate"):
        assert words in " ".join(out.split())
    found = as_json(capsys, *arguments)["result"]["latency"]
    assert found["requests"] == 30
    assert 0 < found["first_token"]["p50"] <= found["first_token"]["p90"] <= found["first_token"]["p99"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--model", "kimi-k4"), 2, "(nearest: kimi-"),
        (("no/such/trace.jsonl",), 2, "there is no such file"),
        (("--model", "kimi-k3"), 2, "how much memory"),
        (("--clock", "wall"), 2, "clock 'wall'"),
        (("--clock", "trace"), 2, "name the GPU"),
        (("--speed", "2"), 2, "need --clock trace"),
        (("--preset", "trt"), 2, "unknown preset"),
        (("--preset", "vllm", "--eviction", "lru"), 2, "are the preset's"),
        (("--max-answer", "3"), 2, "cannot be cut"),
        (("--model", "kimi-k3", "--tp", "4", "--dcp", "3", "--memory", "9GB"), 2, "not divisible"),
        (("absent.jsonl", "--model", "kimi-k3", "--memory", "9GB"), 2, "absent.jsonl"),
        ((__file__,), 2, "which model"),
        (
            ("--model", "kimi-k3", "--tp", "8", "--memory", "58MB", "--limit", "9"),
            2,
            "none of the 9 requests can be served",
        ),
        ((__file__, *BY_HAND, "--seed", "3", "--workload", "chat"), 2, "--workload, --seed: is for a generated trace"),
        (("--format", "mooncake"), 2, "--format: says how a trace is read"),
        (("--tokenizer", "bytes"), 2, "--tokenizer: says how a trace is read"),
        ((*BY_HAND, "--kv-dtype", "fp8"), 2, "--kv-dtype: bytes given by hand do not change"),
        ((*BY_HAND, "--state-dtype", "bf16"), 2, "--state-dtype: bytes given by hand do not change"),
        ((*BY_HAND, "--tp", "8", "--dcp", "8"), 2, "give --kv-heads"),
        ((*BY_HAND, "--tp", "8", "--dcp", "8", "--kv-heads", "2"), 2, "2 key/value heads, so each is on 4 of 8 ranks"),
        (("--state-bytes", "9", "--memory", "1GB", "--tp", "2", "--dcp", "2"), 2, "tokens of full attention"),
        (("--model", "kimi-linear", "--memory", "1GB", "--kv-heads", "2"), 2, "not both"),
        (("--clock", "trace", "--gpu", "h200", "--memory", "1GB", "--gpu-share", "0.5"), 2, "--gpu-share: go with"),
        (
            ("--model", "minimax-m2", "--memory", "9GB", "--state-dtype", "bf16"),
            2,
            "minimax-m2 has no recurrent states",
        ),
        (("--outputs", "continuation"), 2, "says itself what was answered"),
        (("--preset", "vllm", "--clock", "trace", "--gpu", "h200"), 2, "has no clock"),
        (("--html", "no/such/folder/r.html"), 2, "there is no folder no/such/folder"),
    ],
)
def test_faults_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, words: str
) -> None:
    ended, _, err = run(capsys, *arguments)
    assert ended == code
    assert words in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("command", ["replay", "sweep", "advise", "explain"])
def test_a_trace_that_is_not_there_is_told_first(capsys: pytest.CaptureFixture[str], command: str) -> None:
    """Before a model or memory is asked for."""
    with pytest.raises(SystemExit) as ended:
        main([command, "absent.jsonl"])
    assert ended.value.code == 2
    assert "absent.jsonl: there is no such file or folder" in capsys.readouterr().err


def test_bytes_by_hand_can_be_split_where_heads_are_copies(capsys: pytest.CaptureFixture[str]) -> None:
    layout = ("--tp", "8", "--dcp", "4")
    found = as_json(capsys, "--limit", "20", *BY_HAND, *layout, "--kv-heads", "2")
    assert found["layout"] == {"tp": 8, "dcp": 4, "pcp": 1}
    assert as_json(capsys, "--limit", "20", *BY_HAND, *layout, "--kv-heads", "1")["layout"]["dcp"] == 4


def test_a_named_draft_follows_its_data_type(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--limit", "20", *BY_HAND, "--draft", "kimi-k3-mla", "--kv-dtype", "fp8")
    assert [group["bytes"] for group in as_json(capsys, *arguments)["groups"]] == [1000, 2880]


def mooncake(path: Path, requests: int) -> str:
    line = {"timestamp": 0, "input_length": 1100, "output_length": 500, "hash_ids": [0, 1, 2]}
    path.write_text((json.dumps(line) + "\n") * requests)
    return str(path)


def test_models_are_listed_with_their_other_names(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--models")
    assert code == 0
    assert "kimi-k3" in out.split()
    assert "(also " in out


def test_answers_can_be_cut(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With whole answers of 500 tokens, prompts of 1,100 tokens push each other out; with short ones they fit."""
    arguments = (
        mooncake(tmp_path / "t.jsonl", 6),
        "--attention-bytes",
        "1000",
        "--memory",
        "3MB",
        "--outputs",
        "never",
    )
    used = [
        max(moment["used"] for moment in as_json(capsys, *arguments, *more)["result"]["memory"])
        for more in ((), ("--max-answer", "1"))
    ]
    assert used[1] < used[0]


def test_a_chat_log(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    lines = [{"messages": [{"role": "user", "content": "x" * 300 + end}], "response": "yes"} for end in "ab"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = as_json(capsys, str(path), *BY_HAND, "--tokenizer", "bytes")
    assert found["trace"] == {"format": "chat", "block_tokens": 1}
    assert found["result"]["whole"]["hit_tokens"] == len("<|user|>") + 300


def test_what_is_printed_becomes_a_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = []
    for preset in ((), ("--preset", "vllm")):
        code, out, err = run(capsys, "--limit", "40", "--json", "--html", str(tmp_path / "alone.html"), *preset)
        assert code == 0, err
        files.append(tmp_path / f"{len(files)}.json")
        files[-1].write_text(out)
    assert "preset vllm-0.33" in (tmp_path / "alone.html").read_text()
    with pytest.raises(SystemExit) as ended:
        main(["report", *map(str, files), "--html", str(tmp_path / "both.html")])
    assert ended.value.code == 0, capsys.readouterr().err
    page = (tmp_path / "both.html").read_text()
    assert "2 runs side by side" in page
    assert '<td class="text">vllm-0.33</td>' in page
    for path in files:
        facts = json.loads(path.read_text())["facts"]
        assert f"<td>{facts['reused']:.1%}</td>" in page


def test_some_requests_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--limit", "40", "--model", "kimi-linear", "--memory", "200MB")
    assert code == 0, err
    assert out.startswith("8 of 40 requests need more than the whole memory and would be refused")
    needed = re.search(r"With ([\d.]+ [MG]B) per rank, all would be served", " ".join(out.split()))
    assert needed is not None
    code, out, _ = run(capsys, "--limit", "40", "--model", "kimi-linear", "--memory", needed[1])
    assert code == 0
    assert "would be refused" not in out


@pytest.mark.parametrize("missing", ["matplotlib", "jinja2"])
def test_a_report_without_its_extra_is_told_before_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == missing else there(name))
    code, _, err = run(capsys, "--html", str(tmp_path / "r.html"))
    assert (code, err.strip()) == (2, "headway replay needs the report extra: pip install 'headway[report]'")


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for words in ("--model", "--memory", "--outputs", "endless memory", "state_never_taken"):
        assert words in out
