"""KV events on the wire: the options in vLLM's form, and what a batch says, as vLLM's readers take it.

A reader knows three events: blocks stored, blocks removed, all cleared. An event of another type costs it the whole
batch, an unknown field of a known one nothing. So what else there is to say rides along: checkpoints, in the field
`checkpoints` of the event whose blocks they make usable, or of a removal of no blocks where there is none.

There is one group, of full attention, whatever else the model has: readers drop other kinds, and what is told is what
can be used. The salt is a field of its own, since readers that know it look it up there, and also a key of the first
block, as in vLLM, for those that do not.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from headway.errors import ConfigError
from headway.tell.usable_blocks import Change, ResumePoint

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "EventBatch",
    "KvEventsConfig",
    "WireEvent",
    "encode_batch",
    "read_kv_events_config",
    "wire_events",
]

_MEDIUM, _GROUP, _KIND = "GPU", 0, "full_attention"
_OPTION = "--kv-events-config"
_LIKE_AN_IMAGE = re.compile(r"[0-9a-fA-F]{64}")
"""Readers take such a key of a block for the digest of an image."""


class KvEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options, in the form of vLLM's `--kv-events-config`, and two of ours.

    Attributes:
        enable_kv_cache_events: Publish.
        publisher: "zmq", or "null" for nothing; None means "zmq".
        endpoint: Where batches are published. Bound where it has a `*` or `::`, or is a path; else connected to.
        replay_endpoint: Where readers ask for what they have missed; None for nowhere.
        buffer_steps: Latest batches that can be asked for one by one; beyond them a reader gets all that there is.
        hwm: Batches that may wait for a reader that is slow; it misses further ones.
        max_queue_size: Events of the cache that may wait to be published.
        topic: First frame of every message.
        block_size: Tokens of a block; None for `--block-tokens`.
        heartbeat_seconds: An empty batch is published after so long without another.
    """

    enable_kv_cache_events: bool | msgspec.UnsetType = msgspec.UNSET
    publisher: Literal["zmq", "null"] | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    block_size: int | None = None
    heartbeat_seconds: float = 1.0


def read_kv_events_config(text: str | None) -> KvEventsConfig | None:
    """Read the option.

    Returns:
        What it says, or None where nothing is to be published.

    Raises:
        ConfigError: It is no JSON of this form, or cannot work; the message says what to change.
    """
    if text is None:
        return None
    try:
        config = msgspec.json.decode(text, type=KvEventsConfig)
    except msgspec.DecodeError as error:
        known = ", ".join(KvEventsConfig.__struct_fields__)
        raise ConfigError(f"{_OPTION}: {error}; it is a JSON object with some of {known}") from error
    if config.enable_kv_cache_events is msgspec.UNSET:
        raise ConfigError(f'{_OPTION} publishes nothing without "enable_kv_cache_events": true: add it')
    _check(config)
    return config if config.enable_kv_cache_events and config.publisher != "null" else None


def _check(config: KvEventsConfig) -> None:
    for name, least in (("buffer_steps", 1), ("hwm", 1), ("max_queue_size", 1), ("block_size", 1)):
        value = getattr(config, name)
        if value is not None and not least <= value < 2**31:
            raise ConfigError(f"{_OPTION}: {name} is {value}, it must be at least {least}")
    if not 0.01 <= config.heartbeat_seconds <= 3600:
        raise ConfigError(f"{_OPTION}: heartbeat_seconds is {config.heartbeat_seconds}, it must be 0.01 to 3600")
    for name in ("endpoint", "replay_endpoint"):
        value = getattr(config, name)
        if value is not None and not re.fullmatch(r"tcp://.+:(\d{1,5}|\*)|ipc://.+", value):
            raise ConfigError(f"{_OPTION}: {name} is {value!r}: use tcp://*:PORT, tcp://HOST:PORT or ipc://PATH")
    if config.replay_endpoint == config.endpoint and not config.endpoint.endswith((":0", ":*")):
        raise ConfigError(f"{_OPTION}: endpoint and replay_endpoint are both {config.endpoint}: they are two sockets")


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks that a request can use now, one after another behind `parent_block_hash`."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    cache_salt: str | None = None
    checkpoints: list[dict[str, Any]] | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks that no request can use any more; none of them where only checkpoints are told of."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None
    checkpoints: list[dict[str, Any]] | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """Nothing that was told before holds any more."""


WireEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One message: when (seconds), what, and whose."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


_ENCODER = msgspec.msgpack.Encoder()


def encode_batch(events: Sequence[WireEvent]) -> bytes:
    """A batch of this moment."""
    return _ENCODER.encode(EventBatch(time.time(), list(events), 0))


def wire_events(changes: Iterable[Change], block_size: int) -> list[WireEvent]:
    """The events that say what has changed, in order. The space of a change is its salt."""
    events: list[WireEvent] = []
    for change in changes:
        told = _checkpoint(change)
        if change.names:
            events.append(_stored(change, block_size, told))
        elif change.removed:
            events.append(BlockRemoved(list(change.removed), _MEDIUM, _GROUP, told))
        elif events and isinstance(events[-1], BlockRemoved) and not events[-1].block_hashes:
            events[-1].checkpoints = (events[-1].checkpoints or []) + (told or [])
        else:
            events.append(BlockRemoved([], _MEDIUM, _GROUP, told))
    return events


def _stored(change: Change, block_size: int, told: list[dict[str, Any]] | None) -> BlockStored:
    assert change.tokens is not None
    salt, keys = str(change.space), None
    if salt and change.parent is None and not _LIKE_AN_IMAGE.fullmatch(salt):
        keys = [[salt], *[None] * (len(change.names) - 1)]
    return BlockStored(
        block_hashes=list(change.names),
        parent_block_hash=change.parent,
        token_ids=change.tokens.tolist(),
        block_size=block_size,
        lora_id=None,
        medium=_MEDIUM,
        lora_name=None,
        extra_keys=keys,
        group_idx=_GROUP,
        kv_cache_spec_kind=_KIND,
        cache_salt=salt or None,
        checkpoints=told,
    )


def _checkpoint(change: Change) -> list[dict[str, Any]] | None:
    """What the field `checkpoints` says of a change."""
    if change.gone is not None:
        return [{"id": change.gone[0], "removed": change.gone[1]}]
    return None if change.point is None else [_described(change.point, str(change.space))]


def _described(point: ResumePoint, salt: str) -> dict[str, Any]:
    told = {
        "id": point.name,
        "position": point.position,
        "first": point.first,
        "kind": point.kind,
        "block": point.block,
        "tail": list(point.tail),
    }
    return told | {"cache_salt": salt} if salt else told
