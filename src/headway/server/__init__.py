"""The OpenAI-compatible HTTP server. `headway.server.command` is `headway serve`."""

from headway.server.app import create_app
from headway.server.service import ServerOptions

__all__ = ["ServerOptions", "create_app"]
