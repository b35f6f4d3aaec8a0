"""KV events as routers read them: the wire, and what becomes of readers that are late, slow, or miss something.

E1 to E19 are faults that publishers and readers of other engines had.
"""

from __future__ import annotations

import json
import logging
import runpy
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from tests.cache.engine import ATTENTION, STATE, Engine, tokens
from tests.server.fakes import CharTokenizer, running
from tests.server.kv_reader import DECODER, END, MESSAGES, AllBlocksCleared, BlockStored, Reader, reading

from headway.errors import ConfigError
from headway.server import kv_publisher
from headway.server.kv_events import KvEventsConfig, read_kv_events_config
from headway.server.kv_publisher import KvEventPublisher, KvEventSockets

ON = {"enable_kv_cache_events": True}


@dataclass
class Published:
    """A cache whose events are published."""

    engine: Engine
    publisher: KvEventPublisher
    live: str
    replay: str

    @contextmanager
    def reader(self, *, replay: bool = True, **options: int) -> Iterator[Reader]:
        """A reader that has got a first batch."""
        with reading(4, self.live, self.replay if replay else None, **options) as reader:
            reader.receive()
            yield reader


@contextmanager
def publishing(*groups: Any, blocks: int = 100, folder: str | None = None, **options: Any) -> Iterator[Published]:
    with tempfile.TemporaryDirectory() as own:
        live, replay = (f"ipc://{folder or own}/{name}" for name in ("live", "replay"))
        given = ON | {"endpoint": live, "replay_endpoint": replay, "heartbeat_seconds": 0.02} | options
        config = read_kv_events_config(json.dumps(given))
        assert config is not None
        engine = Engine.of(*(groups or (ATTENTION, STATE)), blocks=blocks)
        publisher = KvEventPublisher(engine.cache, KvEventSockets(config), 4)
        try:
            yield Published(engine, publisher, live, replay)
        finally:
            publisher.close()


# ---- the option


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("{", "it is a JSON object with some of enable_kv_cache_events, publisher"),
        ('{"hwm": 5}', 'publishes nothing without "enable_kv_cache_events": true'),
        ('{"enable_kv_cache_events": true, "enable_events": true}', "unknown field `enable_events`"),
        ('{"enable_kv_cache_events": true, "publisher": "kafka"}', "Invalid enum value 'kafka'"),
        ('{"enable_kv_cache_events": true, "hwm": "5"}', r"Expected `int`, got `str` - at `\$.hwm`"),
        ('{"enable_kv_cache_events": true, "hwm": 0}', "hwm is 0, it must be at least 1"),
        ('{"enable_kv_cache_events": true, "block_size": 0}', "block_size is 0, it must be at least 1"),
        ('{"enable_kv_cache_events": true, "heartbeat_seconds": 0}', "heartbeat_seconds is 0.0, it must be 0.01 to"),
        ('{"enable_kv_cache_events": true, "endpoint": "inproc://cache"}', "use tcp://\\*:PORT"),
        ('{"enable_kv_cache_events": true, "endpoint": "tcp://*"}', "endpoint is 'tcp://\\*': use"),
        ('{"enable_kv_cache_events": true, "replay_endpoint": "tcp://*:5557"}', "they are two sockets"),
    ],
)
def test_options_that_cannot_work_say_what_to_do(given: str, told: str) -> None:
    """Of them E14 and E15: a flag that does not exist, and options with which nothing is published."""
    with pytest.raises(ConfigError, match=told):
        read_kv_events_config(given)


def test_the_option_is_that_of_vllm() -> None:
    assert read_kv_events_config(None) is None
    assert read_kv_events_config('{"enable_kv_cache_events": false}') is None
    assert read_kv_events_config('{"enable_kv_cache_events": true, "publisher": "null"}') is None
    config = read_kv_events_config('{"enable_kv_cache_events": true}')
    assert config == KvEventsConfig(enable_kv_cache_events=True)
    assert (config.endpoint, config.replay_endpoint, config.topic) == ("tcp://*:5557", None, "")
    assert (config.buffer_steps, config.hwm, config.max_queue_size) == (10_000, 100_000, 100_000)


