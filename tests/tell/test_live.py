"""The record of the live page: what it says of now, from counters alone, and how the cache is judged."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from typing import Any

import pytest

from headway.tell.live import Board, live_events
from headway.tell.live_page import live_page


def values(prompt: int = 0, hit: int = 0, requests: int = 0, **lost: int) -> Any:
    """Totals as they travel: what is neither a hit nor named lies behind where prompts part."""
    lost = {"parted": prompt - hit - sum(lost.values()), **lost}
    return {
        "requests_admitted": {"": requests},
        "prompt_tokens": {"": prompt},
        "prompt_hit_tokens": {"": hit},
        "prompt_lost_tokens": lost,
        "blocks": {"free": 5, "leased": 1, "pinned": 2, "evictable": 2},
        "block_bytes": {"": 100},
        "blocks_evicted": {"": 3},
        "checkpoints_taken": {"prompt_end": 4, "junction": 9},
        "checkpoints_reused": {"junction": 6},
        "resumed": {"junction": 20},
    }


def test_now_is_told_beside_the_whole():
    board = Board("headway 1", "m", 1000.0)
    board.add(values(100, 0, 10), 1010.0)
    board.add(values(200, 90, 20), 1300.0)
    board.add(values(300, 185, 30, evicted=5), 1500.0)
    told = board.record(1501.0)
    assert (told.total.requests, told.total.prompt_tokens, told.total.share) == (30, 300, 185 / 300)
    assert told.recent.seconds == 1501 - 1010, "the last moment known before the last five minutes"
    assert (told.recent.requests, told.recent.prompt_tokens, told.recent.reused_tokens) == (20, 200, 185)
    assert told.recent.possible == 185 / 190
    assert [(line.name, line.tokens) for line in told.recent.lines] == [("parted", 10), ("evicted", 5), ("reused", 185)]
    assert sum(line.tokens for line in told.total.lines) == 300
    shares = [share for share in told.trend if share is not None]
    assert shares == [0.0, 0.9, 0.95]
    assert len(told.trend) == 501 // 15


def test_the_record_is_whole_without_what_counters_do_not_say():
    board = Board("vLLM", "m", 0.0)
    board.add(values(), 1.0)
    told = json.loads(json.dumps(board.record(2.0).as_dict()))
    assert told["memory"] == {
        "block_bytes": 100,
        "states": {"free": 5, "leased": 1, "pinned": 2, "evictable": 2},
        "kinds": None,
        "evicted": 3,
    }
    kinds = [(one["kind"], one["kept"], one["taken"], one["reused"], one["resumed"]) for one in told["checkpoints"]]
    assert kinds == [("junction", None, 9, 6, 20), ("prompt_end", None, 4, 0, 0)]
    for part in ("requests", "saving", "costing", "running", "waiting", "tokens_per_second"):
        assert told[part] is None
    assert told["verdict"]["level"] == "none"


@pytest.mark.parametrize(
    ("prompt", "hit", "lost", "level", "said"),
    [
        (1000, 0, {}, "none", "100% of the prompt tokens are new"),
        (1000, 20, {"evicted": 29}, "none", "95% of the prompt tokens are new"),
        (1000, 80, {"evicted": 20}, "good", "80% of what could be reused is reused"),
        (1000, 79, {"evicted": 21}, "fair", "79% of what could be reused is reused"),
        (1000, 40, {"evicted": 60}, "fair", "40% of what could be reused is reused"),
        (1000, 39, {"evicted": 61}, "bad", "39% of what could be reused is reused"),
        (1000, 500, {"evicted": 20}, "good", "96% of what could be reused is reused; 48% of the prompt tokens are new"),
        (1000, 300, {"evicted": 200, "state_never_taken": 20}, "fair", "largest loss is evicted, 20% of the prompt"),
        (1000, 0, {"state_never_taken": 900}, "bad", "To mend it: try other places for checkpoints"),
    ],
)
def test_the_cache_is_judged_by_what_could_be_reused(
    prompt: int, hit: int, lost: dict[str, int], level: str, said: str
):
    board = Board("headway", "m", 0.0)
    board.add(values(prompt, hit, 9, **lost), 6.0)
    told = board.record(7.0)
    assert told.verdict.level == level
    assert said in told.verdict.text
    assert board.record(7.0, unavailable="ranks are lost").verdict.level == "bad"


def test_a_server_that_was_told_to_reuse_nothing_is_not_judged():
    board = Board("headway", "m", 0.0, reuses=False)
    board.add({**values(1000, 0, 9), "prompt_lost_tokens": {"nothing_matched": 1000}}, 6.0)
    told = board.record(7.0).verdict
    assert (told.level, told.title) == ("none", "Prefix reuse is off")
    assert "--no-prefix-reuse" in told.text


def test_the_speed_is_that_of_the_last_minute():
    board = Board("headway", "m", 0.0)
    for now, generated in ((0, 0), (50, 5000), (100, 5600), (110, 6000)):
        board.add(values() | {"generation_tokens": {"": generated}}, float(now))
    assert board.record(110.0).tokens_per_second == (6000 - 5000) / 60


def test_a_quiet_time_is_judged_by_the_whole():
    board = Board("headway", "m", 0.0)
    for now in range(0, 1000, 5):
        board.add(values(100, 90, 3), float(now))
    told = board.record(1000.0)
    assert (told.recent.requests, told.recent.share) == (0, None)
    assert told.verdict.level == "good"
    assert told.trend == [None] * 60


def test_events_are_records_and_end_when_the_server_does():
    board, ended = Board("headway", "m", 0.0), iter([True])

    async def read() -> list[bytes]:
        return [event async for event in live_events(lambda: board.record(1.0), lambda: next(ended))]

    (event,) = asyncio.run(read())
    assert event.endswith(b"\n\n")
    assert json.loads(event.removeprefix(b"data: "))["model"] == "m"


def test_the_page_runs_its_own_script_only():
    text, headers = live_page()
    policy = headers["Content-Security-Policy"]
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'")
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy
    assert not re.search(r"innerHTML|https?://(?!www\.w3\.org/2000/svg)|\son\w+=|style=", text)
