"""What a user means by a model: a directory, a hub id, or the small model that comes with Headway.

It imports neither torch nor transformers, which take seconds: a mistyped path is told at once.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from headway.errors import ModelError

__all__ = ["BUILTIN", "resolve_source"]

BUILTIN = "builtin"
"""Name of the model that comes with Headway."""


def resolve_source(source: str | None) -> tuple[str, str]:
    """Find out what a user means by a model.

    Returns:
        The model's name, and the directory or hub id to load.

    Raises:
        ModelError: A path that is not a model, or the built-in model is not part of this installation.
    """
    if source is None or source == BUILTIN:
        path = Path(str(files("headway"))) / "models" / BUILTIN
        if not (path / "config.json").is_file():
            raise ModelError("this installation has no built-in model: name one, as a directory or a hub id")
        return f"headway-{BUILTIN}", str(path)
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{source!r} is a directory without a config.json: give one in Hugging Face form")
        return path.resolve().name, str(path)
    if path.exists():
        raise ModelError(f"{source!r} is a file: give the directory that holds the model's config.json")
    looks_local = source.startswith((".", "/", "~")) or source.count("/") > 1
    if looks_local:
        raise ModelError(f"there is no directory {source!r}: name one, a hub id, or nothing for the built-in model")
    return source, source
