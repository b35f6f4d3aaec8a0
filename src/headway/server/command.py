"""`headway serve`: from a command line to a server that answers."""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import resource
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from headway.engine import EngineConfig
from headway.errors import ConfigError, HeadwayError
from headway.option_records import option, with_records
from headway.progress import Pulse
from headway.runtime.sources import resolve_source
from headway.server.logs import LOG_FORMATS, LOG_LEVELS, set_up_logging
from headway.server.recorder import Recorder, check_recording
from headway.sizes import counted, format_bytes, parse_bytes

if TYPE_CHECKING:  # what imports torch is imported where it is used, after the cheap checks
    from headway.engine.build import BuiltEngine
    from headway.server.connections import DrainingServer
    from headway.server.kv_publisher import KvEventPublisher, KvEventSockets
    from headway.server.service import ServerOptions

__all__ = ["serve"]

logger = logging.getLogger(__name__)

_EXPLAIN = ("off", "own", "all")
"""What `--explain` may be."""

_ModelSource = Annotated[
    str | None, typer.Argument(help="A directory, a hub id, or nothing for the small built-in model.")
]
_BodyLimit = Annotated[str, option("Batches and limits", "Largest body of a request.")]

_WRITTEN = {
    "through": "when something is kept",
    "selective": "when something is used again",
    "back": "when memory gives it up",
}
_SERVER = "Server"