@pytest.mark.parametrize("name", ["endpoint", "replay_endpoint"])
def test_an_address_that_is_taken_is_told(name: str) -> None:
    """E16: two servers of one machine need two ports."""
    free = {"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        port = other.bind_to_random_port("tcp://0.0.0.0")
        config = KvEventsConfig(enable_kv_cache_events=True, **(free | {name: f"tcp://*:{port}"}))
        with pytest.raises(ConfigError, match=rf"{name} tcp://\*:{port} is in use: choose another port"):
            KvEventSockets(config)
    with pytest.raises(ConfigError, match="cannot be used"):
        KvEventSockets(KvEventsConfig(enable_kv_cache_events=True, endpoint="ipc:///no/such/folder/live"))


def test_a_plain_host_is_connected_to_as_in_vllm() -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as router:
        router.setsockopt(zmq.SUBSCRIBE, b"")
        router.setsockopt(zmq.RCVTIMEO, 20_000)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        sockets = KvEventSockets(
            KvEventsConfig(
                enable_kv_cache_events=True, endpoint=f"tcp://127.0.0.1:{port}", heartbeat_seconds=0.02, topic="kv"
            )
        )
        publisher = KvEventPublisher(Engine.of(ATTENTION).cache, sockets, 16)
        assert (
            f"KV events to the reader at tcp://127.0.0.1:{port}, no replay (add a replay_endpoint" in publisher.told()
        )
        topic, _, payload = router.recv_multipart()
        assert topic == b"kv"
        assert DECODER.decode(payload).data_parallel_rank == 0
        publisher.close()
        publisher.close()


# ---- the wire


def test_messages_are_those_of_vllm() -> None:
    """E1, E2, E18: hashes are integers, events are of three types, the salt is a field."""
    with publishing() as world, world.reader() as reader:
        cache = world.engine.cache
        hexadecimal = "0123456789abcdef" * 4
        for i in range(40):
            world.engine.run(tokens((i, 9)), namespace=cache.namespace(salt=["", "me", hexadecimal][i % 3]))
        reader.catch_up()
        payloads = [payload for _, payload in reader.replay(0)]
    stored, types = [], set()
    for payload in payloads:
        batch = MESSAGES.decode(payload)
        assert isinstance(batch, list)
        ts, events, rank = batch
        assert isinstance(ts, float)
        assert rank == 0
        types |= {event["type"] for event in events}
        stored += [event for event in events if event["type"] == "BlockStored"]
    assert types <= {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
    names = [name for event in stored for name in event["block_hashes"]]
    assert all(type(name) is int for name in names)
    assert max(names) >= 2**63, "unsigned"
    first = [event for event in stored if event["parent_block_hash"] is None]
    for salt, keys in ((None, None), ("me", [["me"], None]), (hexadecimal, None)):
        mine = [event for event in first if event.get("cache_salt") == salt]
        assert mine
        for event in mine:
            told = event.get("extra_keys")
            assert told == (keys and keys[: len(event["block_hashes"])]), "readers take 64 digits for an image"
    for event in stored:
        assert (event["block_size"], event["medium"], event["group_idx"]) == (4, "GPU", 0)
        assert (event["lora_id"], event["lora_name"]) == (None, None)
        assert "locality" not in event, "what is at its default is left out"


def test_a_type_that_readers_do_not_know_would_cost_them_the_batch() -> None:
    """E2: why checkpoints ride along in fields. The reader of these tests is as strict as others."""
    payload = msgspec.msgpack.encode([0.0, [{"type": "CheckpointStored"}], 0])
    with pytest.raises(msgspec.ValidationError):
        DECODER.decode(payload)


@pytest.mark.parametrize("kind", [zmq.REQ, zmq.DEALER])
def test_a_replay_has_topic_number_and_payload_and_an_end(kind: int) -> None:
    """E3, E5, E6: one message for each batch, whatever socket asks."""
    with publishing(topic="kv") as world, zmq.Context() as context, context.socket(kind) as ask:
        ask.setsockopt(zmq.RCVTIMEO, 20_000)
        ask.connect(world.replay)
        start = (0).to_bytes(8, "big")
        ask.send_multipart((start,) if kind == zmq.REQ else (b"", start))
        told = []
        while (frames := ask.recv_multipart())[-2:] != [END, b""]:
            told.append(frames[-3:])
            if kind == zmq.REQ:
                break  # such a socket gets the first message alone
        assert told[0][0] == b"kv"
        assert DECODER.decode(told[0][2]).events == [AllBlocksCleared()]


def test_a_request_that_is_no_request_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    with publishing() as world, world.reader() as reader:
        for _ in range(3):
            reader.ask.send_multipart((b"", b"from the start"))
        assert list(reader.replay(0))
    assert caplog.text.count("a request for a replay is not understood") == 1


@pytest.mark.parametrize("kind", [zmq.SUB, zmq.DEALER])
def test_a_reader_that_sends_much_is_disconnected(kind: int) -> None:
    """Each byte of a subscription takes about fifty of memory, which stay when its reader is gone."""
    with publishing(topic="kv") as world, zmq.Context() as context, context.socket(kind) as socket:
        socket.linger = 0
        watch = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.connect(world.live if kind == zmq.SUB else world.replay)
        if kind == zmq.SUB:
            socket.subscribe(b"z" * 10_000)
        else:
            socket.send_multipart((b"", b"z" * 10_000))
        assert watch.poll(20_000)
        socket.disable_monitor()
        watch.close()


# ---- late, slow and forgetful readers


def test_a_reader_that_joins_an_idle_server_learns_all() -> None:
    """E19: what it has missed it finds with the next message, and there is one."""
    with publishing() as world:
        world.engine.run(tokens((1, 20)))
        with world.reader() as reader:
            index = reader.catch_up()
            assert index.overlap(tokens((1, 20)).tolist()) == 20
            assert index.resume(tokens((1, 30)).tolist()) == 20
            numbers = [number for number, _ in reader.batches]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_what_was_missed_is_asked_for_before_what_follows_is_used() -> None:
    """E4, E7: batches are used in their order, so a removal that was missed is not undone by a later store."""
    with publishing() as world, world.reader() as reader:
        reader.catch_up()
        world.engine.run(tokens((1, 20)))
        world.engine.cache.forget(world.engine.prompt(tokens((1, 20))))
        world.engine.run(tokens((1, 8), (2, 8)))
        for _ in range(3):
            reader.live.recv_multipart()  # lost
        index = reader.catch_up()
        assert reader.replays > 1
        assert index.overlap(tokens((1, 20)).tolist()) == 8


@pytest.mark.parametrize("at_once", [4096, 2])
def test_who_has_missed_more_than_is_kept_gets_all_there_is(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_publisher, "_SNAPSHOT_BLOCKS", at_once)
    with publishing(buffer_steps=4) as world, world.reader() as early:
        for stream in range(4):
            world.engine.run(tokens((1, 8), (stream + 2, 6)))
            early.catch_up()
        with world.reader() as late:
            assert late.catch_up().blocks == early.index.blocks
            assert late.index.points == early.index.points
            assert world.publisher.counts.snapshots >= 1
        parts = list(early.replay(world.publisher.latest - 5))
        assert (len(parts) > 1) == (at_once == 2)
        assert DECODER.decode(parts[0][1]).events[0] == AllBlocksCleared()


def test_a_server_that_starts_again_is_believed() -> None:
    """E8: its numbers are above those of the run before, and what that had is cleared."""
    with tempfile.TemporaryDirectory() as folder, publishing(folder=folder) as world:
        world.engine.run(tokens((1, 20)))
        with world.reader() as reader:
            reader.catch_up()
            before = reader.last
            world.publisher.close()
            with publishing(folder=folder) as again:
                again.engine.run(tokens((2, 12)))
                index = reader.catch_up()
            assert reader.last > before
            assert index.overlap(tokens((1, 20)).tolist()) == 0
            assert index.overlap(tokens((2, 12)).tolist()) == 12


def test_a_server_that_ends_takes_all_back() -> None:
    with publishing() as world, world.reader() as reader:
        world.engine.run(tokens((1, 20)))
        assert reader.catch_up().blocks
        world.publisher.close()
        while reader.receive().events != [AllBlocksCleared()]:
            pass
        assert reader.index.blocks == {}


def test_a_reset_is_told_as_one() -> None:
    with publishing() as world, world.reader() as reader:
        for stream in range(5):
            world.engine.run(tokens((stream, 9)))
        reader.catch_up()
        world.engine.cache.reset()
        world.engine.run(tokens((7, 9)))
        index = reader.catch_up()
        assert index.overlap(tokens((0, 9)).tolist()) == 0
        assert index.overlap(tokens((7, 9)).tolist()) == 8
        clears = [event for _, batch in reader.batches for event in batch.events if event == AllBlocksCleared()]
        assert len(clears) == 2


def test_a_slow_reader_stops_nobody_and_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """E17: batches that do not fit are dropped for it alone; it is counted and logged, and gets them by asking."""
    with publishing(ATTENTION, blocks=50_000, hwm=1) as world, world.reader(RCVHWM=1) as slow, world.reader() as fast:
        fast.catch_up()
        text = tokens((1, 40_000))
        for i in range(200):
            world.engine.run(text[i:])
            world.engine.cache.forget(world.engine.prompt(text[i:]))
            fast.catch_up()
            if world.publisher.counts.missed:
                break
        assert world.publisher.counts.missed >= 1
        world.engine.run(tokens((2, 20)))
        asked = slow.replays
        assert slow.catch_up().blocks == fast.catch_up().blocks
        assert slow.replays > asked
    assert "a reader is slow and has missed 1 batches" in caplog.text
    assert "it can ask for them" in caplog.text


def test_a_publisher_that_does_not_keep_up_stops_nobody_and_begins_anew(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E17: the engine never waits for the publisher."""
    encode, go, stands = kv_publisher.encode_batch, threading.Event(), threading.Event()

    def wait(events: Any) -> bytes:
        if events:
            stands.set()
            assert go.wait(20)
        return encode(events)

    with publishing(max_queue_size=5) as world, world.reader() as reader:
        reader.catch_up()
        monkeypatch.setattr(kv_publisher, "encode_batch", wait)
        world.engine.run(tokens((1, 12)))
        assert stands.wait(20)
        for stream in range(2, 8):
            world.engine.run(tokens((stream, 12)))
        go.set()
        index = reader.catch_up()
        assert world.publisher.counts.overflows == 1
        assert index.blocks == {}
        world.engine.run(tokens((3, 12), (9, 4)))
        assert reader.catch_up().overlap(tokens((3, 12), (9, 4)).tolist()) == 16
    assert "all that was told is taken back" in caplog.text


def test_a_publisher_that_fails_ends_alone(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(events: Any) -> bytes:
        raise RuntimeError("out of memory")

    with publishing() as world:
        monkeypatch.setattr(kv_publisher, "encode_batch", fail)
        world.engine.run(tokens((1, 12)))
        world.publisher._thread.join(20)
        assert not world.publisher._thread.is_alive()
        assert world.engine.run(tokens((1, 12))) == 11
    assert "KV events end here, and the server goes on without" in caplog.text
    assert "listener failed" not in caplog.text


def test_a_salt_that_is_too_long_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    with publishing() as world, world.reader() as reader, caplog.at_level(logging.WARNING):
        namespace = world.engine.cache.namespace(salt="x" * 300)
        world.engine.run(tokens((1, 12)), namespace=namespace)
        assert reader.catch_up().blocks == {}
        assert world.publisher.counts.untold > 0
    assert caplog.text.count("a cache salt is too long to be told") == 1


def test_the_program_on_the_page_reads_all() -> None:
    follow = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "examples" / "kv_reader.py"))["follow"]
    with publishing() as world:
        world.engine.run(tokens((1, 20)))
        told = [event for _, events, _ in islice(follow(world.live, world.replay), 20) for event in events]
    assert told[0] == {"type": "AllBlocksCleared"}
    assert sum(len(event["block_hashes"]) for event in told if event["type"] == "BlockStored") == 5


# ---- with a server


def test_a_server_publishes_what_its_requests_can_reuse() -> None:
    with tempfile.TemporaryDirectory() as folder:
        live, replay = f"ipc://{folder}/live", f"ipc://{folder}/replay"
        config = KvEventsConfig(
            enable_kv_cache_events=True, endpoint=live, replay_endpoint=replay, heartbeat_seconds=0.02
        )
        sockets = KvEventSockets(config)
        with running(kv_events=sockets) as server, reading(4, live, replay) as reader:
            text = "Once upon a time there was a king"
            for salt in ({}, {"cache_salt": "me"}):
                assert server.complete(text, max_tokens=8, **salt)["usage"]["prompt_tokens"] == len(text)
            index = reader.catch_up()
            prompt = CharTokenizer().encode(text + " in a castle")
            for salt in ({}, {"cache_salt": "me"}):
                expected = index.overlap(prompt, salt.get("cache_salt", "")), index.resume(prompt, *salt.values())
                usage = server.complete(text + " in a castle", max_tokens=1, **salt)["usage"]
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                assert expected == (len(text) // 4 * 4, cached)
                assert cached == len(text) - 1
            assert index.overlap(prompt, "you") == 0
            metrics = server.http.get("/metrics").text
            assert f"headway_kv_event_replays_total {reader.replays}.0" in metrics
            assert f"headway_kv_event_blocks {len(reader.catch_up().blocks)}.0" in metrics
            server.post("/reset_prefix_cache")
            assert reader.catch_up().blocks == {}
            assert any(isinstance(event, BlockStored) for _, batch in reader.batches for event in batch.events)
