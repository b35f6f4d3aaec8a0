"""What in prompts keeps known text from being reused is found, named and priced; what is no fault is not."""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from headway.cache import FullAttention
from headway.cli import main
from headway.formats.chat import ByteRenderer, ChatEntry, add_chat
from headway.formats.lines import Line
from headway.replay import ReplayConfig, Trace, TraceBuilder, replay_trace
from headway.replay.ask.prompt_faults import ChatLog, TokenLog, find_faults
from headway.tell.prompt_faults import PromptFault, PromptFix, on_fault, on_faults
from headway.tell.run import Figures

ENDLESS = ReplayConfig((FullAttention("attention", 1),), None)
LETTERS = random.Random(7)


def words(count: int) -> str:
    return " ".join("".join(LETTERS.choices("abcdefgh", k=5)) for _ in range(count))


RULES, MORE = words(100), words(100)


def run(trace: Trace) -> Figures:
    return replay_trace(trace, ENDLESS).whole


def chat(*messages: str, **more: Any) -> dict[str, Any]:
    """Messages by turns: system, user, assistant, user, ..."""
    roles = ["system", *(("user", "assistant") * len(messages))]
    return {"messages": [{"role": r, "content": m} for r, m in zip(roles, messages, strict=False)]} | more


def log(bodies: Sequence[Mapping[str, Any]]) -> ChatLog:
    entries = [ChatEntry(Line(f"line {i}", dict(body)), body, "", 0, float(i)) for i, body in enumerate(bodies)]
    builder = TraceBuilder("made", "chat", 1)
    for entry in entries:
        add_chat(entry, entry.body, builder, ByteRenderer())
    return ChatLog(builder.build(), entries, ByteRenderer())


def faults(bodies: Sequence[Mapping[str, Any]]) -> list[PromptFault]:
    return find_faults(log(bodies), run)


def test_a_clock_is_moved_as_a_sentence_to_the_user() -> None:
    found = faults([chat(f"You help. It is 2026-11-30 08:{i:02}. {RULES}", f"q{i}") for i in range(12)])
    assert len(found) == 1
    fault = found[0]
    assert (fault.kind, fault.message, fault.role, fault.requests) == ("text", 0, "system", 11)
    assert fault.texts == ["It is 2026-11-30 08:00.", "It is 2026-11-30 08:01."]
    assert fault.start in (
        len("<|system|>You help. It is 2026-11-30 08:0"),
        len("<|system|>You help. It is 2026-11-30 08:"),
    )
    by_hand = {
        "Moved in front": [chat(f"You help. {RULES}", f"It is 2026-11-30 08:{i:02}. q{i}") for i in range(12)],
        "Moved behind": [chat(f"You help. {RULES}", f"q{i}\nIt is 2026-11-30 08:{i:02}. ") for i in range(12)],
    }
    for fix in fault.fixes:
        wanted = next(run(log(bodies).trace) for name, bodies in by_hand.items() if fix.what.startswith(name))
        assert (fix.prompt_tokens, fix.hit_tokens) == (wanted.prompt_tokens, wanted.hit_tokens), "as if done by hand"
    assert fault.gain > 0.8


def test_what_one_fault_hides_is_found_behind_it() -> None:
    found = faults(
        [chat(f"Request {random.Random(i).random()}.\n{RULES}\nNow 08:{i:02}.\n{MORE}", f"q{i}") for i in range(12)]
    )
    assert [fault.texts[0].split()[0] for fault in found] == ["Request", "Now"]
    assert found[1].before.hit_tokens == found[0].fixes[0].hit_tokens, "priced with the first one mended"
    assert on_faults(found)[1].startswith("With that mended: at token ")


def test_a_changing_end_of_a_message_in_front_of_others() -> None:
    rest = (RULES, "fine", "and now?")
    found = faults([chat(f"Be brief. Today is day {i} of {i * 7}", *rest) for i in range(12)])
    assert [(fault.message, fault.texts[0]) for fault in found] == [(0, "Today is day 0 of 0")]


