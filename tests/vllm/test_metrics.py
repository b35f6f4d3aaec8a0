"""The cache's numbers on their way from the engine to `/metrics`."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry
from tests.vllm.standin import Request
from tests.vllm.test_manager import World

from headway.vllm.live import add_live_routes, board_of
from headway.vllm.metrics import Exporter, Meter


def _value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"headway_{name}", {"model_name": "m", "engine": "0", **labels})


def test_every_prompt_token_arrives_on_one_line() -> None:
    world, now = World.make(1, "hybrid", blocks=70), 0.0
    meter, registry = Meter(world.manager, clock=lambda: now), CollectorRegistry()
    exporter = Exporter("m", registry)
    world.scheduler.add_request(Request("first", list(range(100)), 4))
    world.scheduler.add_request(Request("second", list(range(500, 560)), 4))
    while world.scheduler.requests:
        now += 0.05
        out = world.scheduler.schedule()
        world.scheduler.update_from_output(out, world.worker.run(out))
        exporter.add(["lookup", *meter.stage(last=False)], 0)
    exporter.add(meter.stage(last=True), 0)
    world.run(30)
    now += 1
    exporter.add(meter.stage(last=False), 0)
    manager = world.manager
    assert _value(registry, "requests_admitted_total") == manager.waterfall.requests > 20
    lost = [_value(registry, "prompt_lost_tokens_total", reason=reason.value) or 0 for reason in manager.waterfall.lost]
    hits = _value(registry, "prompt_hit_tokens_total")
    assert hits
    assert hits + sum(lost) == _value(registry, "prompt_tokens_total") == manager.waterfall.prompt_tokens
    assert _value(registry, "resumed_tokens_total") == manager.resumed_tokens
    assert manager.resumed_tokens == 0 or world.scheduler.preemptions
    stats = manager.cache.stats()
    assert _value(registry, "blocks", state="free") == stats.free
    assert _value(registry, "checkpoints") == stats.checkpoints
    assert _value(registry, "checkpoints_taken_total", kind="prompt_end") == stats.counters.taken["prompt_end"]


def test_numbers_are_sent_at_intervals_and_at_the_end() -> None:
    world, now = World.make(1, "full", blocks=70), 10.0
    meter = Meter(world.manager, clock=lambda: now)
    (stage, requests), *more = meter.stage(last=False).items()
    assert stage.startswith("headway {")
    assert (requests, more) == (0, [])  # vLLM counts the requests of all stages in its log
    world.run(8)
    assert meter.stage(last=False) == {}
    assert "requests_admitted" in next(iter(meter.stage(last=True)))
    assert meter.stage(last=True) == {}


def test_two_engines_and_a_second_exporter_share_the_metrics() -> None:
    registry = CollectorRegistry()
    for engine in (0, 1):
        Exporter("m", registry).add(['headway {"prompt_tokens":{"":5}}', 'headway {"blocks":{"free":3}}'], engine)
    Exporter("m", registry).add(['headway {"prompt_tokens":{"":2}}', 'headway {"blocks":{"free":1}}'], 0)
    assert _value(registry, "prompt_tokens_total") == 7
    assert _value(registry, "blocks", state="free") == 1
    assert registry.get_sample_value("headway_prompt_tokens_total", {"model_name": "m", "engine": "1"}) == 5


def test_without_the_scheduler_the_live_page_says_so() -> None:
    registry, app = CollectorRegistry(), FastAPI()
    exporter, board = Exporter("m", registry), board_of(registry)
    add_live_routes(app, board)
    board.missing = "this server does not run headway.vllm.Scheduler"
    answer = TestClient(app).get("/v1/headway/live", headers={"Accept": "text/event-stream"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (501, board.missing)
    exporter.add(['headway {"prompt_tokens":{"":5}}'], 0)  # from a subclass under another name
    assert TestClient(app).get("/v1/headway/live").json()["total"]["prompt_tokens"] == 5


def test_the_live_page_shows_what_the_metrics_count() -> None:
    world, now = World.make(1, "hybrid", blocks=70), 0.0
    meter, registry, app = Meter(world.manager, clock=lambda: now), CollectorRegistry(), FastAPI()
    exporter = Exporter("m", registry)
    add_live_routes(app, board_of(registry))
    client = TestClient(app)
    assert client.get("/v1/headway/live").json()["verdict"]["title"] == "No requests yet"
    for _ in range(3):
        world.run(10)
        now += 1
        exporter.add(meter.stage(last=False), 0)
    exporter.add_queue(2, 1, 0)
    exporter.add(['headway {"prompt_tokens":{"":50},"blocks":{"free":7},"block_bytes":{"":4096}}'], 1)
    exporter.add_queue(3, 0, 1)
    told, found, stats = client.get("/v1/headway/live").json(), world.manager.waterfall, world.manager.cache.stats()
    assert told["model"] == "m"
    assert (told["running"], told["waiting"]) == (5, 1)
    assert told["total"]["requests"] == found.requests
    assert told["total"]["prompt_tokens"] == found.prompt_tokens + 50
    lines = {line["name"]: line["tokens"] for line in told["total"]["lines"]}
    assert lines.pop("reused") == found.reused > 0
    assert lines == {reason.value: tokens for reason, tokens in found.lost.items() if tokens}
    assert told["memory"]["states"]["free"] == stats.free + 7
    assert told["memory"]["block_bytes"] == world.manager.groups.block_bytes
    assert {one["kind"]: one["taken"] for one in told["checkpoints"]} == stats.counters.taken
    assert told["saving"] is told["requests"] is told["memory"]["kinds"] is None
    page = client.get("/headway")
    assert page.headers["content-type"].startswith("text/html")
    assert "v1/headway/live" in page.text
