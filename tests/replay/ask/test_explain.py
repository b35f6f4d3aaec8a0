"""The story of a request names who shares its prompt, where it resumes and why it reuses no more."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.cache import FullAttention, LayerSpec, Recurrent
from headway.cli import main
from headway.errors import ConfigError
from headway.replay import ReplayConfig, Trace, TraceBuilder, generate, replay_trace
from headway.replay.ask.explain import story_of
from headway.tell.run import Stretch
from headway.tell.story import Story, story_lines

HYBRID: list[LayerSpec] = [FullAttention("attention", 1000), Recurrent("state", 200_000)]
CONFIG = ReplayConfig(HYBRID, None)


def made(prompts: list[list[int]]) -> Trace:
    """Blocks of 10 tokens and a tail of 3; one request per second."""
    builder = TraceBuilder("made", "test", 10)
    for time, prompt in enumerate(prompts):
        builder.add_blocks(prompt, len(prompt) * 10 + 3, 5, time)
    return builder.build()


TRACE = made([[1, 2, 3, 4], [1, 2, 3, 4, 9], [1, 2, 7], [1, 2, 8, 5], [6]])


def said(story: Story) -> str:
    return "\n".join(story_lines(story, "made"))


def marks(story: Story) -> set[tuple[int, str, str]]:
    return {(mark.position, mark.what, mark.kind) for mark in story.marks}


def test_the_first_to_part_pays_and_leaves_a_junction() -> None:
    """Requests 0 and 1 share [0, 20) with request 2, and no checkpoint lies there yet: it is taken now."""
    story = story_of(TRACE, CONFIG, 2)
    assert story.stretches == [Stretch(0, 20, 2, 0, 1), Stretch(20, 33, 0, -1, -1)]
    assert (story.hit_tokens, story.endless_tokens, story.resumed_from) == (0, 20, "")
    assert story.lost == {"state_never_taken": 20, "parted": 13}
    assert (20, "taken", "junction") in marks(story)
    assert (20, "resident", "") in marks(story)
    assert "2 requests, from 0 to 1" in said(story)
    assert "no checkpoint was taken there; try other places for checkpoints (--placement)" in said(story)


def test_the_next_one_resumes_there() -> None:
    story = story_of(TRACE, CONFIG, 3)
    assert (story.hit_tokens, story.resumed_from) == (20, "junction")
    assert story.lost == {"parted": 23}
    assert "20  checkpoint (junction), wanted 0 times so far  <- it resumes here" in said(story)


def test_a_turn_resumes_from_the_end_of_the_prompt_before() -> None:
    story = story_of(TRACE, CONFIG, 1)
    assert (story.hit_tokens, story.resumed_from, story.lost) == (40, "prompt_end", {"parted": 13})
    assert story.stretches == [Stretch(0, 40, 1, 0, 0), Stretch(40, 53, 0, -1, -1)]
    assert "[0, 40)               request 0" in said(story)


def test_who_shares_nothing_finds_nothing() -> None:
    story = story_of(TRACE, CONFIG, 4)
    assert story.stretches == [Stretch(0, 13, 0, -1, -1)]
    assert story.lost == {"nothing_matched": 13}
    assert {what for _, what, _ in marks(story)} == {"taken"}
    assert "new: nobody" in said(story)


def test_what_had_to_go_is_named_with_its_age() -> None:
    """Room for one request: request 1 pushes out what request 0 left, and request 2 comes back to it."""
    trace = made([[1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15, 16], [1, 2, 3, 4, 5, 6, 7]])
    story = story_of(trace, replace(CONFIG, memory=500_000, eviction="lru"), 2)
    assert story.hit_tokens == 0
    assert story.lost["evicted"] == 60
    gone = [mark for mark in story.marks if mark.what == "gone"]
    assert [(mark.position, mark.kind, mark.cause, mark.ago) for mark in gone] == [(60, "prompt_end", "evicted", 1.0)]
    assert "a checkpoint (prompt_end) was here; evicted 1.0 s before" in said(story)
    assert "[0, 60) evicted: the prompt_end checkpoint at 60 was evicted 1.0 s ago" in said(story)


def test_of_several_that_had_to_go_the_latest_is_named() -> None:
    """Two prompts push each other out twice; the fifth request comes back to what went a second ago.

    What went three seconds ago was taken again since, so nothing is gone of it.
    """
    one, other = [1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15, 16]
    story = story_of(made([one, other, one, other, one]), replace(CONFIG, memory=500_000, eviction="lru"), 4)
    assert sorted(mark.ago for mark in story.marks if mark.what == "gone") == [1.0]
    assert "checkpoint at 60 was evicted 1.0 s ago" in said(story)


@pytest.mark.parametrize("memory", [3_000_000, None])
def test_stories_add_up_to_the_replay(memory: int | None) -> None:
    trace, config = generate("mixed", 30, seed=12), replace(CONFIG, memory=memory)
    stories = [story_of(trace, config, request) for request in range(len(trace))]
    result = replay_trace(trace, config)
    served, whole = [story for story in stories if not story.needed], result.whole
    assert (len(served), len(stories) - len(served)) == (whole.requests, result.refused)
    assert sum(story.hit_tokens for story in served) == whole.hit_tokens
    assert all("It would be refused: it needs" in said(story) for story in stories if story.needed)
    assert sum(story.endless_tokens for story in served) >= whole.endless_tokens, "more, of what refused requests had"
    assert result.refused or sum(story.endless_tokens for story in served) == whole.endless_tokens
    for story in served:
        assert story.hit_tokens + sum(story.lost.values()) == story.prompt_tokens
        assert story.stretches[0].start == 0
        assert story.stretches[-1].stop == story.prompt_tokens
        shared = max((stretch.stop for stretch in story.stretches if stretch.requests), default=0)
        assert min(shared, story.prompt_tokens - 1) == story.endless_tokens


def test_lower_tiers_are_not_followed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["explain", "--model", "kimi-linear", "--memory", "2GB", "--host-memory", "4GB"])
    assert "not followed request by request" in capsys.readouterr().err


def test_no_such_request() -> None:
    for request in (-1, 5):
        with pytest.raises(ConfigError, match=r"the trace has requests 0 to 4"):
            story_of(TRACE, CONFIG, request)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> tuple[Any, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["explain", "--limit", "40", *arguments])
        return ended.value.code, *capsys.readouterr()

    code, out, err = run("--request", "30")
    assert code == 0, err
    for words in ("Request 30 of mixed", "Who was here before", "What is on its path", "What is lost"):
        assert words in out
    code, out, _ = run("-n", "30", "--json")
    assert json.loads(out)["request"] == 30
    with pytest.raises(SystemExit):
        main(["replay", "--limit", "40", "--memory", "1GB", "--json"])
    worst = json.loads(capsys.readouterr().out)["result"]["prefixes"]["worst"][0]
    assert run("--memory", "1GB")[1].startswith(f"Request {worst['last_request']} of mixed")
    code, _, err = run("-n", "40")
    assert code == 2
    assert "requests 0 to 39" in err


def chats(clock_first: bool) -> str:
    """Twenty chats of a constant system prompt, with a clock in front of it or in the question."""
    constant, lines = "".join(chr(97 + i * i % 26) for i in range(2000)), []
    for i in range(20):
        clock = f"Now 2026-11-30 08:{i + 12}. "
        system, user = (clock + constant, f"q{i}") if clock_first else (constant, f"{clock}q{i}")
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        lines.append(json.dumps({"timestamp": 100 - i, "messages": messages, "response": "ok"}))
    return "\n".join(lines)


@pytest.mark.parametrize("model", ["qwen3.6-27b", "gpt-oss-20b"])
def test_a_chat_log_is_told_in_its_own_words(tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str) -> None:
    """RPT-09: a clock in front of a stable prompt. RPT-10: which text parted, and in which message."""
    log = tmp_path / "chats.jsonl"
    told = {}
    for clock_first in (True, False):
        log.write_text(chats(clock_first))
        options = ["--tokenizer", "bytes", "--model", model, "--memory", "20GB"]
        with pytest.raises(SystemExit):
            main(["explain", str(log), *options, "-n", "19", "--json"])
        told[clock_first] = json.loads(capsys.readouterr().out)
    first, moved = told[True], told[False]
    changed, parted = first["changed"], first["losses"][-1]
    assert (changed["start"], changed["stop"], changed["text"]) == (29, 30, "08:12"), "times descend"
    assert (changed["place"]["index"], changed["place"]["role"]) == (0, "system")
    assert changed["same_tokens"] == len(". ") + 2000 + len("\n<|user|>q")
    assert parted["reason"] == "parted"
    assert (parted["place"]["before"][-4:], parted["place"]["after"][:4]) == ("08:1", "2. a")
    assert moved["hit_tokens"] > 2000
    assert moved["changed"] is None
    place = moved["losses"][-1]["place"]
    assert (place["index"], place["role"]) == (1, "user")


def test_tokens_without_text_are_told_by_position() -> None:
    builder = TraceBuilder("made", "test", 1)
    for clock in range(3):
        builder.add_tokens([*range(28), 1000 + clock, *range(100, 200)], [], clock)
    story = story_of(builder.build(), CONFIG, 2)
    assert "changed at token 28; 100 tokens behind it are the same as before" in said(story)
    assert story_of(TRACE, CONFIG, 2).changed is None
