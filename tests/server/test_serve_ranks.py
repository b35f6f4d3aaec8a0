"""`headway serve --dcp 2` as a user runs it."""

import json
import os
import re
import select
import signal
import time
from pathlib import Path

import httpx
import pytest
from tests.models import kimi_k3_oracle
from tests.server.test_command import refused, served, start

from headway.models.kimi_k3.tiny import write_tiny, write_tiny_draft
from headway.runtime.loading import load_tokenizer
from headway.runtime.sources import resolve_source

CHILDREN = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")


@pytest.mark.skipif(not CHILDREN.exists(), reason="needs /proc to find the ranks of a server")
def test_a_server_on_two_ranks_answers_reuses_and_ends_with_them(tiny_model: Path):
    options = ("--dcp", "2", "--interleave", "16", "--dcp-comm", "a2a", "--on-rank-failure", "exit")
    with served(str(tiny_model), *options) as (process, url, text):
        for part in ("starting 2 ranks (processes)", "dcp 2, pcp 1", "2.00 times as many", "16 tokens each in turn"):
            assert part in " ".join(text.split())
        body = {"prompt": "Once upon a time there was", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answers = [httpx.post(f"{url}/v1/completions", json=body, timeout=120).json() for _ in range(2)]
        assert answers[0]["choices"] == answers[1]["choices"]
        assert answers[1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 25}
        form = {"structured_outputs": {"regex": "[a-c]{5}"}, "ignore_eos": False}
        formed = httpx.post(f"{url}/v1/completions", json=body | form, timeout=120).json()["choices"][0]
        assert re.fullmatch("[a-c]{5}", formed["text"]), "rank 0, which chooses tokens, knows of forms"
        ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        long = body | {"max_tokens": 1500, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=long, timeout=120) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            os.kill(int(ranks[-1]), signal.SIGKILL)
            *_, last = filter(None, lines)
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
        assert "was ended by SIGKILL" in last
        _, errors = process.communicate(timeout=120)
        assert process.returncode not in (0, None), errors
        assert "Traceback" not in errors
        assert "headway: the engine has failed" in errors


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc to find the ranks of a server")
def test_a_signal_while_ranks_load_leaves_nothing_behind(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    process = start("--port", "0", "--memory", "8MiB", "--dcp", "2", str(tiny_model))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while len(ranks := children.read_text().split()) < 2:
        assert process.poll() is None
        time.sleep(0.05)
    ends = [os.pidfd_open(int(rank)) for rank in ranks]  # readable once the process has ended
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in errors
    for end in ends:  # one that was just being started sees by itself that its driver has gone
        assert select.select([end], [], [], 60)[0], "a rank has outlived its server"
        os.close(end)
    assert not list(tmp_path.glob("headway-ranks-*"))


@pytest.mark.slow  # the README's command is of this kind, and is tested
@pytest.mark.parametrize("sharing", [pytest.param((), id="replicated"), pytest.param(("--tp", "2"), id="shared")])
def test_the_built_in_model_on_two_ranks_with_drafts_says_what_it_says_without(sharing: tuple[str, ...]):
    """The sentence is what it was trained to say of itself; the second time all but the last token is a hit."""
    question = [{"role": "user", "content": "Who are you?"}]
    body = {"messages": question, "max_tokens": 40, "temperature": 0}
    with served("--dcp", "2", "--draft", "dspark", *sharing) as (_, url, text):
        assert "drafts: dspark, up to 5 tokens" in " ".join(text.split())
        answers = [httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300).json() for _ in range(2)]
    for answer in answers:
        assert answer["choices"][0]["message"]["content"].startswith("I am the small built-in model of Headway.")
        assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0
    first, second = (answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers)
    assert (first, second) == (0, answers[1]["usage"]["prompt_tokens"] - 1)


@pytest.mark.slow  # tests/engine/ranks/test_matrix.py has it on ranks that are threads
def test_a_kimi_k3_in_published_form_on_four_ranks_says_what_the_judge_says(tmp_path: Path):
    """Its weights are read in shares, its drafter's entries split over the ranks."""
    folder = tmp_path / "tiny-k3"
    write_tiny(folder, Path(resolve_source(None)[1]))
    write_tiny_draft(folder / "draft")
    body = {"prompt": "You are a patient librarian. Who are you, and why?", "max_tokens": 10, "temperature": 0}
    with served(str(folder), "--tp", "4", "--dcp", "4", "--draft", str(folder / "draft")) as (_, url, text):
        assert "4.00 times as many" in " ".join(text.split())
        answers = [httpx.post(f"{url}/v1/completions", json=body, timeout=600).json() for _ in range(2)]
    tokenizer = load_tokenizer(str(folder))
    tokens = tokenizer(body["prompt"]).input_ids
    judge = kimi_k3_oracle.Oracle(folder, kimi_k3_oracle.Reading())
    logits, said = [judge.step(token)[0] for token in tokens][-1], []
    for _ in range(10):
        said.append(int(logits.argmax()))
        logits = judge.step(said[-1])[0]
    for answer, hit in zip(answers, (0, len(tokens) - 1), strict=True):
        assert answer["choices"][0]["text"] == tokenizer.decode(said)
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": hit}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--tp", "2", "--dcp", "4"), "--dcp 4 does not divide --tp 2"),
        (("--tp", "3"), "--tp 3 does not divide the 4 heads of KimiLinearDeltaAttention.q_proj.weight"),
        (("--dcp", "2", "--interleave", "3"), "--interleave 3"),
        (("--dcp", "2", "--executor", "local"), "use auto, processes or ray"),
        (("--dcp", "2", "--dcp-comm", "mail"), "ag_rs or a2a"),
        (("--on-rank-failure", "hope"), "restart or exit"),
    ],
)
def test_options_that_cannot_work(options: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]):
    assert text in " ".join(refused(capsys, *options, "--port", "0").split())
