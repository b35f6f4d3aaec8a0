"""A client that goes away takes its request with it, whatever the request is doing."""

import json
import socket
import threading

import httpx
import pytest
from tests.server.fakes import Running, running

from headway.engine import EngineConfig, StepWork


def send(server: Running, body: dict[str, object]) -> socket.socket:
    """Send a request and return the connection, of which nobody has read yet."""
    content = json.dumps(body).encode()
    host, port = httpx.URL(server.url).host, httpx.URL(server.url).port
    assert port is not None
    connection = socket.create_connection((host, port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


class Gate:
    """Lets the fake device do a step at a time, or all of them."""

    def __init__(self, server: Running) -> None:
        self._steps = threading.Semaphore(0)
        self._open = False
        server.device.before_step = self._pass

    def _pass(self, work: StepWork) -> None:
        if not self._open:
            assert self._steps.acquire(timeout=60)

    def step(self, count: int = 1) -> None:
        self._steps.release(count)

    def open(self) -> None:
        self._open = True
        self._steps.release(1000)


def test_a_stream_that_nobody_reads_any_more_frees_its_blocks():
    with running() as server:
        gate = Gate(server)
        body = {"prompt": "Once upon a time", "max_tokens": 500, "stream": True, "ignore_eos": True}
        gate.step(6)
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            assert next(response.iter_lines()).startswith("data: ")
            assert server.open_requests
        with server.engine._wakeup:
            assert server.engine._wakeup.wait_for(lambda: server.engine._inbox or not server.open_requests, 60)
        gate.step()  # the step that was under way when the client went
        server.wait_for_open(lambda count: count == 0)
        assert len(server.device.steps) < 20, "the answer was not computed to its end"
        gate.open()
        snapshot = server.engine.snapshot(timeout=60)
        assert snapshot.cache.leased == 0
        assert snapshot.counters.finished["abort"] == 1


@pytest.mark.parametrize("state", ["running", "queued"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_before_its_answer_begins(state: str, stream: bool, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "headway.server")
    config = EngineConfig(max_batched_tokens=64, max_running=1, max_model_len=600)
    with running(config=config) as server:
        gate = Gate(server)
        first: list[dict[str, object]] = []
        other = threading.Thread(target=lambda: first.append(server.complete("Other", max_tokens=20)))
        if state == "queued":
            other.start()
            server.wait_for_open(lambda count: count == 1)
        body = {"prompt": "Once upon a time", "max_tokens": 500, "stream": stream, "ignore_eos": True}
        before = server.open_requests
        with send(server, body):
            server.wait_for_open(lambda count: count == before + 1)
        gate.open()
        server.wait_for_open(lambda count: count == before)
        assert server.engine.snapshot(60).counters.finished["abort"] == 1
        assert "the client went away before its answer was complete" in caplog.messages
        if state == "queued":
            other.join(60)
            assert first[0]["choices"][0]["text"] == server.expected("Other", 20)  # type: ignore[index]
            assert server.engine.snapshot().counters.requests == 1, "it was never admitted"
        assert server.engine.snapshot().cache.leased == 0


def test_one_of_several_answers_does_not_outlive_the_others():
    with running() as server:
        gate = Gate(server)
        gate.step(3)
        body = {"prompt": "Once upon a time", "max_tokens": 500, "stream": True, "n": 4, "ignore_eos": True}
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())
        gate.open()
        server.wait_for_open(lambda count: count == 0)
        assert server.engine.snapshot().counters.finished["abort"] == 4


def test_shutdown_lets_a_running_stream_end():
    with running() as server:
        gate = Gate(server)
        gate.step(2)
        body = {"prompt": "Once upon a time", "max_tokens": 40, "stream": True, "temperature": 0, "ignore_eos": True}
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            first = next(lines)
            server.stop()
            gate.open()
            rest = [line for line in lines if line]
    assert first.startswith("data: ")
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest[-2]