def test_tools_in_another_order() -> None:
    tools = [{"type": "function", "function": {"name": name, "description": words(30)}} for name in "abcd"]
    orders = [random.Random(i).sample(tools, 4) for i in range(12)]
    found = faults([chat(RULES, f"q{i}", tools=order) for i, order in enumerate(orders)])
    assert [fault.kind for fault in found] == ["tools"]
    assert "the same tools come in another order than before" in on_fault(found[0])
    other = [chat(RULES, "q", tools=[tools[i % 4]]) for i in range(12)]
    assert faults(other) == [], "other tools are no other order"
    assert faults([chat(words(90), "q", tools=[] if i % 2 else None) for i in range(12)]) == [], "nor are none"


def test_old_messages_that_are_cut() -> None:
    turns = [words(60) for _ in range(24)]
    sent = [chat("Be brief.", *turns[max(0, 2 * i - 6) : 2 * i + 1]) for i in range(12)]
    found = faults(sent)
    assert [fault.kind for fault in found] == ["history"]
    kept = run(log([chat("Be brief.", *turns[: 2 * i + 1]) for i in range(12)]).trace)
    assert (found[0].fixes[0].prompt_tokens, found[0].fixes[0].hit_tokens) == (kept.prompt_tokens, kept.hit_tokens)
    assert "messages that stood there before are cut" in on_fault(found[0])
    assert "tokens more, and" in on_fault(found[0])


@pytest.mark.parametrize(
    "bodies",
    [
        [chat(RULES, f"q{i}") for i in range(12)],
        [chat(words(100), f"q{i}") for i in range(12)],
        [chat(RULES, f"q{i}", "a", words(30)) for i in range(12)],
        [chat("Be brief.", f"q{i}\n{RULES}") for i in range(1)],
        [{"prompt": f"{words(4)} {i}"} for i in range(12)],
    ],
    ids=["no change", "other prompts", "other questions", "one request", "short"],
)
def test_what_is_no_fault(bodies: list[dict[str, Any]]) -> None:
    assert faults(bodies) == []


def test_a_change_that_no_rewriting_mends_is_not_told() -> None:
    """The text changes in the last message of the user, in front of a document: moving it behind mends that."""
    found = faults([chat("Be brief.", f"Question {i}. {RULES}") for i in range(12)])
    assert [fix.what for fault in found for fix in fault.fixes][:1] == [
        "Moved behind the text of the last user message"
    ]
    documents = [words(40) for _ in range(6)]
    shuffled = [chat("Be brief.", "\n".join(random.Random(i).sample(documents, 6))) for i in range(12)]
    assert all(fault.gain >= 0.01 for fault in faults(shuffled))


def test_plain_texts_and_parts_of_messages() -> None:
    found = faults([{"prompt": f"Now 08:{i:02}. {RULES}"} for i in range(12)])
    assert [(fault.message, fault.role, fault.texts[0]) for fault in found] == [(0, "", "Now 08:00.")]
    part = [{"type": "text", "text": ""}]
    bodies = [chat("x", "q") for _ in range(12)]
    for i, body in enumerate(bodies):
        body["messages"][0]["content"] = [{**part[0], "text": f"Now 08:{i:02}. {RULES}"}]
    assert [fault.texts[0] for fault in faults(bodies)] == ["Now 08:00."]


def test_a_recording_of_tokens() -> None:
    builder = TraceBuilder("made", "recording", 1)
    for i in range(12):
        builder.add_tokens([*range(50), 90_000 + i, *range(100, 500), 99_000 + i], (), float(i))
    found = find_faults(TokenLog(builder.build()), run)
    assert [(fault.start, fault.message, fault.texts, fault.requests) for fault in found] == [(50, None, [], 11)]
    assert found[0].fixes[0].hit_tokens == 11 * 450
    assert on_fault(found[0]).startswith(
        "At token 50, a text changes from request to request (11 requests; see request 1)"
    )


