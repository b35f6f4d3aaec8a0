"""`headway serve` as a user runs it: a process of its own."""

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from tests.server.kv_reader import reading

from headway.cli import main
from headway.server.command import _told_below
from headway.tiers import TierStats

_KV_EVENTS = json.dumps(
    {
        "enable_kv_cache_events": True,
        "endpoint": "tcp://127.0.0.1:*",
        "replay_endpoint": "tcp://127.0.0.1:*",
        "heartbeat_seconds": 0.05,
    }
)


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "headway", "serve", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))


@contextmanager
def served(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """A server that listens: its process, its address, and what it printed until then."""
    process = start("--port", "0", "--memory", "8MiB", *arguments)
    try:
        printed = ""
        assert process.stderr is not None
        for line in process.stderr:
            printed += line
            if "Application startup complete" in line:
                break
        found = re.search(r"http://127\.0\.0\.1:\d+", printed)
        assert found, printed
        yield process, found[0], printed
    finally:
        process.kill()
        process.communicate()


def test_serve_prints_what_matters_and_answers_the_call_it_prints(tiny_model: Path):
    options = ("--served-model-name", "mine", "--checkpoint-alignment", "4", "--kv-events-config", _KV_EVENTS)
    with served(str(tiny_model), *options) as (process, url, text):
        for part in ("state", "full", "blocks", "checkpoints", "shortest reusable prefix: 4", "longest request: 2,048"):
            assert part in text
        call = re.search(r"-d '(\{.*\})'", text)
        assert call
        assert f"Watch it in a browser: {url}/" in text
        answers = [httpx.post(f"{url}/v1/completions", json=json.loads(call[1]), timeout=60).json() for _ in range(2)]
        assert answers[0]["choices"] == answers[1]["choices"]
        assert answers[0]["model"] == "mine"
        assert answers[1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 12}, "15, down to a multiple of 4"
        live, replay = re.findall(r"tcp://127\.0\.0\.1:\d+", text)
        assert f"KV events at {live}, replay at {replay}: blocks of 16 tokens" in text
        with reading(16, live, replay) as reader:
            assert reader.receive() is not None
            assert 12 in {told["position"] for told in reader.catch_up().points.values()}
        body = {"prompt": "Tell me all", "max_tokens": 60, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors


def failure(*arguments: str) -> str:
    """What a server that does not start says, in one line."""
    process = start(*arguments)
    _, errors = process.communicate(timeout=300)
    assert process.returncode not in (0, None)
    assert "Traceback" not in errors
    lines = [line for line in errors.splitlines() if line.startswith("headway: ")]
    assert len(lines) == 1, errors
    return lines[0]


def test_what_lies_below_is_told_and_what_its_sizes_are_about():
    told = TierStats("disk", 1 << 30, 1 << 20, 2, 0, 0, 0, 0, {}, 0, "closed", 0, False, 1.0)
    tiers = (told, replace(told, name="store", checkpoints=0, shared=True), replace(told, capacity=None, shared=True))
    lower = SimpleNamespace(host=None, objects=SimpleNamespace(tiers=tiers))
    config = SimpleNamespace(tiers=SimpleNamespace(tier_write="through"))
    engine = SimpleNamespace(snapshot=lambda: SimpleNamespace(lower=lower), config=config)
    assert list(_told_below(SimpleNamespace(engine=engine))) == [
        "disk: 1.0 GiB, 2 checkpoints in 1.0 MiB found; written when something is kept",
        "store: at most 1.0 GiB of what is written from now on; written when something is kept",
        "disk: as much as the store takes; written when something is kept",
    ]


def test_too_little_memory(tiny_model: Path):
    assert "give at least" in failure(str(tiny_model), "--port", "0", "--memory", "20KiB")


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The same without a process of its own."""
    handlers, level = logging.root.handlers[:], logging.root.level
    with pytest.raises(SystemExit) as ended:
        main(["serve", *arguments])
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
    assert ended.value.code not in (0, None)
    return capsys.readouterr().err


def test_a_port_in_use_is_noticed_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} of 127.0.0.1 is in use" in refused(capsys, "./no/such/model", "--port", str(port))


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]):
    assert "there is no directory './no/such/model'" in refused(capsys, "./no/such/model", "--port", "0")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--memory", "much"), "--memory 'much' is not a size"),
        (("--max-body", "much"), "--max-body 'much' is not a size"),
        (("--placement", "somewhere"), "--placement 'somewhere' is unknown; known are prompt_end"),
        (("--max-running", "99", "--max-batched-tokens", "9"), "--max-batched-tokens 9 is less than --max-running 99"),
        (("--block-tokens", "0"), "--block-tokens is 0, it must be at least 1"),
        (("--pin-share", "2"), "--pin-share is 2.0, it must be between 0 and 1"),
        (("--dcp", "2", "--tp", "3"), "--dcp 2 does not divide --tp 3"),
        (("--log-format", "xml"), "--log-format 'xml' is not one of text, json"),
        (
            ("--record", "/no/such/folder/file"),
            "--record /no/such/folder/file: the file cannot be written (No such file",
        ),
        (("--log-level", "loud"), "loud"),
        (("--explain", "some"), "is not one of off, own, all"),
        (("--salt-by-key",), "there is no key: add --api-key"),
        (("--api-key", ""), "is empty"),
        (("--api-key", "k", "--salt-by-key", "--record", "x", "--record-form", "tokens"), "record hashes"),
        (("--eviction", "fifo"), "it must be one of adaptive, value, shared-value, lru, greedy-dual"),
        (("--host", "no.such.host.invalid"), "no address"),
        (("--record-form", "tokens"), "nothing is recorded: add --record FILE"),
        (("--kv-events-config", "{}"), 'publishes nothing without "enable_kv_cache_events": true'),
        (("--no-prefix-reuse", "--kv-events-config", _KV_EVENTS), "leave out one of them"),
        (("--no-prefix-reuse", "--disk", "x:1GB"), "leave out --no-prefix-reuse"),
    ],
)
def test_options_that_cannot_work(options: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]):
    assert text in refused(capsys, *options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--disk", "/dev/null/x:1GB"), "the folder /dev/null/x cannot be written to (Not a directory): give --disk"),
        (("--disk", "~/x:1GB", "--store-key", "/no/such/key"), "the key /no/such/key cannot be read or made"),
        (("--disk", "~/x:1GB", "--store-key", "~/short"), "home/short has 5 bytes, it needs 16 to 64"),
        (("--store", "valkey://127.0.0.1:1", "--store-key", "~/key"), "the store does not answer: "),
        (("--store", "valkey://127.0.0.1:1?bogus=1", "--store-key", "~/key"), "the client takes no option 'bogus'"),
        (("--store", "s3://b?bogus=1", "--store-key", "~/key"), "the bucket b cannot be used: "),
        (("--store", "valkey://h?password_file=~/no", "--store-key", "~/key"), "cannot be read from"),
    ],
)
def test_tiers_that_cannot_be_used_are_told_before_the_model_is_loaded(
    options: tuple[str, ...],
    text: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    home = tmp_path / "home"
    home.mkdir()
    (home / "short").write_text("short")
    (home / "key").write_text("k" * 32)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr("headway.engine.build.build_engine", lambda *_: pytest.fail("the model is loaded"))
    assert text in " ".join(refused(capsys, "--port", "0", *options).split())
    assert (home / "x").is_dir() == ("~/x:1GB" in options)
