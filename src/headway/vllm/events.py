"""KV events: what vLLM would say of its own blocks, from what the cache says of prefixes, for routers that read them.

One group is told of, the first one of full attention: its blocks have one size, and every prefix of the cache that is
kept is kept in all such groups. Windows and states are not told: readers that index them see blocks where no request
can start, and those that do not drop them. Of attention what can be used is told (`headway.tell.usable_blocks`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headway.cache import CheckpointStored, Event, PrefixCache, ResidentGrown
from headway.errors import ConfigError
from headway.tell.usable_blocks import Change, UsableBlocks
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
        self._blocks = UsableBlocks(self._group.span, floats=not cache.geometry.tail_tables)
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
        self._blocks.clear()
        self._events.append(self._cleared())

    def take(self) -> list[Any]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def _hear(self, event: Event) -> None:
        if isinstance(event, CheckpointStored | ResidentGrown) and event.namespace not in self._names:
            return
        change = self._blocks.hear(event, event.namespace)
        if change is not None and change.names:
            self._events.append(self._store(change, *self._names[event.namespace]))
        if change is not None and change.removed:
            removed = list(change.removed)
            self._events.append(self._removed(block_hashes=removed, medium=_MEDIUM, group_idx=self._group.index))

    def _store(self, change: Change, lora: Any, salt: str | None) -> Any:
        assert change.tokens is not None
        adapter = () if lora is None else (lora.lora_name,)
        keys: list[tuple[Any, ...] | None] = [adapter or None] * len(change.names)
        if change.parent is None and salt:  # as in vLLM, the first block carries the salt
            keys[0] = (*adapter, salt)
        return self._stored(
            block_hashes=list(change.names),
            parent_block_hash=change.parent,
            token_ids=change.tokens.tolist(),
            block_size=self._group.span,
            lora_id=None if lora is None else lora.lora_int_id,
            lora_name=None if lora is None else lora.lora_name,
            medium=_MEDIUM,
            extra_keys=keys,
            group_idx=self._group.index,
            kv_cache_spec_kind=self._kind,
        )


def _told(groups: Groups) -> Group:
    for group in groups.groups:
        if group.kind == "full":
            return group
    kinds = ", ".join(sorted({group.kind for group in groups.groups}))
    raise ConfigError(
        "KV events tell of blocks of full attention, and this model has none (its KV cache groups: "
        f"{kinds}): leave --kv-events-config out"
    )