@dataclass(frozen=True)
class _ServerFlags:
    """Where and how the server listens."""

    host: Annotated[str, option(_SERVER, "Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1"
    port: Annotated[int, option(_SERVER, "Port to listen on; 0 for any that is free.", min=0, max=65535)] = 8000
    api_key: Annotated[
        list[str] | None,
        option(_SERVER, "Key that clients must send; give it again for more keys.", envvar="HEADWAY_API_KEY"),
    ] = None
    salt_by_key: Annotated[
        bool, option(_SERVER, "Requests share prefixes only with those of the same key.", "--salt-by-key")
    ] = False
    explain: Annotated[
        str,
        option(
            _SERVER,
            "To whom it is told in full why no more of a prompt was reused: off (nobody is told), own (to prompts with "
            "a salt; others learn what they resumed at), all (all clients trust each other).",
        ),
    ] = "own"
    strict: Annotated[
        bool,
        option(_SERVER, "Refuse requests with fields that are not known; else they are ignored, and told.", "--strict"),
    ] = False
    cors_origin: Annotated[
        list[str] | None,
        option(
            _SERVER,
            "Origin of web pages that may call the server from a browser, such as http://localhost:3000, or * for all; "
            "give it again for more. By default, none may.",
        ),
    ] = None
    served_model_name: Annotated[str | None, option(_SERVER, "Name of the model in the API.")] = None
    restore_answers: Annotated[
        bool, option(_SERVER, "Where a prompt sends an answer back as text, use the token ids that it was given in.")
    ] = True
    grace: Annotated[
        int,
        option(
            _SERVER,
            "Seconds that running requests get at shutdown. Until then the port stays open and /health answers 503.",
            min=0,
        ),
    ] = 30
    client_timeout: Annotated[
        float,
        option(
            _SERVER,
            "Seconds that a client may take to send its whole request, or to take the next piece of its answer.",
            min=0.1,
        ),
    ] = 60.0
    kv_events_config: Annotated[
        str | None,
        option(
            _SERVER,
            'Tell routers what is cached, over ZeroMQ, as vLLM does: JSON such as {"enable_kv_cache_events": true, '
            '"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"} (docs/kv-events.md).',
        ),
    ] = None
    log_level: Annotated[str, option(_SERVER, f"{', '.join(LOG_LEVELS[:-1])} or {LOG_LEVELS[-1]}.")] = "info"
    log_format: Annotated[
        str, option(_SERVER, f"{' or '.join(LOG_FORMATS)}: one object per line, with the id of its request.")
    ] = "text"

    def __post_init__(self) -> None:
        """Refuse what cannot work, before the model is loaded.

        Raises:
            ConfigError: The message names the option and what to change.
        """
        if self.explain not in _EXPLAIN:
            raise ConfigError(f"--explain {self.explain!r} is not one of {', '.join(_EXPLAIN)}")
        if self.salt_by_key and not self.api_key:
            raise ConfigError("--salt-by-key keeps the prompts of each key apart, and there is no key: add --api-key")
        for origin in self.cors_origin or ():
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#]+", origin):
                raise ConfigError(
                    f"--cors-origin {origin!r} is no origin: it has a scheme, a host, a port if need be, and no path, "
                    "such as http://localhost:3000; or give *"
                )
        if not all(self.api_key or ()):
            raise ConfigError("--api-key is empty: give a key, or leave it out to let everybody in")


_RECORD = "Recording"


@dataclass(frozen=True)
class _RecordFlags:
    """A recording of the traffic."""

    record: Annotated[
        Path | None, option(_RECORD, "Record the traffic to this new file, for `headway replay`.", "--record")
    ] = None
    record_form: Annotated[
        str | None,
        option(
            _RECORD,
            "hashes (salted: who shares which prefix, not what it says; the default) or tokens (everything said).",
        ),
    ] = None

    @property
    def form(self) -> str:
        """The form, for a recording.

        Raises:
            ConfigError: A form is asked for and no recording.
        """
        if self.record is None and self.record_form is not None:
            raise ConfigError("--record-form says how to record, and nothing is recorded: add --record FILE")
        return self.record_form or "hashes"


_EXAMPLE = (
    '{"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0, "cache_salt": "me", '
    '"headway": {"explain": true}}'
)


@with_records
def serve(
    server: _ServerFlags,
    config: EngineConfig,
    recording: _RecordFlags,
    model: _ModelSource = None,
    max_body: _BodyLimit = "16MiB",
) -> None:
    """Serve a model over the APIs of OpenAI and Anthropic, reusing all that it has computed.

    Without a MODEL, the small one that comes with Headway is served: nothing is downloaded. The first lines say how
    much the cache holds, from how many tokens on a prefix is reused, and how to call the server. Ctrl-C or SIGTERM
    ends it: running requests are finished first.
    """
    body_limit = parse_bytes(max_body, "--max-body")
    check_recording(recording.record, recording.form)  # before the model is loaded
    if server.salt_by_key and recording.record is not None and recording.form == "tokens":
        raise ConfigError("--record-form tokens leaves out salted prompts, all with --salt-by-key: record hashes")
    console = Console(stderr=True, quiet=server.log_format == "json")
    set_up_logging(server.log_level, server.log_format, console)
    listener = _bind(server.host, server.port)  # before the model is loaded: that may take minutes
    _raise_descriptor_limit()
    signal.signal(signal.SIGTERM, _leave)  # until the server takes it: ranks that are loading are ended
    with listener, contextlib.ExitStack() as ends:
        sockets = _kv_event_sockets(server, config, ends)
        built = _build(model, config, console, hints=server.log_level == "debug")
        name = server.served_model_name or built.name
        recorder = None if recording.record is None else Recorder(recording.record, recording.form, name)
        options = _server_options(name, server, body_limit, recorder, _publisher(built, sockets, ends))
        _announce(console, built, options, listener)
        _run(built, options, listener, server)


def _build(model: str | None, config: EngineConfig, console: Console, *, hints: bool) -> BuiltEngine:
    """The engine; a model or tiers that are not there are told before torch is imported, which takes seconds."""
    resolve_source(model)
    config.tiers.require()
    console.print("starting ...", highlight=False)

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
        if console.quiet:
            logger.info("%s", line.removesuffix(" ..."))

    with Pulse(say, detail=lambda: f"; this process has taken {format_bytes(_most_memory())}") as pulse:
        from headway.engine.build import build_engine

        if config.device == "cpu" and not hints:  # at faster kernels, for GPUs; importing transformers resets it
            logging.getLogger("transformers").setLevel(logging.ERROR)

        def progress(text: str) -> None:
            say(f"{text} ...")
            pulse.begin(text)

        return build_engine(model, config, progress)


def _most_memory() -> int:
    """Most bytes that this process has had in memory."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _kv_event_sockets(flags: _ServerFlags, config: EngineConfig, ends: contextlib.ExitStack) -> KvEventSockets | None:
    """What KV events are published at until `ends`, open before the model is loaded; None if none are.

    Raises:
        ConfigError: Options that cannot work, or an address that is taken.
    """
    from headway.server.kv_events import read_kv_events_config

    wanted = read_kv_events_config(flags.kv_events_config)
    if wanted is None:
        return None
    if not config.prefix_reuse:
        raise ConfigError(
            "--no-prefix-reuse keeps nothing that --kv-events-config could tell of: leave out one of them"
        )
    from headway.server.kv_publisher import KvEventSockets

    sockets = KvEventSockets(wanted)
    ends.callback(sockets.close)
    return sockets


def _publisher(
    built: BuiltEngine, sockets: KvEventSockets | None, ends: contextlib.ExitStack
) -> KvEventPublisher | None:
    from headway.server.kv_publisher import KvEventPublisher

    if sockets is None:
        return None
    publisher = KvEventPublisher(built.engine.cache, sockets, built.engine.config.block_tokens)
    ends.callback(publisher.close)
    return publisher


def _server_options(
    name: str,
    flags: _ServerFlags,
    body_limit: int,
    recorder: Recorder | None,
    kv_events: KvEventPublisher | None,
) -> ServerOptions:
    from headway.server.service import ServerOptions

    keys = tuple(flags.api_key or ())
    return ServerOptions(
        name,
        keys,
        body_limit,
        recorder,
        flags.explain,
        flags.salt_by_key,
        flags.restore_answers,
        client_timeout=flags.client_timeout,
        strict=flags.strict,
        kv_events=kv_events,
        cors_origins=tuple(flags.cors_origin or ()),
    )


def _raise_descriptor_limit() -> None:
    """Let this process have as many connections as the system allows: often 1,024 descriptors is only the default."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if most == resource.RLIM_INFINITY else min(most, 65536)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not listening yet.

    Raises:
        ConfigError: The port is taken, or there is no such address.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"there is no address {host!r}: {error.strerror}") from error
    family, kind, _, _, address = found[0]
    listener = socket.socket(family, kind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} of {host} is in use: choose another one with --port") from error
        raise ConfigError(f"cannot listen on port {port} of {host}: {error.strerror}") from error
    return listener


def _announce(console: Console, built: BuiltEngine, options: ServerOptions, listener: socket.socket) -> None:
    """Say what the cache holds, how it is run, and how to call the server."""
    from headway.runtime.model.overview import Inspection

    config, engine = built.engine.config, built.engine
    Inspection(built.name, built.layout, engine.cache.geometry, built.capacity, config.checkpoint_alignment).show(
        console
    )
    if not config.prefix_reuse:
        console.print("  [bold yellow]prefix reuse is off[/]: every prompt is computed anew")
    console.print(f"  longest request: {engine.max_model_len:,} tokens of prompt and answer together")
    if options.recorder is not None:
        console.print(f"  recording to {options.recorder.path}")
    if options.kv_events is not None:
        console.print(f"  {options.kv_events.told()}", highlight=False, markup=False, soft_wrap=True)
    if built.drafts is not None:
        console.print(
            f"  drafts: {built.drafts.name}, up to {counted(built.drafts.most, 'token')}, judged by {config.draft_rule}"
        )
    if built.quality is not None:
        console.print(f"  {built.quality.told}", highlight=False, markup=False, soft_wrap=True)
    for line in _told_below(built):
        console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"  checkpoints at: {', '.join(config.placement)}")
    console.print(f"  eviction: {config.eviction}")
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    if console.quiet:
        logger.info("serving %s at http://%s:%d", options.model_name, shown, port)
    key = "" if not options.api_keys else " -H 'Authorization: Bearer KEY'"
    console.print("\nCall it, and call it again to see cached_tokens:\n")
    console.print(
        f"  curl -s http://{shown}:{port}/v1/completions{key} -H 'Content-Type: application/json' \\\n"
        f"    -d '{_EXAMPLE}'\n",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"Watch it in a browser: http://{shown}:{port}/\n", markup=False, highlight=False, soft_wrap=True)


