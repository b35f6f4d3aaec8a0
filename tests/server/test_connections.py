"""Clients that keep a server waiting, its end while requests run, and the name of each request."""

import asyncio
import json
import logging
import socket
import threading
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from tests.server.fakes import Running, running, served
from tests.server.test_disconnect import Gate

from headway.engine import EngineConfig
from headway.engine.tier_options import TierOptions
from headway.server.connections import DrainingServer, make_server
from headway.server.logs import request_id, set_up_logging

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: here\r\n"


def connect(server: Running, *parts: bytes) -> socket.socket:
    url = httpx.URL(server.url)
    assert url.port is not None
    connection = socket.create_connection((url.host, url.port), timeout=60)
    for part in parts:
        connection.sendall(part)
    return connection


def read_all(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    data = b""
    while part := connection.recv(65536):
        data += part
    return data


def test_requests_that_do_not_arrive_in_time_are_given_up():
    """No head, a part of one, a part of the one after an answer; and a head whose body does not come (408)."""
    with running(client_timeout=0.5) as server:
        whole = b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n"
        silent, half, second = connect(server), connect(server, HEAD[:20]), connect(server, whole)
        bodiless = connect(server, HEAD, b'Content-Length: 100\r\n\r\n{"prompt"')
        with silent, half, second, bodiless:
            assert second.recv(12, socket.MSG_PEEK) == b"HTTP/1.1 200"
            second.sendall(HEAD[:20])
            assert read_all(silent) == read_all(half) == b""
            assert b'{"status":"ok","not_finite":0}' in read_all(second)
            head, _, body = read_all(bodiless).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 408 ")
            assert json.loads(body)["error"]["code"] == "request_timeout"
        assert server.complete("Hello", max_tokens=2)["choices"], "others are not disturbed"


def test_a_client_that_takes_nothing_of_its_answer_is_left():
    """It is gone for the application, which then ends its work."""
    gone = threading.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await receive()
        for _ in range(64):
            await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
        assert (await receive())["type"] == "http.disconnect"
        gone.set()

    class NoEngine:
        config = EngineConfig()

        def drain(self, timeout: float) -> bool:
            return True

        def close(self, timeout: float) -> bool:
            return True

    engine: Any = NoEngine()
    server = make_server(app, engine, patience=0.3)
    server.config.lifespan = "off"
    with served(server) as url, socket.create_connection((httpx.URL(url).host, httpx.URL(url).port or 0)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        assert gone.wait(60)


STREAM = {"prompt": "Once upon a time", "max_tokens": 40, "stream": True, "temperature": 0, "ignore_eos": True}


def test_while_requests_run_the_port_of_a_stopping_server_is_open_and_says_so():
    with running(grace=60) as server:
        gate = Gate(server)
        gate.step(2)
        with server.http.stream("POST", "/v1/completions", json=STREAM) as response:
            lines = response.iter_lines()
            next(lines)
            server.stop()
            with server.engine._wakeup:
                assert server.engine._wakeup.wait_for(lambda: not server.engine._accepting, 60)
            with httpx.Client(base_url=server.url, timeout=60) as other:
                health = other.get("/health")
                refused = other.post("/v1/completions", json={"prompt": "Hello"})
            assert (health.status_code, health.json()["status"]) == (503, "unavailable")
            assert "it finishes what it has begun" in health.json()["reason"]
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            gate.open()
            assert [line for line in lines if line][-1] == "data: [DONE]"


def test_a_stream_that_outlasts_the_grace_ends_with_an_error(caplog: pytest.LogCaptureFixture):
    with running(grace=0) as server:
        gate = Gate(server)
        gate.step(2)
        with server.http.stream("POST", "/v1/completions", json=STREAM) as response:
            lines = response.iter_lines()
            next(lines)
            server.stop()
            with server.engine._wakeup:
                assert server.engine._wakeup.wait_for(lambda: server.engine._stopping, 60)
            gate.open()
            last = [line for line in lines if line][-1]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["type"] == "service_unavailable_error"
    assert error["message"] == "the server shut down before the answer was complete"
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]


def test_every_response_has_the_id_of_its_request():
    with running() as server:
        assert server.http.get("/health", headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
        made = {server.http.get("/nowhere").headers["x-request-id"] for _ in range(2)}
        assert len(made) == 2
        too_long = server.http.get("/health", headers={"X-Request-Id": "x" * 129}).headers["x-request-id"]
        assert len(too_long) == 32


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_line_of_the_log_names_its_request(form: str, capsys: pytest.CaptureFixture[str]):
    from rich.console import Console

    handlers, level = logging.root.handlers[:], logging.root.level
    set_up_logging("info", form, Console(stderr=True))
    token = request_id.set("abc-1")
    try:
        logging.getLogger("headway").warning("it %s", "failed", extra={"color_message": "red"})
        request_id.reset(token)
        logging.getLogger("headway").info("quiet")
    finally:
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
    first, second = capsys.readouterr().err.splitlines()
    if form == "text":
        assert first.endswith("WARNING it failed [abc-1]")
        assert second.endswith("INFO quiet")
        return
    said = json.loads(first)
    assert (said["level"], said["logger"], said["message"], said["request_id"]) == (
        "WARNING",
        "headway",
        "it failed",
        "abc-1",
    )
    assert said.keys() == {"timestamp", "level", "logger", "message", "request_id"}
    assert json.loads(second)["request_id"] is None


@pytest.mark.parametrize(("scheme", "status"), [("Bearer", 200), ("bearer", 200), ("BEARER", 200), ("Basic", 401)])
def test_the_scheme_of_a_key_is_written_in_any_case(scheme: str, status: int):
    with running(api_key="sécret") as server:
        headers = {"Authorization": f"{scheme} sécret".encode()}
        assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == status


class Writing:
    """An engine that takes as long to end as its tiers may."""

    def __init__(self, grace: float) -> None:
        self.config = EngineConfig(tiers=TierOptions(disk="unused:1GB", tier_grace=grace))
        self.waits: list[float] = []

    def drain(self, timeout: float) -> bool:
        return True

    def close(self, timeout: float) -> bool:
        self.waits.append(timeout)
        return True


def test_tiers_have_all_their_grace_to_be_written(monkeypatch: pytest.MonkeyPatch):
    async def nothing(*_: object) -> None:
        pass

    monkeypatch.setattr(uvicorn.Server, "shutdown", nothing)
    engine = Writing(300.0)
    server = DrainingServer(uvicorn.Config(lambda: None), engine, grace=1.0)  # type: ignore[arg-type]
    asyncio.run(server.shutdown())
    assert engine.waits[0] > 300
    server.force_exit = True
    asyncio.run(server.shutdown())
    assert engine.waits[1] == 0
