"""What a user means by a model: a directory, a hub id, or the built-in model.

The built-in model is a distribution of its own, `headway-builtin-model`: who embeds the cache does not need its 9 MB.

It imports neither torch nor transformers, which take seconds: a mistyped path is told at once.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from headway.errors import ModelError

__all__ = ["BUILTIN", "resolve_source"]

BUILTIN = "builtin"
"""Name of the built-in model."""

PACKAGE = "headway_builtin_model"
INSTALL = "`pip install headway-builtin-model`, or in a checkout of Headway `pip install ./packages/builtin-model`"


def resolve_source(source: str | None) -> tuple[str, str]:
    """Find out what a user means by a model.

    Returns:
        The model's name, and the directory or hub id to load.

    Raises:
        ModelError: A path that is not a model, or the built-in model is not installed.
    """
    if source is None or source == BUILTIN:
        package = find_spec(PACKAGE)
        if package is None or package.origin is None:
            raise ModelError(f"the built-in model is not installed: {INSTALL}. Or name a directory or a hub id")
        return f"headway-{BUILTIN}", str(Path(package.origin).parent)
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
