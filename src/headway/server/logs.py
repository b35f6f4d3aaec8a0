"""The log of the server: lines for people, or JSON for programs. Both name the request that a line is about."""

from __future__ import annotations

import logging
from contextvars import ContextVar

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter
from rich.console import Console
from rich.logging import RichHandler

from headway.errors import ConfigError

__all__ = ["LOG_FORMATS", "LOG_LEVELS", "request_id", "set_up_logging"]

LOG_LEVELS = ("debug", "info", "warning", "error")
"""What `--log-level` may be."""
LOG_FORMATS = ("text", "json")
"""What `--log-format` may be."""

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The name of the HTTP request that is being answered here; None outside of one."""


def set_up_logging(level: str, form: str, console: Console) -> None:
    """Send what is logged to stderr.

    Args:
        level: One of `LOG_LEVELS`.
        form: One of `LOG_FORMATS`.
        console: Who writes to a terminal; text elsewhere, and JSON everywhere, goes straight to stderr.

    Raises:
        ConfigError: Another level or form.
    """
    for name, given, known in (("level", level, LOG_LEVELS), ("format", form, LOG_FORMATS)):
        if given not in known:
            raise ConfigError(f"--log-{name} {given!r} is not one of {', '.join(known)}")
    handler: logging.Handler = logging.StreamHandler()
    if form == "json":
        fields = ["levelname", "name", "message", "request_id"]
        renamed = {"levelname": "level", "name": "logger"}
        left_out = [*RESERVED_ATTRS, "request", "color_message"]  # what lines of text are made of, ours and uvicorn's
        handler.setFormatter(JsonFormatter(fields, timestamp=True, rename_fields=renamed, reserved_attrs=left_out))
    elif console.is_terminal:
        handler = RichHandler(console=console, show_path=False)
        handler.setFormatter(logging.Formatter("%(message)s%(request)s", datefmt="%X"))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s%(request)s"))
    handler.addFilter(_name_request)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for chatty in ("httpx", "httpcore", "filelock"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def _name_request(record: logging.LogRecord) -> bool:
    record.request_id = name = request_id.get()
    record.request = "" if name is None else f" [{name}]"
    return True
