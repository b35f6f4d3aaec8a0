"""A relay between a client and a server, on a loopback port, that keeps what each said.

Answers are passed on byte by byte as they come. Requests are too, but for one field: where `explain` is asked for, a
body gets `headway.explain`, so that the server says of each request why no more of it was reused.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "host", "date", "server"})
"""Headers of one connection, which are not passed on."""
_GENERATES = ("/chat/completions", "/completions", "/responses", "/messages")


@dataclass
class Exchange:
    """A request and its answer.

    Attributes:
        method: Its method.
        path: Its path, without query.
        body: What was sent, as JSON; empty if it was none.
        status: The answer's status.
        answer: The JSON of the answer, or of each event of a stream.
    """

    method: str
    path: str
    body: dict[str, Any]
    status: int = 0
    answer: list[dict[str, Any]] = field(default_factory=list)

    @property
    def generates(self) -> bool:
        """Whether it asks for an answer of the model."""
        return self.method == "POST" and self.path.endswith(_GENERATES) and self.status == 200

    @property
    def usage(self) -> dict[str, Any]:
        """Its counts of tokens, in whichever dialect."""
        found: dict[str, Any] = {}
        for said in self.answer:
            for holder in (said, said.get("response"), said.get("message")):
                found |= (holder.get("usage") or {}) if isinstance(holder, dict) else {}
        return found

    @property
    def cached_of_prompt(self) -> tuple[int, int]:
        """Tokens of the prompt that were reused, and all of them."""
        usage = self.usage
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
        if details is not None:
            return details.get("cached_tokens", 0), usage.get("prompt_tokens", usage.get("input_tokens", 0))
        read, made = (usage.get(f"cache_{name}_input_tokens") or 0 for name in ("read", "creation"))
        return read, read + made + usage.get("input_tokens", usage.get("prompt_tokens", 0))

    @property
    def report(self) -> dict[str, Any]:
        """What the server told of it beside the answer."""
        for said in reversed(self.answer):
            for holder in (said, said.get("response"), said.get("message")):
                if isinstance(holder, dict) and holder.get("headway"):
                    report: dict[str, Any] = holder["headway"]
                    return report
        return {}

    @property
    def turns(self) -> list[Any]:
        """The messages that were sent."""
        found = self.body.get("messages", self.body.get("input"))
        return found if isinstance(found, list) else []

    @property
    def fault(self) -> str:
        """What a refusal says."""
        error = self.answer[0].get("error") if self.answer else None
        return error.get("message", "") if isinstance(error, dict) else ""


def _read(data: bytes) -> list[dict[str, Any]]:
    """The JSON objects of an answer or of a stream's events."""
    lines = data.decode(errors="replace").splitlines()
    events = [line.removeprefix("data:").strip() for line in lines if line.startswith("data:")]
    found = []
    for text in events or ["".join(lines)]:
        try:
            said = json.loads(text)
        except ValueError:
            continue
        found += [said] if isinstance(said, dict) else []
    return found


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    port: int
    exchanges: list[Exchange]
    explain: bool
    open: set[http.client.HTTPConnection]

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        sent = _read(body)[0] if body[:1] == b"{" else {}
        exchange = Exchange(self.command, self.path.partition("?")[0], sent)
        self.exchanges.append(exchange)
        if self.explain and self.command == "POST" and exchange.path.endswith(_GENERATES):
            body = json.dumps(sent | {"headway": {"explain": True} | sent.get("headway", {})}).encode()
        upstream = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        self.open.add(upstream)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
        try:
            upstream.request(self.command, self.path, body or None, headers)
            answer = upstream.getresponse()
            exchange.status = answer.status
            exchange.answer = _read(self._answer(answer))
        finally:
            self.open.discard(upstream)
            upstream.close()

    def _answer(self, answer: http.client.HTTPResponse) -> bytes:
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in _HOP:
                self.send_header(name, value)
        if (length := answer.getheader("content-length")) is not None or self.command == "HEAD":
            data = answer.read()
            self.send_header("Content-Length", length or "0")
            self.end_headers()
            self.wfile.write(data)
            return data
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        whole = b""
        while part := answer.read1(65536):
            whole += part
            self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        self.wfile.write(b"0\r\n\r\n")
        return whole

    do_GET = do_POST = do_HEAD = do_DELETE = do_OPTIONS = _pass_on  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: what is said is kept."""


class _Relay(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: clients that end leave their connections."""


@contextmanager
def relaying(port: int, *, explain: bool) -> Iterator[tuple[int, list[Exchange]]]:
    """Relay to a server on a loopback `port`: the relay's own port, and what is said, as it comes."""
    exchanges: list[Exchange] = []
    bound = {"port": port, "exchanges": exchanges, "explain": explain, "open": set()}
    handler = type("_Bound", (_Handler,), bound)
    with _Relay(("127.0.0.1", 0), handler) as relay:
        thread = threading.Thread(target=relay.serve_forever)
        thread.start()
        try:
            yield relay.server_address[1], exchanges
        finally:
            relay.shutdown()
            thread.join()
            for upstream in list(handler.open):  # its client is gone
                if upstream.sock is not None:
                    upstream.sock.shutdown(socket.SHUT_RDWR)
