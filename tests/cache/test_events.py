"""Listeners: told when a change is complete, in order, whatever another listener does."""

from __future__ import annotations

import logging

import pytest
from tests.cache.engine import ATTENTION, STATE, Engine, tokens

from headway.cache import CheckpointRemoved, CheckpointStored, Event, ResidentGrown, ResidentShrunk


def test_a_listener_that_fails_breaks_nothing_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine.of(ATTENTION, STATE)
    heard: list[Event] = []

    def fail(event: Event) -> None:
        raise RuntimeError("the router is down")

    engine.cache.subscribe(fail)
    engine.cache.subscribe(heard.append)
    with caplog.at_level(logging.ERROR, logger="headway.cache"):
        assert engine.run(tokens((1, 20))) == 0
    assert len(heard) == len(caplog.records) == 4
    assert "the router is down" in str(caplog.records[0].exc_info)
    assert engine.run(tokens((1, 20))) == 19
    engine.cache.check()


def test_a_listener_that_ends_itself_lets_the_others_hear_everything() -> None:
    engine = Engine.of(ATTENTION, STATE)
    first: list[Event] = []
    others: list[Event] = []

    def once(event: Event) -> None:
        first.append(event)
        end()

    end = engine.cache.subscribe(once)
    engine.cache.subscribe(others.append)
    engine.run(tokens((1, 20)))
    kinds = [ResidentGrown, CheckpointStored, ResidentGrown, CheckpointStored]
    assert [type(event) for event in others] == kinds
    assert first == others[:1]
    end()  # once more does nothing


def test_a_listener_that_was_ended_by_another_hears_nothing_more() -> None:
    engine = Engine.of(ATTENTION, STATE)
    heard: list[Event] = []
    ends = [engine.cache.subscribe(lambda event: ends[1]()), engine.cache.subscribe(heard.append)]
    engine.run(tokens((1, 20)))
    assert heard == []


def test_events_are_delivered_when_the_change_is_complete() -> None:
    """A listener finds the cache as it is behind the call: what it is told of can be looked up, and nothing is half."""
    engine = Engine.of(ATTENTION, STATE, blocks=30, eviction="lru")
    seen: list[tuple[str, int]] = []

    def look(event: Event) -> None:
        engine.cache.check()
        if isinstance(event, CheckpointStored):
            seen.append(("stored", engine.hit(tokens((1, event.position), (9, 2)))))
        elif isinstance(event, CheckpointRemoved):
            seen.append(("removed", engine.hit(tokens((1, event.position), (9, 2)))))

    engine.cache.subscribe(look)
    engine.run(tokens((1, 20)))
    assert seen == [("stored", 19), ("stored", 20)]
    engine.cache.reset()
    assert seen[2:] == [("removed", 0), ("removed", 0)]


def test_a_change_that_a_listener_makes_is_told_after_what_came_before_it() -> None:
    engine = Engine.of(ATTENTION)
    heard: list[str] = []

    def forget(event: Event) -> None:
        heard.append(type(event).__name__)
        if isinstance(event, ResidentGrown) and event.position == 20:
            engine.cache.reset()

    engine.cache.subscribe(forget)
    engine.run(tokens((1, 20)))
    assert heard == ["ResidentGrown", "ResidentShrunk"]
    assert engine.hit(tokens((1, 20))) == 0


def test_a_listener_that_is_added_twice_hears_twice_and_ends_once_each() -> None:
    engine = Engine.of(ATTENTION)
    heard: list[Event] = []
    ends = [engine.cache.subscribe(heard.append) for _ in range(2)]
    engine.run(tokens((1, 20)))
    assert len(heard) == 2
    ends[0]()
    engine.run(tokens((2, 20)))
    assert len(heard) == 3


@pytest.mark.parametrize("groups", [(ATTENTION,), (ATTENTION, STATE)], ids=["paths", "states"])
def test_what_is_forgotten_is_told_as_forgotten(groups: tuple[object, ...]) -> None:
    engine = Engine.of(*groups)
    engine.run(tokens((1, 20)))
    heard: list[Event] = []
    engine.cache.subscribe(heard.append)
    engine.cache.forget(engine.prompt(tokens((1, 20))))
    assert {event.cause for event in heard if isinstance(event, CheckpointRemoved | ResidentShrunk)} == {"forgotten"}
