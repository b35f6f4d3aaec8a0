"""What the machine of the tiers seldom meets, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.model.tier_driver import Server, TierDriver
from tests.model.tier_worlds import ServerPlan, TierWorld
from tests.model.turns import Turns, standing_in

from headway.cache import CacheConfig, FullAttention, ParallelLayout, SlidingWindow

WINDOW = [FullAttention("full", 4), SlidingWindow("window", 4, 3)]
PROMPT = [*range(100, 120)]


@contextmanager
def world(*, disk: bool = True, store: bool = False) -> Iterator[TierDriver]:
    """Windows of three tokens in blocks of four, on a disk or in a store."""
    config = CacheConfig(WINDOW, 64, block_tokens=4, placement=("prompt_end",), checkpoint_alignment=1)
    with standing_in():
        driver = TierDriver(TierWorld(config, disk, store, files=False, store_bytes=None), Turns(0))
        try:
            yield driver
            driver.close()
        finally:
            driver.turns.close()


def plan(**more: Any) -> ServerPlan:
    usual = {
        "layout": ParallelLayout(1, 1, 1, 1),
        "block_tokens": 4,
        "blocks": 16,
        "host": 0,
        "write": "through",
        "capacity": None,
        "staging": 1 << 30,
        "rates": {},
        "seed": 0,
        "wait_tokens": 0,
        "pace": 0.0,
        "haul": 0.0,
        "check": True,
    }
    return ServerPlan(**{**usual, **more})


def ask(driver: TierDriver, server: Server, tokens: list[int]) -> Any:
    driver._allow("", tokens)
    request = server.submit(tokens, 1)
    driver.settle(server)
    return request


def read_back(driver: TierDriver, **more: Any) -> Server:
    """A server that has read the prompt back which another one wrote."""
    first = driver.start(plan())
    ask(driver, first, PROMPT)
    driver.stop(first)
    second = driver.start(plan(**more))
    assert ask(driver, second, PROMPT).loaded == {"disk": 19}
    return second


def crowd_out(driver: TierDriver, server: Server) -> None:
    """Ask for other things until the device has nothing of the prompt any more."""
    for number in range(2, 9):
        ask(driver, server, [*range(100 * number, 100 * number + 40)])


def test_a_window_that_was_read_back_serves_no_position_before_it() -> None:
    """The block that its first entry is in has room for an entry before it, which was not read."""
    with world() as driver:
        server = read_back(driver)
        assert ask(driver, server, [*PROMPT[:18], 3, 4]).cached_tokens == 0


def test_nor_does_it_from_host_memory() -> None:
    with world() as driver:
        server = read_back(driver, blocks=4, host=64)
        crowd_out(driver, server)
        assert ask(driver, server, [*PROMPT[:18], 3, 4]).cached_tokens == 0
        assert server.happened["read back from host"] == 0
        assert ask(driver, server, PROMPT).cached_tokens == 19


def test_nor_does_it_when_it_is_back_from_there() -> None:
    with world() as driver:
        server = read_back(driver, blocks=4, host=64)
        crowd_out(driver, server)
        assert ask(driver, server, PROMPT).loaded == {"host": 19}
        assert ask(driver, server, [*PROMPT[:18], 5, 6]).cached_tokens == 0


@pytest.mark.parametrize("how", ["path", "reset"])
def test_what_a_server_forgets_is_gone_whoever_wrote_it(how: str) -> None:
    with world(disk=False, store=True) as driver:
        first = driver.start(plan())
        ask(driver, first, PROMPT)
        driver.stop(first)
        second = driver.start(plan())  # knows of nothing in the store
        driver.past.append(("", PROMPT))
        driver.forget(second, 0, 1000, how)
        assert not driver.look()[0].manifests
        third = driver.start(plan())
        assert ask(driver, third, [*PROMPT, 1]).cached_tokens == 0


@pytest.mark.parametrize("how", ["path", "reset"])
def test_what_a_server_forgets_is_gone_from_its_host_memory(how: str) -> None:
    with world() as driver:
        server = read_back(driver, blocks=4, host=64)
        crowd_out(driver, server)
        assert ask(driver, server, PROMPT).loaded == {"host": 19}
        crowd_out(driver, server)
        driver.past.append(("", PROMPT))
        driver.forget(server, 0, 500, how)
        assert ask(driver, server, PROMPT).cached_tokens < 10
