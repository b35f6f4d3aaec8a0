"""Every exception that Headway raises on purpose: one tree, with `HeadwayError` at its root.

The classes say who can mend it: whoever wrote a layout or an option (`ConfigError`), a scenario file
(`ScenarioError`), a trace (`TraceError`), a request (`RequestError`, `UnservableError`), whoever chose the model
(`ModelError`), or the caller of the cache (`LeaseError`). The message says how. Two things are no part of the tree:
running out of blocks, which is a result that a scheduler handles, and a fault of our own, which is an `assert`.

Additional fields are part of `args`, so that an exception survives the way from one process to another.
"""

__all__ = [
    "ConfigError",
    "HeadwayError",
    "LeaseError",
    "ModelError",
    "RequestError",
    "ScenarioError",
    "ThreadError",
    "TraceError",
    "UnservableError",
]


class HeadwayError(Exception):
    """The root: `except HeadwayError` catches whatever Headway raises on purpose."""


class ConfigError(HeadwayError, ValueError):
    """A layer spec, a parallel layout or an option that cannot work. The message says what to change."""


class ScenarioError(HeadwayError, ValueError):
    """A scenario file that cannot be read as one. The message names the scenario and the field."""


class TraceError(HeadwayError, ValueError):
    """A request trace that cannot be read as one. The message names the file, the line and the field."""


class ModelError(HeadwayError):
    """A model that cannot be loaded or cannot be served. The message names the model and the reason."""


class LeaseError(HeadwayError):
    """A lease used against its order of life, such as an `extend` after `finish`. Nothing has changed."""


class ThreadError(LeaseError):
    """A call from a second thread while one is under way. The second has changed nothing, the first goes on."""


class UnservableError(HeadwayError):
    """A request that could not run even with the whole pool to itself, refused before anything changes.

    Attributes:
        needed_blocks: blocks that the request needs at once.
        total_blocks: blocks that the pool has.
    """

    def __init__(self, message: str, needed_blocks: int, total_blocks: int) -> None:
        super().__init__(message, needed_blocks, total_blocks)
        self.needed_blocks = needed_blocks
        self.total_blocks = total_blocks

    def __str__(self) -> str:
        return str(self.args[0])


class RequestError(HeadwayError, ValueError):
    """A client's request that cannot be served as it stands.

    Attributes:
        param: the field of the request at fault, such as `messages[2].content`, or None if no single one is.
        code: a short name for programs, such as `context_length_exceeded`, or None.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param, code)
        self.param = param
        self.code = code

    def __str__(self) -> str:
        return str(self.args[0])
