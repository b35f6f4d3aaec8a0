"""KV events: what vLLM would say of its own blocks, from what the cache says of prefixes, for routers that read them.

One group is told of, the first one of full attention: its blocks have one size, and every prefix of the cache that is
kept is kept in all such groups. Windows and states are not told: readers that index them see blocks where no request
can start, and those that do not drop them.

A block is named by a hash of all tokens up to its end, so a removal needs no memory of what was stored. The hashes have
a key of this process, as vLLM's have by default: to readers they are names of blocks, and they hash tokens themselves.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.cache import Event, PrefixCache, ResidentGrown, ResidentShrunk
from headway.errors import ConfigError
from headway.vllm.groups import Group, Groups

__all__ = ["KvEvents"]

_MEDIUM = "GPU"
_NAMES_KEPT = 65_536


class KvEvents:
    """Hears the cache's events and makes vLLM's of them.

    What cannot be told is left out: from the first image of a prompt on, and prompts given as embeddings. Then a reader
    expects less than there is, never more.
    """

    def __init__(
        self,
        cache: PrefixCache,
        groups: Groups,
        *,
        stored: Callable[..., Any],
        removed: Callable[..., Any],
        cleared: Callable[[], Any],
        kind: Callable[[Any], str],
    ) -> None:
        """Listen to `cache`.

        Args:
            cache: The cache, still empty.
            groups: vLLM's groups.
            stored: Makes a `BlockStored`.
            removed: Makes a `BlockRemoved`.
            cleared: Makes an `AllBlocksCleared`.
            kind: The kind of a spec, as readers know it.

        Raises:
            ConfigError: The model has no full attention, so there are no blocks to tell of.
        """
        self._group = _told(groups)
        self._stored, self._removed, self._cleared = stored, removed, cleared
        self._kind = kind(self._group.spec)
        self._key = secrets.token_bytes(32)
        self._names: dict[int, tuple[Any, str | None]] = {}
        self._events: list[Any] = []
        cache.subscribe(self._hear)

    def name(self, namespace: int, lora: Any, salt: str | None) -> None:
        """Requests of `namespace` have this LoRA request (or None) and this cache salt."""
        self._names.pop(namespace, None)
        self._names[namespace] = lora, salt
        if len(self._names) > _NAMES_KEPT:
            del self._names[next(iter(self._names))]

    def clear(self) -> None:
        """Everything was forgotten."""
        self._events.append(self._cleared())

    def take(self) -> list[Any]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def _hear(self, event: Event) -> None:
        if isinstance(event, ResidentGrown):
            self._store(event, event.start)
        elif isinstance(event, ResidentShrunk) and event.cause != "reset":  # a reset is told as a whole
            parent_and_hashes = self._hashes(event, event.keep)
            if parent_and_hashes:
                hashes = parent_and_hashes[1:]
                self._events.append(self._removed(block_hashes=hashes, medium=_MEDIUM, group_idx=self._group.index))

    def _store(self, event: ResidentGrown, start: int) -> None:
        hashes = self._hashes(event, start)
        if not hashes or event.namespace not in self._names:
            return
        lora, salt = self._names[event.namespace]
        span, first = self._group.span, start // self._group.span
        adapter = () if lora is None else (lora.lora_name,)
        keys: list[tuple[Any, ...] | None] = [adapter or None] * (len(hashes) - 1)
        if first == 0 and salt:  # as in vLLM, the first block carries the salt
            keys[0] = (*adapter, salt)
        self._events.append(
            self._stored(
                block_hashes=hashes[1:],
                parent_block_hash=hashes[0] if first else None,
                token_ids=event.prefix[first * span : (first + len(hashes) - 1) * span].tolist(),
                block_size=span,
                lora_id=None if lora is None else lora.lora_int_id,
                lora_name=None if lora is None else lora.lora_name,
                medium=_MEDIUM,
                extra_keys=keys,
                group_idx=self._group.index,
                kv_cache_spec_kind=self._kind,
            )
        )

    def _hashes(self, event: ResidentGrown | ResidentShrunk, start: int) -> list[int]:
        """Hashes of the whole blocks that end behind `start` and not behind the event's position.

        Returns:
            The hash of the block before them, and theirs; empty if there are none that can be told.
        """
        span, tokens = self._group.span, event.prefix
        first, last = start // span, event.position // span
        if first == last:
            return []
        last = min(last, _plain(tokens[: last * span]) // span)
        if first >= last:
            return []
        state = hashlib.blake2b(event.namespace.to_bytes(8, "little"), digest_size=8, key=self._key)
        state.update(tokens[: first * span].tobytes())
        hashes = [_number(state)]
        for block in range(first, last):
            state.update(tokens[block * span : (block + 1) * span].tobytes())
            hashes.append(_number(state))
        return hashes


def _number(state: Any) -> int:
    return int.from_bytes(state.digest(), "little")


def _plain(tokens: NDArray[np.int32]) -> int:
    """How many tokens stand before the first symbol of an image."""
    symbols = tokens < 0
    return int(symbols.argmax()) if symbols.any() else len(tokens)


def _told(groups: Groups) -> Group:
    for group in groups.groups:
        if group.kind == "full":
            return group
    kinds = ", ".join(sorted({group.kind for group in groups.groups}))
    raise ConfigError(
        "KV events tell of blocks of full attention, and this model has none (its KV cache groups: "
        f"{kinds}): leave --kv-events-config out"
    )
