"""Which vLLM this package was written against."""

from __future__ import annotations

from importlib import import_module

from headway.errors import ConfigError

__all__ = ["VERSIONS", "check_version"]

VERSIONS = ("0.32", "0.33")
"""Releases of vLLM that work."""


def check_version() -> None:
    """Refuse a vLLM that this package was not written against.

    Raises:
        ConfigError: No vLLM, or another release; names those that work.
    """
    works = " and ".join(VERSIONS)
    try:
        version = str(import_module("vllm").__version__)
    except ImportError as error:
        raise ConfigError(f"headway.vllm needs vLLM ({works}) in the same environment: {error}") from error
    if version.lstrip("v").split("+")[0].rsplit(".", 1)[0] not in VERSIONS:
        raise ConfigError(f"headway.vllm works with vLLM {works}, and this is {version}: install one of these")
