"""A request that only asks, and what the log says at the start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.vllm.standin import Request
from tests.vllm.test_manager import World, _served

from headway.vllm.overview import start_lines


def _asking(tokens: list[int], salt: str | None) -> Request:
    asked = SimpleNamespace(extra_args={"kv_transfer_params": {"headway": {"dry_run": True}}})
    return Request("asks", tokens, cache_salt=salt, sampling_params=asked)


def test_what_is_told_is_what_happens_and_nothing_changes() -> None:
    world = World.make(1, "hybrid", blocks=90)
    _served(world, "a", list(range(60)), cache_salt="me")
    before = world.manager.cache.stats()
    told = world.manager.add_request(_asking(list(range(80)), "me"))
    assert world.manager.cache.stats() == before
    assert told
    _, hit = _served(world, "b", list(range(80)), cache_salt="me")
    assert told["cached_tokens"] == hit > 0
    assert told["losses"][-1]["stop"] == told["prompt_tokens"] == 80
    assert world.manager.add_request(Request("c", list(range(80)))) is None


@pytest.mark.parametrize(
    ("rule", "salt", "refused"),
    [("own", None, "a cache_salt"), ("own", "me", ""), ("all", None, ""), ("off", "me", "nobody")],
)
def test_who_may_ask(rule: str, salt: str | None, refused: str) -> None:
    world = World.make(1, "full", blocks=90, explain=rule)
    told: Any = world.manager.add_request(_asking(list(range(30)), salt))
    assert refused in str(told.get("refused"))
    assert ("cached_tokens" in told) is not bool(refused)


def test_what_no_prompt_can_be_is_said_and_ends_nothing() -> None:
    """vLLM's engine would end with an error in `add_request`."""
    world = World.make(1, "full", blocks=90, explain="all")
    assert "negative" in str(world.manager.add_request(_asking([5, -1], None)))
    request = Request("a", [5, -1])
    assert world.manager.add_request(request) is None
    world.scheduler.add_request(request)
    world.scheduler.schedule()
    assert "negative" in world.manager.unservable["a"]


def test_the_log_says_what_fits() -> None:
    groups, memory = start_lines(World.make(1, "all", blocks=101, alignment=4).manager)
    assert groups == (
        "Headway's cache: full0 (2 layers, 8 tokens per page), window1 (2 layers, 8 tokens per page), "
        "state2 (2 layers, a page per state)"
    )
    assert memory == (
        "Headway's cache: 100 pages of 8.0 KiB on each rank, room for 800 tokens or 33 checkpoints of 3 pages; "
        "shortest reusable prefix: 4 tokens, in a prompt of at least 5"
    )
