"""The options of `headway serve` that are the server's own; the others are those of `EngineConfig`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from headway.option_records import option

__all__ = ["LOG_LEVELS", "BodyLimit", "ModelSource", "RecordFlags", "ServerFlags"]

LOG_LEVELS = ("debug", "info", "warning", "error")
"""What `--log-level` may be."""

ModelSource = Annotated[
    str | None, typer.Argument(help="A directory, a hub id, or nothing for the small built-in model.")
]
BodyLimit = Annotated[str, option("Batches and limits", "Largest body of a request.")]

_SERVER = "Server"


@dataclass(frozen=True)
class ServerFlags:
    """Where and how the server listens."""

    host: Annotated[str, option(_SERVER, "Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1"
    port: Annotated[int, option(_SERVER, "Port to listen on; 0 for any that is free.", min=0, max=65535)] = 8000
    api_key: Annotated[str | None, option(_SERVER, "Key that clients must send.", envvar="HEADWAY_API_KEY")] = None
    served_model_name: Annotated[str | None, option(_SERVER, "Name of the model in the API.")] = None
    grace: Annotated[int, option(_SERVER, "Seconds that running requests get at shutdown.", min=0)] = 30
    log_level: Annotated[str, option(_SERVER, f"{', '.join(LOG_LEVELS[:-1])} or {LOG_LEVELS[-1]}.")] = "info"


_RECORD = "Recording"


@dataclass(frozen=True)
class RecordFlags:
    """A recording of the traffic."""

    record: Annotated[
        Path | None, option(_RECORD, "Record the traffic to this new file, for `headway replay`.", "--record")
    ] = None
    record_form: Annotated[
        str,
        option(_RECORD, "hashes (salted: who shares which prefix, not what it says) or tokens (everything said)."),
    ] = "hashes"
