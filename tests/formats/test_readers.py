"""Every format is read as its publishers describe it, and every fault names the file, the line and the field."""

import gzip
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headway.errors import ConfigError, TraceError
from headway.replay import RecordingWriter, Trace, endless_matches, read_outputs, read_trace

Lines = Sequence[dict[str, Any]]


def write(path: Path, lines: Lines) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def mooncake(ids: Sequence[int], tokens: int, time: float = 0, **more: Any) -> dict[str, Any]:
    return {"timestamp": time, "input_length": tokens, "output_length": 7, "hash_ids": list(ids)} | more


def shared(trace: Trace) -> list[int]:
    return endless_matches(trace).tolist()


def test_mooncake(tmp_path: Path) -> None:
    lines = [mooncake([0, 1, 2], 1100), mooncake([0, 1, 3], 1030, 1500), mooncake([0, 1], 1024, 2000, unknown="passes")]
    trace = read_trace(write(tmp_path / "t.jsonl", lines))
    assert (trace.format, trace.width, trace.outputs) == ("mooncake", 512, "never")
    assert trace.prompt_tokens.tolist() == [1100, 1030, 1024]
    assert trace.answer_tokens.tolist() == [7, 7, 7]
    assert trace.times.tolist() == [0.0, 1.5, 2.0]
    assert shared(trace) == [0, 1024, 1023]


def test_a_resend_is_known_to_its_last_token(tmp_path: Path) -> None:
    lines = [mooncake([0, 1, 2], 1100), mooncake([0, 1, 2], 1100), mooncake([0, 1, 4], 1100)]
    assert shared(read_trace(write(tmp_path / "t.jsonl", lines))) == [0, 1099, 1024]


def test_requests_are_sorted_by_arrival(tmp_path: Path) -> None:
    lines = [mooncake([5], 512, 30), mooncake([6, 7], 1024, 10), mooncake([8], 100, 30)]
    trace = read_trace(write(tmp_path / "t.jsonl", lines))
    assert trace.prompt_tokens.tolist() == [1024, 512, 100]
    assert trace.prompt(0).tolist()[:2] == [6, 7]
    assert trace.prompt(1).tolist()[0] == 5


def test_bailian(tmp_path: Path) -> None:
    first = {"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.5, "input_length": 40, "output_length": 9, "turn": 1}
    second = {"chat_id": 160, "parent_chat_id": 159, "timestamp": 70, "input_length": 66, "output_length": 9, "turn": 2}
    lines = [first | {"hash_ids": [11, 12, 13]}, second | {"hash_ids": [11, 12, 14, 15, 16], "type": "text"}]
    trace = read_trace(write(tmp_path / "t.jsonl", lines))
    assert (trace.format, trace.width, trace.outputs) == ("bailian", 16, "continuation")
    assert trace.times.tolist() == [61.5, 70.0]
    assert shared(trace) == [0, 48]  # 40 + 9 tokens fill three blocks: the third is the answer's end


def weka(name: str, requests: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"id": name, "block_size": 64, "models": ["m"], "requests": requests} | more


def asked(time: float, ids: Sequence[int], tokens: int) -> dict[str, Any]:
    return {"t": time, "type": "s", "in": tokens, "out": 5, "hash_ids": list(ids)}


def test_weka_sessions_have_hashes_of_their_own(tmp_path: Path) -> None:
    requests = [asked(0.0, [1, 2], 130), asked(4.0, [1, 2, 3], 200)]
    write(tmp_path / "a.json", [weka("a", requests)])
    write(tmp_path / "b.json", [weka("b", requests)])
    trace = read_trace(tmp_path)
    assert (trace.format, trace.width, len(trace)) == ("weka", 64, 4)
    assert trace.times.tolist() == [0.0, 0.0, 4.0, 4.0]
    assert shared(trace) == [0, 0, 128, 128]
    for name in "ab":
        write(tmp_path / f"{name}.json", [weka(name, requests, hash_id_scope="global")])
    assert shared(read_trace(tmp_path)) == [0, 128, 128, 192]


@pytest.mark.parametrize("inner", [0.5, 10.5])
def test_weka_subagents_count_from_the_session_or_from_their_start(tmp_path: Path, inner: float) -> None:
    agent = {"t": 10.0, "type": "subagent", "agent_id": "x", "requests": [asked(inner, [1], 70)]}
    path = write(tmp_path / "a.json", [weka("a", [asked(0.0, [1, 2], 130), agent])])
    trace = read_trace(path)
    assert trace.times.tolist() == [0.0, 10.5]
    assert shared(trace) == [0, 64]


def test_a_file_may_be_one_document_over_several_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(weka("a", [asked(0.0, [1, 2], 130)]), indent=2), encoding="utf-8")
    assert len(read_trace(path)) == 1
    path.write_text(json.dumps([mooncake([1], 600), mooncake([1], 700)], indent=2), encoding="utf-8")
    assert len(read_trace(path)) == 2


