"""What a server records replays to the same hits, says no more than asked for, and never harms a request."""

import io
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from tests.server.fakes import listening
from tests.server.tiny import TEMPLATE, save_model, tokenizer

from headway.cache import Explanation
from headway.engine import EngineConfig, GenerationRequest, RequestResult
from headway.engine.build import build_engine
from headway.engine.request import RunningRequest
from headway.errors import ConfigError, TraceError
from headway.replay import ReplayConfig, endless_matches, read_trace, replay_trace
from headway.server import ServerOptions
from headway.server.recorder import Recorder, check_recording
from headway.tell.measured import read_measured

SYSTEM = {"role": "system", "content": "You are a patient librarian, and you answer in as few words as you can find."}


@dataclass
class Talk:
    path: Path
    cached: list[int] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    config: Any = None

    def replay(self, memory: int | None = None) -> Any:
        cache = self.config
        size = memory or cache.blocks * cache.geometry().block_bytes
        trace = read_trace(self.path)
        return trace, replay_trace(trace, ReplayConfig(cache.groups, size, cost=cache.cost))


def talk(model: Path, path: Path, form: str) -> Talk:
    """Two conversations that take turns, a resend, a request that keeps nothing, and a salted one at the end."""
    done = Talk(path)
    built = build_engine(str(model), EngineConfig(memory=8 << 20, max_batched_tokens=32, max_running=4))
    recorder = Recorder(path, form, "tiny")
    with (
        listening(built.engine.start(), built.tokenizer, ServerOptions("tiny", recorder=recorder)) as (url, _),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):

        def ask(messages: list[Any], count: bool = True, **extra: Any) -> str:
            answer = client.chat.completions.create(
                model="tiny", messages=messages, max_tokens=8, temperature=0, extra_body=extra
            )
            if count:
                done.cached.append(answer.usage.prompt_tokens_details.cached_tokens)
                done.prompts.append(answer.usage.prompt_tokens)
            return answer.choices[0].message.content

        talks: list[list[Any]] = [[SYSTEM], [SYSTEM]]
        for turn in range(3):
            for number, messages in enumerate(talks):
                messages.append({"role": "user", "content": f"{turn}. Where is book {number}?"})
                messages.append({"role": "assistant", "content": ask(messages)})
        ask(talks[0][:-1])
        ask([SYSTEM, {"role": "user", "content": "secret"}], False, headway={"no_store": True})
        ask(talks[0][:-1], form == "hashes", cache_salt="another")
        done.config = built.engine.cache.config
    return done


def hits(trace: Any, result: Any) -> list[int]:
    assert len(result.over_time) == len(trace), "one span a request"
    return [span.hit_tokens for span in result.over_time]


def test_a_recording_of_tokens_replays_to_the_same_hits(tiny_model: Path, tmp_path: Path) -> None:
    said = talk(tiny_model, tmp_path / "tokens.jsonl", "tokens")
    trace, result = said.replay()
    assert trace.prompt_tokens.tolist() == said.prompts
    assert hits(trace, result) == said.cached
    assert sum(said.cached) > 0
    assert list(trace.times) == sorted(trace.times)


def test_a_recording_of_hashes_replays_to_the_same_hits_within_its_blocks(tiny_model: Path, tmp_path: Path) -> None:
    said = talk(tiny_model, tmp_path / "hashes.jsonl", "hashes")
    trace, result = said.replay()
    assert trace.prompt_tokens.tolist() == said.prompts
    assert said.cached[-1] == 0, "another salt shares nothing"
    # Prompts end, and part, inside blocks of 16 tokens that the recording knows as a whole.
    for replayed, cached in zip(hits(trace, result), said.cached, strict=True):
        assert abs(replayed - cached) < 2 * trace.width
    lines = [json.loads(line) for line in said.path.read_text().splitlines()]
    assert {key for line in lines[1:] for key in line} <= {
        "time",
        "prompt_tokens",
        "answer_tokens",
        "blocks",
        "boundaries",
    }
    assert "another" not in said.path.read_text()


def test_refusals(tmp_path: Path) -> None:
    taken = tmp_path / "taken.jsonl"
    taken.write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        Recorder(taken, "hashes", "m")
    with pytest.raises(ConfigError, match="--record-form 'text': use hashes or tokens"):
        Recorder(tmp_path / "new.jsonl", "text", "m")
    with pytest.raises(ConfigError, match=r"--record .*new.jsonl: the file cannot be written \(No such file"):
        Recorder(tmp_path / "absent" / "new.jsonl", "hashes", "m")
    check_recording(tmp_path / "fine.jsonl", "hashes")
    assert [path.name for path in tmp_path.iterdir()] == ["taken.jsonl"], "looking leaves nothing behind"
    assert taken.read_text() == "mine"