def _told_below(built: BuiltEngine) -> Iterator[str]:
    """What lies below the cache's memory, a line each."""
    lower = built.engine.snapshot().lower
    if lower is None:
        return
    if lower.host is not None:
        size = lower.host.blocks * built.engine.cache.geometry.block_bytes
        ratio = lower.host.blocks / built.engine.cache.config.blocks
        yield f"host memory: {format_bytes(size)} per rank, {ratio:.1f} times what the device has"
    for tier in () if lower.objects is None else lower.objects.tiers:
        limit = "" if tier.capacity is None else format_bytes(tier.capacity)
        if tier.shared:
            holds = f"at most {limit} of what is written from now on" if limit else "as much as the store takes"
        else:
            holds = f"{limit}, {counted(tier.checkpoints, 'checkpoint')} in {format_bytes(tier.used_bytes)} found"
        yield f"{tier.name}: {holds}; written {_WRITTEN[built.engine.config.tiers.tier_write]}"


def _run(built: BuiltEngine, options: ServerOptions, listener: socket.socket, flags: _ServerFlags) -> None:
    """Serve until a signal says otherwise.

    Raises:
        HeadwayError: The server could not start.
    """
    from headway.server.app import create_app
    from headway.server.connections import make_server, notice_lost_peers

    notice_lost_peers(listener, flags.client_timeout)
    app = create_app(built.engine.start(), built.tokenizer, options)
    server = make_server(app, built.engine, patience=flags.client_timeout, grace=flags.grace, log_level=flags.log_level)
    # uvicorn raises the signal again when it has shut down; that must not end this process with a failure.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    threading.Thread(target=_stop_with, args=(built, server), name="headway-watch", daemon=True).start()
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:
        pass
    finally:
        built.engine.close(timeout=10.0)  # it has been closed already, unless the server did not start or was killed
    if not server.started:
        raise HeadwayError("the server could not start; the lines above say why")
    if built.engine.failure is not None:
        raise HeadwayError(f"the engine has failed, and the server with it: {built.engine.failure}")


def _leave(number: int, frame: object) -> None:
    """End this process from inside, so that what it has started and written is cleared away."""
    raise SystemExit(128 + number)


def _stop_with(built: BuiltEngine, server: DrainingServer) -> None:
    """End the server when the engine has ended: nothing can be answered any more, and a supervisor should know."""
    built.engine.join()
    server.should_exit = True