def test_aiperf_turns_add_up(tmp_path: Path) -> None:
    lines = [
        {"session_id": "a", "timestamp": 0, "input_length": 1024, "output_length": 512, "hash_ids": [1, 2]},
        {"session_id": "a", "delay": 2000, "input_length": 600, "output_length": 10},
        {"session_id": "b", "timestamp": 500, "input_length": 1100, "output_length": 10, "hash_ids": [1, 2, 9]},
    ]
    trace = read_trace(write(tmp_path / "t.jsonl", lines))
    assert trace.format == "aiperf"
    assert trace.prompt_tokens.tolist() == [1024, 1100, 1024 + 512 + 600]
    assert trace.times.tolist() == [0.0, 0.5, 2.0]
    assert shared(trace) == [0, 1024, 1536]


def test_prompts_without_hashes_share_nothing(tmp_path: Path) -> None:
    lines = [{"timestamp": t, "input_length": 2000, "output_length": 3} for t in range(3)]
    assert shared(read_trace(write(tmp_path / "t.jsonl", lines))) == [0, 0, 0]


CHAT = [
    {"messages": [{"role": "user", "content": "hello"}], "response": "hi", "created": 3},
    {
        "body": {
            "messages": [
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": "hi"},
                {"role": "user", "content": [{"type": "text", "text": "more"}]},
            ]
        },
        "response": {"body": {"choices": [{"message": {"role": "assistant", "content": "no"}}]}},
        "timestamp": "1970-01-01T00:00:05+00:00",
    },
    {"prompt": "plain", "choices": [{"text": "ok"}], "time": 6},
]


def test_chat_logs(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "t.jsonl", CHAT), tokenizer="bytes")
    assert (trace.format, trace.width, trace.outputs) == ("chat", 1, "recorded")
    assert trace.times.tolist() == [3.0, 5.0, 6.0]
    assert bytes(trace.prompt(0).tolist()) == b"<|user|>hello\n<|assistant|>"
    assert bytes(trace.answer(1).tolist()) == b"no"
    assert shared(trace)[1] == len("<|user|>hello\n<|assistant|>hi")
    with pytest.raises(ConfigError, match="--tokenizer"):
        read_trace(tmp_path / "t.jsonl")
    with pytest.raises(ConfigError, match="--block-tokens: a trace of the format chat"):
        read_trace(tmp_path / "t.jsonl", tokenizer="bytes", block_tokens=16)


def test_a_tokenizer_for_block_hashes_would_do_nothing(tmp_path: Path) -> None:
    line = {"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}
    with pytest.raises(ConfigError, match="--tokenizer: is for chat logs"):
        read_trace(write(tmp_path / "t.jsonl", [line]), tokenizer="bytes")


@pytest.mark.parametrize("content", ["tokens", "hashes"])
def test_recordings_come_back(tmp_path: Path, content: str) -> None:
    file = io.StringIO()
    writer = RecordingWriter(file, content=content, block_tokens=4, model="m")
    writer.add(0.0, range(10), range(100, 107), boundaries=[4, 10])
    writer.add(1.5, [*range(10), *range(100, 107), 1, 2, 3], [9])
    writer.add(2.0, [1, *range(1, 12)], [])
    path = tmp_path / "r.jsonl"
    path.write_text(file.getvalue(), encoding="utf-8")
    trace = read_trace(path)
    assert (trace.format, trace.outputs, trace.width) == ("recording", "recorded", 1 if content == "tokens" else 4)
    assert trace.prompt_tokens.tolist() == [10, 20, 12]
    assert trace.answer_tokens.tolist() == [7, 1, 0]
    assert [trace.marks(i).tolist() for i in range(3)] == [[4, 10], [], []]
    assert shared(trace) == ([0, 17, 0] if content == "tokens" else [0, 16, 0])
    assert ('"prompt":' in file.getvalue()) == (content == "tokens")


def test_two_recordings_have_different_hashes() -> None:
    files = [io.StringIO(), io.StringIO()]
    for file in files:
        RecordingWriter(file, block_tokens=4).add(0.0, range(8), [])
    assert files[0].getvalue() != files[1].getvalue()


def test_compressed_files(tmp_path: Path) -> None:
    text = "".join(json.dumps(mooncake([i], 600)) + "\n" for i in range(3)).encode()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text))
    assert len(read_trace(tmp_path / "a.jsonl.gz")) == 3
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(text)[:-12])
    with pytest.raises(TraceError, match=r"b\.jsonl\.gz"):
        read_trace(tmp_path / "b.jsonl.gz")
    zstandard = pytest.importorskip("zstandard")
    (tmp_path / "misnamed.jsonl").write_bytes(zstandard.compress(text[:200]) + zstandard.compress(text[200:]))
    assert len(read_trace(tmp_path / "misnamed.jsonl")) == 3
    long = b"".join(json.dumps(mooncake([i, i * i], 600)).encode() + b"\n" for i in range(20_000))
    packed = zstandard.compress(long)
    (tmp_path / "long.zst").write_bytes(packed)
    assert len(read_trace(tmp_path / "long.zst")) == 20_000
    for name, damaged in {"cut": packed[:-100], "half": packed[:1000], "odd": packed[:500] + b"x" * 99}.items():
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(TraceError, match=f"{name}: cannot be read as text: "):
            read_trace(tmp_path / name)
    (tmp_path / "odd.gz").write_bytes(gzip.compress(text)[:20] + b"x" * 99)
    with pytest.raises(TraceError, match=r"odd\.gz: cannot be read as text: "):
        read_trace(tmp_path / "odd.gz")