def test_a_sentence_names_place_text_and_gain() -> None:
    before, fixes = (
        PromptFix("", 1000, 10),
        [PromptFix("Moved behind", 1000, 800), PromptFix("Moved in front", 1000, 700)],
    )
    fault = PromptFault("text", 28, 0, "system", ["08:00", "08:01"], 3, 19, 900, before, fixes)
    assert on_fault(fault) == (
        "At token 28, message 0 (system), a text changes from request to request: `08:00` and `08:01` (19 requests; "
        "see request 3). Behind it stand 90.0% of all prompt tokens, known and yet computed again. Moved behind, 80.0% "
        "of the prompt tokens would be reused instead of 1.0%; moved in front, 70.0%."
    )
    assert fault.gain == pytest.approx(0.79)
    assert on_faults([]) == []


def lint(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["lint", *arguments])
    out, err = capsys.readouterr()
    return int(str(ended.value.code or 0)), out, err


def written(path: Path, bodies: Sequence[Mapping[str, Any]]) -> str:
    path.write_text("".join(json.dumps({"timestamp": i, **body}) + "\n" for i, body in enumerate(bodies)))
    return str(path)


def test_a_clock_in_front_of_2000_letters(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    letters = "".join(LETTERS.choices("abcdefghij ", k=2000))
    bodies = [chat(f"Now 2026-11-30 08:{i:02}. {letters}", f"q{i}", response="ok") for i in range(20)]
    path = written(tmp_path / "clock.jsonl", bodies)
    code, out, _ = lint(capsys, path, "--tokenizer", "bytes", "--model", "qwen3.6-27b", "--memory", "20GB")
    assert code == 1
    assert out.startswith(("At token 28, message 0 (system), a text changes", "At token 29, message 0"))
    assert "`Now 2026-11-30 08:00.` and `Now 2026-11-30 08:01.` (19 requests; see request" in out
    assert (
        "Moved behind the text of the last user message, 88.3% of the prompt tokens would be reused instead of 1" in out
    )
    assert "moved in front of the text of the last user message, 84.2%" in out


def test_the_command_has_an_exit_code_for_ci(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bad = written(tmp_path / "bad.jsonl", [chat(f"Now 08:{i:02}. {RULES}", f"q{i}") for i in range(12)])
    good = written(tmp_path / "good.jsonl", [chat(RULES, f"Now 08:{i:02}. q{i}") for i in range(12)])
    code, out, _ = lint(capsys, bad, "--tokenizer", "bytes")
    assert (code, "`Now 08:00.`" in out) == (1, True)
    code, out, _ = lint(capsys, bad, "--tokenizer", "bytes", "--model", "qwen3-next", "--memory", "20GB", "--json")
    assert (code, json.loads(out)[0]["message"]) == (1, 0)
    assert lint(capsys, bad, "--tokenizer", "bytes", "--least", "99")[0] == 0
    code, out, _ = lint(capsys, good, "--tokenizer", "bytes")
    assert (code, out) == (0, "12 requests: nothing was found that changes in front of known text.\n")
    hashes = written(tmp_path / "h.jsonl", [{"input_length": 5, "output_length": 1, "hash_ids": [1]}])
    for wrong, message in (
        ((hashes,), "hashes of blocks do not show"),
        ((), "which log?"),
        ((bad, "--tokenizer", "bytes", "--memory", "2GB"), "memory, layout and policies need a model"),
        ((str(tmp_path / "absent"),), "there is no such file"),
    ):
        code, _, err = lint(capsys, *wrong)
        assert code == 2
        assert message in err


def test_a_replay_and_advice_tell_the_fault_and_not_that_nothing_can_be_done(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bad = written(tmp_path / "bad.jsonl", [chat(f"Now 08:{i:02}. {RULES}", f"q{i}") for i in range(12)])
    options = ["--tokenizer", "bytes", "--model", "qwen3-next", "--memory", "20GB"]
    for command in (["replay"], ["advise", "--jobs", "1", "--out", str(tmp_path / "out")]):
        with pytest.raises(SystemExit):
            main([*command, bad, *options])
        said = " ".join(capsys.readouterr().out.split())
        assert "no cache of prefixes can save them" not in said
        assert "are known text behind one that changes" in said
        assert "At token" in said
        assert "`Now 08:00.` and `Now 08:01.`" in said
