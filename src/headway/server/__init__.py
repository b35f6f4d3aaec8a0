"""The HTTP server, for clients of OpenAI and Anthropic. `headway.server.command` is `headway serve`.

Its names are imported when they are asked for: a command that fails for a cheap reason must not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.server.app import create_app
    from headway.server.service import ServerOptions

__all__ = ["ServerOptions", "create_app"]

_HOMES = {
    "ServerOptions": "headway.server.service",
    "create_app": "headway.server.app",
}
"""Every public name, and the module that it is imported from when it is first asked for."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
