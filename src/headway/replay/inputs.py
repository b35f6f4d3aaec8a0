"""From a user's words to a trace: what every command that replays one takes alike."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headway.errors import ConfigError, TraceError
from headway.replay.generate import generate
from headway.replay.readers import read_trace
from headway.replay.trace import Trace

__all__ = ["EXAMPLE_MODEL", "EXAMPLE_REQUESTS", "TraceChoice", "load_trace", "require_trace"]

EXAMPLE_MODEL = "kimi-linear"
"""Model of a command without a trace and a model."""
EXAMPLE_REQUESTS = 3000
"""Requests of a generated trace, unless somebody says otherwise."""


@dataclass(frozen=True)
class TraceChoice:
    """How a user names a trace.

    Attributes:
        path: File or folder; None: a generated one.
        format: A name of `FORMATS`, or "auto".
        workload: What to generate.
        seed: Seed of the generated one.
        limit: Requests; None: all, or 3,000 generated ones.
        block_tokens: Tokens in a block, where they differ from the format's.
        tokenizer: For chat logs.
    """

    path: Path | None
    format: str = "auto"
    workload: str = "mixed"
    seed: int = 0
    limit: int | None = None
    block_tokens: int | None = None
    tokenizer: str | None = None


def require_trace(path: Path | None) -> None:
    """Notice a mistyped trace before anything else is asked for.

    Raises:
        TraceError: There is no such file or folder.
    """
    if path is not None and not path.exists():
        raise TraceError(f"{path}: there is no such file or folder; without a trace, a generated one is replayed")


def load_trace(choice: TraceChoice) -> Trace:
    """Read or generate the trace.

    Raises:
        TraceError: A file that cannot be read as a trace.
        ConfigError: An unknown format or workload, a tokenizer that is missing, a limit below 1, or options that would
            do nothing.
    """
    if choice.limit is not None and choice.limit < 1:
        raise ConfigError(f"--limit {choice.limit}: give a number of requests, 1 or more")
    _refuse_idle_options(choice)
    if choice.path is None:
        requests = choice.limit or EXAMPLE_REQUESTS
        return generate(choice.workload, requests, seed=choice.seed, block_tokens=choice.block_tokens or 64)
    return read_trace(
        choice.path,
        format=choice.format,
        block_tokens=choice.block_tokens,
        tokenizer=choice.tokenizer,
        limit=choice.limit,
    )


def _refuse_idle_options(choice: TraceChoice) -> None:
    """Refuse what says how to generate a trace beside a trace, and how to read one where there is none."""
    usual = TraceChoice(None)
    generated, read = {"--workload": "workload", "--seed": "seed"}, {"--format": "format", "--tokenizer": "tokenizer"}
    names = read if choice.path is None else generated
    wrong = ", ".join(option for option, name in names.items() if getattr(choice, name) != getattr(usual, name))
    if wrong and choice.path is None:
        raise ConfigError(f"{wrong}: says how a trace is read, and none is given: name its file or folder")
    if wrong:
        raise ConfigError(f"{wrong}: is for a generated trace, and {choice.path} is replayed: leave it out")