def test_a_file_without_a_whole_line_is_not_called_empty(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("hello")
    with pytest.raises(TraceError, match=r"t\.jsonl, line 1 is no whole line of JSON, and there is no other"):
        read_trace(tmp_path / "t.jsonl")
    (tmp_path / "t.jsonl").write_text("{}\n")
    with pytest.raises(TraceError, match="format of this trace from an object without fields: give --format"):
        read_trace(tmp_path / "t.jsonl")


def test_a_limit_stops_reading(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [mooncake([i], 600) for i in range(5)])
    with path.open("a") as file:
        file.write("not json\n")
    assert len(read_trace(path, limit=3)) == 3


FAULTS: dict[str, tuple[Any, str]] = {
    "not json": ("{oops", r"line 2: not JSON"),
    "not an object": ([1, 2], r"line 2: expected a JSON object, found list"),
    "missing": ({"timestamp": 1, "hash_ids": [1]}, r"line 2: field 'input_length': is missing; found"),
    "wrong type": (mooncake([1], 600) | {"input_length": "many"}, r"line 2: field 'input_length': .*found str 'many'"),
    "boolean": (mooncake([1], 600) | {"output_length": True}, r"'output_length': expected a whole number"),
    "negative": (
        mooncake([1], 600) | {"output_length": -4},
        r"'output_length': expected a whole number of at least 0, found int -4",
    ),
    "half": (mooncake([1], 600) | {"output_length": 2.5}, r"'output_length': .*found float 2.5"),
    "not a number": (mooncake([1], 600) | {"timestamp": [3]}, r"'timestamp': expected a number, found list \[3\]"),
    "too large a number": ('{"timestamp": 1e999}', r"line 2: not JSON: 1e999 is too large"),
    "no list": (mooncake([1], 600) | {"hash_ids": 7}, r"'hash_ids': expected a list, found int 7"),
    "mixed ids": (
        mooncake([1], 1400) | {"hash_ids": [1, None]},
        r"'hash_ids\[1\]': expected a whole number or a text, found null",
    ),
    "ids of two types": (mooncake([1], 1400) | {"hash_ids": [1, "b"]}, r"'hash_ids': block ids must be of one type"),
    "too many ids": (mooncake([1, 2, 3, 4], 600), r"'hash_ids': 4 block ids do not fit 600 tokens.*--block-tokens"),
    "too few ids": (mooncake([1], 2000), r"'hash_ids': 1 block ids do not fit"),
    "empty prompt": (mooncake([], 0), r"'input_length': expected a whole number of at least 1, found int 0"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_name_line_and_field(tmp_path: Path, name: str) -> None:
    line, message = FAULTS[name]
    path = tmp_path / "bad.jsonl"
    text = line if isinstance(line, str) else json.dumps(line)
    path.write_text(json.dumps(mooncake([0], 600)) + "\n" + text + "\n", encoding="utf-8")
    with pytest.raises(TraceError, match=message) as caught:
        read_trace(path)
    assert str(caught.value).startswith(str(path))


def test_whole_numbers_may_be_written_as_floats_and_nulls_left_out(tmp_path: Path) -> None:
    line = mooncake([1], 600, 1.5) | {"input_length": 600.0, "output_length": None}
    trace = read_trace(write(tmp_path / "t.jsonl", [line]))
    assert (trace.prompt_tokens.tolist(), trace.answer_tokens.tolist()) == ([600], [0])


def test_a_fault_of_a_document_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{\n "requests": [],\n oops}')
    with pytest.raises(TraceError, match=r"a\.json, line 3: not JSON"):
        read_trace(path)


def test_faults_inside_a_session_name_their_place(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", [weka("a", [asked(0.0, [1], 70), asked(1.0, [1], 70) | {"in": None}])])
    with pytest.raises(TraceError, match=r"a\.json, line 1: field 'requests\[1\]\.in': .*found null"):
        read_trace(path)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ({"headway_recording": 9, "content": "tokens"}, "version 9"),
        ({"headway_recording": 1, "content": "sound"}, "'content'"),
        ({"headway_recording": 1, "content": "tokens"}, "no request"),
    ],
)
def test_recordings_of_another_kind_are_refused(tmp_path: Path, head: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(write(tmp_path / "r.jsonl", [head]))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"boundaries": ["a"]}, r"line 2: field 'boundaries\[0\]': expected a whole number, found str 'a'"),
        ({"boundaries": [9]}, r"line 2: message boundaries must lie in \(0, 3\]"),
        ({"prompt": []}, "line 2: an empty prompt"),
        ({"prompt": [1 << 40]}, "line 2: token ids must be integers"),
        ({"answer": [-7]}, "line 2: token ids must not be negative: -7"),
    ],
)
def test_faults_in_a_recording(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    lines = [{"headway_recording": 1, "content": "tokens"}, {"time": 0, "prompt": [1, 2, 3]} | more]
    with pytest.raises(TraceError, match=message):
        read_trace(write(tmp_path / "r.jsonl", lines))


def test_what_cannot_be_a_trace(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.jsonl").write_text("\n")
    for path, message in (
        (tmp_path / "absent.jsonl", "No such file"),
        (tmp_path / "empty", "no .json or .jsonl file"),
        (tmp_path / "empty.jsonl", "empty"),
        (write(tmp_path / "odd.jsonl", [{"a": 1}]), "cannot tell the format .* from the fields a"),
    ):
        with pytest.raises(TraceError, match=message):
            read_trace(path)
    with pytest.raises(ConfigError, match="unknown trace format"):
        read_trace(tmp_path / "odd.jsonl", format="csv")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"messages": [{"role": "user"}], "input_length": 5}, "field 'messages': this line holds text, not block ids"),
        ({"input_length": 5, "session_id": [1]}, "field 'session_id': expected a whole number or a text"),
        (
            {"input_length": 5, "session_id": "a", "delay": "long"},
            "field 'delay': expected a number or null, found str",
        ),
        ({"session_id": "a"}, "field 'input_length': is missing; found 'session_id'"),
    ],
)
def test_faults_of_aiperf(tmp_path: Path, line: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(write(tmp_path / "t.jsonl", [line]), format="aiperf")


def test_sessions_of_aiperf_may_be_numbered(tmp_path: Path) -> None:
    lines = [
        {"session_id": 7, "timestamp": 0, "input_length": 1024, "output_length": 512, "hash_ids": [1, 2]},
        {"session_id": "7", "delay": 500, "input_length": 600, "output_length": 10},
        {"session_id": 8, "timestamp": 100, "input_length": 600, "hash_ids": None},
    ]
    trace = read_trace(write(tmp_path / "t.jsonl", lines))
    assert trace.prompt_tokens.tolist() == [1024, 600, 1024 + 512 + 600]
    assert trace.times.tolist() == [0.0, 0.1, 0.5]


def test_weka_sessions_say_their_blocks(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", [weka("a", [asked(0.0, [1], 130)], block_size=128)])
    assert read_trace(path).width == 128
    other = [weka("a", [asked(0.0, [1], 70)]), weka("b", [asked(0.0, [1], 130)], block_size=128)]
    with pytest.raises(TraceError, match="field 'block_size': 128 where 64 was expected: give --block-tokens 128"):
        read_trace(write(tmp_path / "b.jsonl", other))
    with pytest.raises(TraceError, match="field 'block_size': expected a whole number of at least 1, found int 0"):
        read_trace(write(tmp_path / "c.json", [weka("a", [], block_size=0)]))


def test_weka_prompts_may_be_longer_than_their_blocks(tmp_path: Path) -> None:
    requests = [asked(0.0, [1], 400), asked(1.0, [1, 2, 3], 10), {"t": 2.0, "type": "subagent", "in": 5}]
    trace = read_trace(write(tmp_path / "a.json", [weka("a", requests)]))
    assert trace.prompt_tokens.tolist() == [400, 192], "at least what its blocks hold; an empty sub-agent asks nothing"
    assert endless_matches(trace, read_outputs(trace, "never")).tolist() == [0, 64]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": 3.5}, "field 'prompt': expected a whole number or a text or null, found float 3.5"),
        ({"messages": None, "body": {"model": "m"}}, r"field 'body\.prompt': is missing; found 'model'"),
        ({"messages": ["hello"]}, r"field 'messages\[0\]': expected an object, found str 'hello'"),
        ({"prompt": "x", "timestamp": "yesterday"}, "field 'timestamp': expected seconds or a date in ISO 8601"),
        ({"prompt": "x", "time": [1]}, "field 'time': expected"),
        ({"prompt": "x", "response": {"choices": 3}}, r"field 'response\.choices': expected a list"),
        ({"prompt": "x", "output_length": -1}, "field 'output_length': expected a whole number of at least 0"),
        ({"prompt": ""}, "line 1: an empty prompt"),
    ],
)
def test_faults_of_chat_logs(tmp_path: Path, line: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(write(tmp_path / "t.jsonl", [line]), format="chat", tokenizer="bytes")


def test_answers_of_chat_logs_may_be_missing_or_odd(tmp_path: Path) -> None:
    lines = [
        {"prompt": "a"},
        {"prompt": "b", "response": None, "output_length": 9},
        {"prompt": "c", "choices": []},
        {"prompt": "d", "choices": [{"message": {"content": [1]}}]},
        {"prompt": 5, "choices": [{"message": {"content": "yes"}}]},
    ]
    trace = read_trace(write(tmp_path / "t.jsonl", lines), tokenizer="bytes")
    assert trace.answer_tokens.tolist() == [0, 9, 0, 0, 3]
    assert bytes(trace.prompt(4).tolist()) == b"5"
    assert trace.outputs == "recorded"
    without = read_trace(write(tmp_path / "t.jsonl", lines[:3]), tokenizer="bytes")
    assert without.outputs == "never", "no answer is there to be read"


def test_tools_are_part_of_a_prompt(tmp_path: Path) -> None:
    line = {"messages": [{"role": "user", "content": None}], "tools": [{"name": "f"}]}
    trace = read_trace(write(tmp_path / "t.jsonl", [line]), tokenizer="bytes")
    assert bytes(trace.prompt(0).tolist()) == b"<|tools|>[{'name': 'f'}]\n<|user|>\n<|assistant|>"


def test_a_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=r"tokenizer '.*absent' cannot be loaded"):
        read_trace(write(tmp_path / "t.jsonl", CHAT), tokenizer=str(tmp_path / "absent"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "text"}, "field 'prompt': expected a list, found str 'text'"),
        ({"prompt": [1, "a"]}, r"field 'prompt\[1\]': expected a whole number, found str 'a'"),
        ({"answer": [1]}, "field 'prompt': is missing; found 'answer'"),
    ],
)
def test_faults_of_tokens_in_a_recording(tmp_path: Path, line: dict[str, Any], message: str) -> None:
    head = {"headway_recording": 1, "content": "tokens"}
    with pytest.raises(TraceError, match=f"line 2: {message}"):
        read_trace(write(tmp_path / "r.jsonl", [head, line]))


def test_what_a_recording_cannot_hold() -> None:
    with pytest.raises(ConfigError, match="'tokens' or 'hashes', not 'sound'"):
        RecordingWriter(io.StringIO(), content="sound")
    with pytest.raises(ConfigError, match="block_tokens is 0"):
        RecordingWriter(io.StringIO(), block_tokens=0)
    with pytest.raises(ConfigError, match="record hashes"):
        RecordingWriter(io.StringIO(), content="tokens").add(0.0, [1], [2], scope="salt")


def test_requests_of_different_salts_share_no_hash(tmp_path: Path) -> None:
    file = io.StringIO()
    writer = RecordingWriter(file, block_tokens=4)
    for time, scope in enumerate(["", "a", "a", "b"]):
        writer.add(float(time), range(8), [9], scope=scope)
    path = tmp_path / "r.jsonl"
    path.write_text(file.getvalue())
    assert shared(read_trace(path)) == [0, 0, 7, 0]
    assert path.read_text().count("\n") == 5, "one line a request, after the head"