def ended_result() -> RequestResult:
    request = RunningRequest.start(GenerationRequest(np.arange(30, dtype=np.int32), 4), "1", 1, 0.0)
    request.explanation = Explanation(30, 0, 0, ())
    return request.result()


class FullDisk(io.FileIO):
    """A file on a disk that is full after so many bytes, which takes a part of a line before it says so."""

    def __init__(self, path: Path, room: int) -> None:
        super().__init__(path, "a")
        self.room = room

    def write(self, data: Any) -> int:
        size = os.fstat(self.fileno()).st_size
        if size >= self.room:
            raise OSError(28, "No space left on device")
        return super().write(memoryview(data)[: self.room - size])


def test_a_full_disk_ends_the_recording_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "full.jsonl"
    recorder = Recorder(path, "tokens", "m")
    recorder._file.close()
    recorder._writer._file = recorder._file = io.TextIOWrapper(io.BufferedWriter(FullDisk(path, 300)))
    ended = ended_result()
    for _ in range(6):
        recorder.request_finished(ended)
    recorder.close()
    recorder.request_finished(ended)
    assert recorder._ended.qsize() <= 7, "nobody takes from the queue any more, so nothing is put"
    recorder.close()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert "No space left on device; 2 requests are in it" in told[0]
    assert len(read_trace(path)) == recorder.written == 2, "the line that was cut is not left behind"


def test_a_chat_log_replays_to_what_the_server_gave(tmp_path: Path) -> None:
    """Every answer begins with something that history does not show, so ends of messages carry all the reuse.

    Three users in five turns, once as the recording and once as the log of a gateway.
    """
    model = save_model(tmp_path / "model")
    words = tokenizer()
    words.chat_template = TEMPLATE.replace("<|assistant|>{% endif %}", "<|assistant|><think>\n{% endif %}")
    words.save_pretrained(model)
    recording, log = tmp_path / "tokens.jsonl", tmp_path / "log.jsonl"
    built = build_engine(str(model), EngineConfig(memory=8 << 20, max_batched_tokens=32, max_running=4))
    lines, cached, prompts = [], 0, 0
    recorder = Recorder(recording, "tokens", "tiny")
    with (
        listening(built.engine.start(), built.tokenizer, ServerOptions("tiny", recorder=recorder)) as (url, _),
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        talks: list[list[Any]] = [[SYSTEM] for _ in range(3)]
        for turn in range(5):
            for number, messages in enumerate(talks):
                parts = [{"type": "text", "text": f"{turn}. Where is"}, {"type": "text", "text": f"book {number}?"}]
                messages.append({"role": "user", "content": parts if turn % 2 else f"{turn}. Where is book {number}?"})
                body = {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0}
                answer = http.post("/v1/chat/completions", json=body).json()
                lines.append(json.dumps({"timestamp": len(lines), "request": body, "response": {"body": answer}}))
                cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                prompts += answer["usage"]["prompt_tokens"]
                messages.append({"role": "assistant", "content": f"On shelf {turn}, as {number} of 9."})
        config, measured = built.engine.cache.config, read_measured([url])
    assert (measured.engine, measured.hit_tokens, measured.prompt_tokens) == ("Headway", cached, prompts)
    log.write_text("\n".join(lines))
    size = config.blocks * config.geometry().block_bytes
    for path, words_of in ((recording, None), (log, str(model))):
        result = replay_trace(read_trace(path, tokenizer=words_of), ReplayConfig(config.groups, size, cost=config.cost))
        assert (result.whole.hit_tokens, result.whole.prompt_tokens) == (cached, prompts), path.name
    assert cached > prompts / 2


def test_a_chat_log_is_refused_where_the_server_would(tiny_model: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    good = {"messages": [{"role": "user", "content": "a"}]}
    for wrong, message in (
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "images are"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({**good, "chat_template_kwargs": {"chat_template": "x"}}, "may not set chat_template"),
    ):
        log.write_text("\n".join(json.dumps(line) for line in (good, wrong)))
        with pytest.raises(TraceError, match=rf"log\.jsonl, line 2: .*{message}"):
            read_trace(log, tokenizer=str(tiny_model))
    bare = tokenizer()
    bare.chat_template = None
    bare.save_pretrained(tmp_path / "bare")
    with pytest.raises(TraceError, match=r"line 1: .*no chat template"):
        read_trace(log, tokenizer=str(tmp_path / "bare"))


def test_requests_of_other_salts_share_nothing_in_a_chat_log(tiny_model: Path, tmp_path: Path) -> None:
    messages = [SYSTEM, {"role": "user", "content": "Where?"}]
    salts = (None, None, "a", "a", "b")
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join(json.dumps({"messages": messages, "cache_salt": salt}) for salt in salts))
    trace = read_trace(log, tokenizer=str(tiny_model))
    most = int(trace.prompt_tokens[0]) - 1
    assert endless_matches(trace).tolist() == [0, most, 0, most, 0]
