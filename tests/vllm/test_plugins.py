"""The plug-ins beside a vLLM: what its own classes do with what they send. Skipped where vLLM is not installed."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY
from tests.vllm.test_manager import World, _served

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


def test_numbers_pass_from_the_engine_to_the_front_end_unseen_by_vllm() -> None:
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.loggers import KV_FETCH_STAGES
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    from headway.vllm.metrics import Meter
    from headway.vllm.stat_logger import StatLogger

    world = World.make(1, "full", blocks=90)
    _served(world, "a", list(range(40)))
    stats = SchedulerStats(num_kv_fetch_reqs_by_stage=dict.fromkeys(KV_FETCH_STAGES, 0))
    stats.num_kv_fetch_reqs_by_stage.update(Meter(world.manager).stage(last=True))
    sent = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=stats))
    arrived = MsgpackDecoder(EngineCoreOutputs).decode(sent).scheduler_stats
    assert not any(arrived.num_kv_fetch_reqs_by_stage.values())  # else vLLM logs a line of fetches
    config = SimpleNamespace(model_config=SimpleNamespace(served_model_name="plugged"))
    logger = StatLogger(config, [0])
    logger.record(arrived, None, engine_idx=0)
    logger.record(None, None)
    labels = {"model_name": "plugged", "engine": "0"}
    assert REGISTRY.get_sample_value("headway_prompt_tokens_total", labels) == 40


def test_kv_events_are_of_vllms_classes() -> None:
    import msgspec
    from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

    from headway.vllm.events import KvEvents

    world = World.make(1, "full", blocks=90)
    world.manager.events = KvEvents(
        world.manager.cache,
        world.manager.groups,
        stored=BlockStored,
        removed=BlockRemoved,
        cleared=AllBlocksCleared,
        kind=lambda spec: "full_attention",
    )
    _served(world, "a", list(range(40)), 1, cache_salt="me")
    world.manager.reset_prefix_cache()
    _served(world, "b", list(range(16)), 1)
    batch = KVEventBatch(ts=0.0, events=world.manager.take_events())
    read: Any = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVEventBatch)
    kinds = [type(event).__name__ for event in read.events]
    assert kinds == [*["BlockStored"] * (len(kinds) - 2), "AllBlocksCleared", "BlockStored"]
    assert read.events[0].extra_keys[0] == ("me",)
    assert read.events[-1].token_ids == list(range(16))


def test_mistakes_in_a_body_are_answered_as_vllm_answers_them() -> None:
    from fastapi import FastAPI
    from fastapi.testclient import TestClient
    from vllm.entrypoints.serve.exception_handling.register import init_exception_handler

    from headway.vllm.endpoint import Endpoint

    app = FastAPI()
    app.state.args = SimpleNamespace(log_error_stack=False)
    init_exception_handler(app)
    Endpoint().attach_router(app)
    client, url = TestClient(app), "/v1/headway/explain"
    invalid, no_prompt = "Bad Request", "BadRequestError"
    for body, kind in (
        ("{", invalid),
        ("3", invalid),
        ('{"prompt": "a", "temperature": "b"}', invalid),
        ("{}", no_prompt),
    ):
        answer = client.post(url, content=body, headers={"Content-Type": "application/json"})
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["code"]) == (400, kind, 400), error
        assert kind == no_prompt or "validation error" in error["message"]


def test_a_server_without_the_scheduler_is_known_by_its_configuration() -> None:
    from headway.vllm.endpoint import Endpoint
    from headway.vllm.live import board_of

    board = board_of(REGISTRY)
    for name, missing in (("headway.vllm.Scheduler", False), (None, True)):
        config = SimpleNamespace(scheduler_config=SimpleNamespace(scheduler_cls=name))
        asyncio.run(Endpoint().init_state(SimpleNamespace(vllm_config=config), None, None))
        assert ("does not run headway.vllm.Scheduler" in board.missing) is missing
    board.missing = ""


def test_the_routes_are_added_beside_vllms() -> None:
    from fastapi import FastAPI
    from vllm.plugins.endpoint_plugins.interface import EndpointPlugin

    from headway.vllm.endpoint import Endpoint

    app, plugin = FastAPI(), Endpoint()
    assert isinstance(plugin, EndpointPlugin)
    plugin.attach_router(app)
    paths = app.openapi()["paths"]
    assert paths["/v1/headway/explain"].keys() == {"post"}
    assert paths["/v1/headway/live"].keys() == {"get"}
