"""What lower tiers store: canonical objects, the records that name them, the keyed digests they are filed under.

An *object* is the bytes of one group of layers for the tokens [first, stop) of a path, whole: all heads, all layers,
all tokens, so that any parallel layout can use it. Groups that need the whole prefix are cut into *stretches* of
`ObjectLayout.stretch` tokens. A *stretch record* names the objects of one stretch, a *manifest* names what a
checkpoint needs besides: the rest of the prefix groups behind the last whole stretch, the tails of windows and
chunks, the states. Both name every object with its length and its xxh3-128, are written after all that they name, and
are read first.

Everything that changes bytes is in the digests: the format, the identity of the weights, the family of the layout,
the groups, the namespace (model, adapter, salt), and all tokens that an entry depends on. They are blake2b under a
key, and every part stands behind its length, so no adapter's name can equal somebody's salt. With a `lookahead` of L
an entry at t also depends on the L tokens behind it, so a digest for position p covers the tokens [0, p + L).

An object's name ends in the checksum of its content. So an object never changes: when two servers compute the same
stretch with different rounding, each record names the bytes that its writer verified, and no reader sees a mixture.

Names hold only digests. Records hold the tokens of their stretch as they are: to forget a prefix that ends inside a
stretch needs them, and comparing them makes a match exact instead of probable. They are no secret that the objects
beside them keep: entries can be inverted to tokens. Who may read a store may read what was said. (Rejected: digests
of every token, which cost four times the bytes and say the same to whoever has the key.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
import xxhash

from headway.tiers.store import Buffer, DamagedError

__all__ = [
    "ABOUT",
    "INDEX",
    "MANIFEST",
    "STRETCH",
    "About",
    "Manifest",
    "Namespace",
    "ObjectGroup",
    "ObjectLayout",
    "ObjectName",
    "PathDigests",
    "Reference",
    "Span",
    "Stretch",
    "about",
    "checksum",
    "manifest_digest",
    "namespace_folder",
    "object_name",
    "object_names",
    "open_manifest",
    "open_positions",
    "open_stretch",
    "parse_name",
    "record_name",
    "seal",
    "stretch_digest",
    "usable_tokens",
]

FORMAT = b"headway-tiers-1"
_DIGEST = 16
_MAGIC = b"HWT1"
_TOKEN = 4
ABOUT = "about"
STRETCH, MANIFEST, INDEX = "s", "m", "i"
"""How the names of the three kinds of records end."""

Namespace = tuple[str, str, str]
"""Model, adapter and salt, as `PrefixCache.namespace` takes them."""


class Span(NamedTuple):
    """Tokens [first, stop) of one group; a state has first == stop == its position."""

    group: str
    first: int
    stop: int


@dataclass(frozen=True)
class ObjectGroup:
    """A group of layers as its canonical objects hold it, before any sharding.

    Attributes:
        name: The group's name in the cache's geometry.
        kind: `prefix` for groups that need every entry, else what a position needs: a window, a chunk, a state.
        bytes: Bytes per token over all layers and heads; of a state, its bytes.
        window: Tokens that a query of a window sees, itself included; 0 for other kinds.
        chunk: Tokens of a chunk; 0 for other kinds.
    """

    name: str
    kind: Literal["prefix", "window", "chunk", "state"]
    bytes: int
    window: int = 0
    chunk: int = 0

    def length(self, first: int, stop: int) -> int:
        """Bytes of the object for [first, stop)."""
        return self.bytes if self.kind == "state" else self.bytes * (stop - first)

    def tail(self, position: int) -> int:
        """The first token that resuming at `position` needs of a window or a chunk; `position` for a state."""
        if self.kind == "window":
            return max(0, position - self.window + 1)
        return position // self.chunk * self.chunk if self.kind == "chunk" else position


@dataclass(frozen=True)
class ObjectLayout:
    """What a model stores in lower tiers. Servers with equal layouts and keys read each other's objects.

    Attributes:
        identity: Whatever identifies the weights, dtypes and quantisation; never empty.
        groups: The groups, in any order; the same order everywhere.
        lookahead: Later tokens that an entry also depends on, at most.
        stretch: Tokens per object of the prefix groups.
        family: `canonical`, or what else the bytes depend on (such as the sizes of ranks) where no canonical layout
            is certified.
        label: What people call this, for `headway tiers ls`. It is no part of any digest.
    """

    identity: bytes
    groups: tuple[ObjectGroup, ...]
    lookahead: int = 0
    stretch: int = 512
    family: str = "canonical"
    label: str = ""

    @cached_property
    def resumes_anywhere(self) -> bool:
        """Whether every end of a stretch can be resumed from, without a manifest: all groups need the whole prefix."""
        return all(group.kind == "prefix" for group in self.groups)

    def stretch_spans(self, number: int) -> list[Span]:
        """The objects of a stretch, counted from 0."""
        first = number * self.stretch
        return [Span(g.name, first, first + self.stretch) for g in self.groups if g.kind == "prefix"]

    def manifest_spans(self, position: int) -> list[Span]:
        """What a checkpoint needs besides whole stretches; no empty ones."""
        rest = position // self.stretch * self.stretch
        spans = [Span(g.name, rest if g.kind == "prefix" else g.tail(position), position) for g in self.groups]
        kinds = {g.name: g.kind for g in self.groups}
        return [span for span in spans if span.first < span.stop or kinds[span.group] == "state"]

    def length(self, span: Span) -> int:
        """Bytes of the object for a span."""
        return next(g for g in self.groups if g.name == span.group).length(span.first, span.stop)

    def digest(self, key: bytes) -> bytes:
        """What this layout is filed under: 16 bytes."""
        parts = [FORMAT, self.identity, self.family.encode(), str((self.lookahead, self.stretch)).encode()]
        for g in self.groups:
            parts += [g.name.encode(), f"{g.kind} {g.bytes} {g.window} {g.chunk}".encode()]
        return _keyed(key, b"layout", parts)

    def namespace_digest(self, key: bytes, namespace: Namespace) -> bytes:
        """What a namespace of this layout is filed under: 16 bytes."""
        names = [name.encode("utf-8", "surrogatepass") for name in namespace]
        return _keyed(key, b"namespace", [self.digest(key), *names])


def _keyed(key: bytes, what: bytes, parts: list[bytes]) -> bytes:
    """A digest of parts, each behind its length."""
    made = hashlib.blake2b(key=key, digest_size=_DIGEST, person=what)
    for part in parts:
        made.update(len(part).to_bytes(8, "little"))
        made.update(part)
    return made.digest()


class PathDigests:
    """The digests of one path's positions, computed once as far as they are asked for.

    Attributes:
        tokens: How many tokens the path has.
        stretches: How many whole stretches, each with its lookahead, it has.
    """

    def __init__(self, layout: ObjectLayout, key: bytes, namespace: bytes, data: bytes) -> None:
        """`namespace` is from `namespace_digest`, `data` the tokens as int32."""
        self._key, self._data, self._layout = key, data, layout
        self._chain = [_keyed(key, b"root", [namespace])]
        self.tokens = len(data) // _TOKEN
        self.stretches = max(0, self.tokens - layout.lookahead) // layout.stretch

    def part(self, first: int, position: int) -> bytes:
        """The tokens that a record about [first, position) holds, from where the record before it ended.

        `first` is a multiple of the stretch.
        """
        ahead = self._layout.lookahead
        return self._data[_TOKEN * (first + ahead if first else 0) : _TOKEN * (position + ahead)]

    def boundary(self, number: int) -> bytes:
        """The digest of the end of `number` whole stretches, at most `stretches`; amortised O(tokens)."""
        chain, size = self._chain, self._layout.stretch
        while len(chain) <= number:
            first = (len(chain) - 1) * size
            chain.append(stretch_digest(self._key, chain[-1], self.part(first, first + size)))
        return chain[number]

    def rest(self, position: int) -> bytes:
        """The tokens of a manifest for `position`: those behind its last whole stretch, with the lookahead."""
        return self.part(position // self._layout.stretch * self._layout.stretch, position)

    def manifest(self, position: int) -> bytes:
        """The digest of a checkpoint at `position`."""
        before = self.boundary(position // self._layout.stretch)
        return manifest_digest(self._key, before, position, self.rest(position))


def stretch_digest(key: bytes, before: bytes, tokens: bytes) -> bytes:
    """The digest of the end of a stretch, from that of its start."""
    return _keyed(key, b"stretch", [before, tokens])


def manifest_digest(key: bytes, before: bytes, position: int, tokens: bytes) -> bytes:
    """The digest of a checkpoint, from that of its last whole stretch."""
    return _keyed(key, b"manifest", [before, str(position).encode(), tokens])


def usable_tokens(data: bytes) -> int:
    """How many first tokens may go to a tier: up to the first negative one.

    Negative tokens stand for media. One process numbers them as they come, so another knows them as other contents.
    """
    negative = np.frombuffer(data, np.int32) < 0
    return int(negative.argmax()) if negative.any() else len(negative)


# ---- records


class Reference(msgspec.Struct, frozen=True, array_like=True):
    """An object that a record names.

    Attributes:
        group: The group's name.
        first: First token; of a state, its position.
        stop: One behind the last token.
        length: Bytes.
        check: xxh3-128 of the bytes.
    """

    group: str
    first: int
    stop: int
    length: int
    check: bytes


class _Record(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    digest: bytes
    before: bytes
    tokens: bytes
    objects: tuple[Reference, ...]

    @property
    def size(self) -> int:
        """Bytes of all objects, and about the bytes of the record."""
        return sum(r.length for r in self.objects) + len(self.tokens) + 64 * len(self.objects) + 128


class Stretch(_Record, frozen=True, array_like=True, kw_only=True):
    """A stretch record.

    Attributes:
        digest: Of the stretch's end.
        before: Of its start.
        tokens: `PathDigests.part` of the stretch.
        objects: Of all prefix groups.
        number: Which stretch of the path, counted from 0.
    """

    number: int


class Manifest(_Record, frozen=True, array_like=True, kw_only=True):
    """A checkpoint.

    Attributes:
        digest: Of the checkpoint.
        before: Of the end of its last whole stretch.
        tokens: `PathDigests.rest`.
        objects: All that stretches do not name.
        position: Tokens that it lets a request skip.
        kind: The kind of placement that took it.
        worth: Expected seconds that keeping it saves.
    """

    position: int
    kind: str
    worth: float


class About(msgspec.Struct, frozen=True):
    """What servers say of a layout to whoever looks into the store. It has no secrets.

    Attributes:
        label: `ObjectLayout.label`.
        groups: Names of the groups, in the order of the layout.
        stretch: Tokens per stretch.
        lookahead: The lookahead.
        family: The family.
    """

    label: str
    groups: list[str]
    stretch: int
    lookahead: int
    family: str


def about(layout: ObjectLayout) -> bytes:
    """What stands under `LAYOUT/about`, as JSON."""
    names = [group.name for group in layout.groups]
    return msgspec.json.encode(About(layout.label, names, layout.stretch, layout.lookahead, layout.family))


def checksum(data: Buffer) -> bytes:
    """xxh3-128 of bytes."""
    return xxhash.xxh3_128_digest(data)


_encoder = msgspec.msgpack.Encoder()
_stretches = msgspec.msgpack.Decoder(Stretch)
_manifests = msgspec.msgpack.Decoder(Manifest)
_positions = msgspec.msgpack.Decoder(list[int])


def seal(record: Stretch | Manifest | list[int]) -> bytes:
    """A record as it is stored: a mark, a checksum, the content."""
    body = _encoder.encode(record)
    return _MAGIC + checksum(body) + body


def _unsealed(data: bytes) -> bytes:
    body = data[len(_MAGIC) + _DIGEST :]
    if data[: len(_MAGIC)] != _MAGIC or data[len(_MAGIC) : len(_MAGIC) + _DIGEST] != checksum(body):
        raise DamagedError("the record was cut short or altered")
    return body


def open_stretch(data: bytes, digest: bytes, key: bytes | None) -> Stretch:
    """Read a stretch record that stood under `digest`; without the key its tokens are not compared with the digest.

    Raises:
        DamagedError: It is not what was written there.
    """
    record = _decoded(_stretches, data)
    if record.digest != digest or (key and stretch_digest(key, record.before, record.tokens) != digest):
        raise DamagedError("the record stands under another's name")
    return record


def open_manifest(data: bytes, digest: bytes, key: bytes | None) -> Manifest:
    """Read a manifest that stood under `digest`, as `open_stretch` does.

    Raises:
        DamagedError: It is not what was written there.
    """
    record = _decoded(_manifests, data)
    made = manifest_digest(key, record.before, record.position, record.tokens) if key else digest
    if record.digest != digest or made != digest:
        raise DamagedError("the record stands under another's name")
    return record


def open_positions(data: bytes) -> list[int]:
    """Read an index: the positions of known checkpoints behind one end of a stretch.

    Raises:
        DamagedError: It is not what was written.
    """
    return _decoded(_positions, data)


_T = TypeVar("_T")


def _decoded(decoder: msgspec.msgpack.Decoder[_T], data: bytes) -> _T:
    try:
        return decoder.decode(_unsealed(data))
    except msgspec.MsgspecError as error:
        raise DamagedError("the record is of another format") from error


# ---- names


class ObjectName(NamedTuple):
    """A name, taken apart.

    Attributes:
        folder: Digests of layout and namespace: `LAYOUT/NAMESPACE`.
        digest: Of the stretch's end, or of the checkpoint.
        what: `STRETCH`, `MANIFEST` or `INDEX`; "" for an object.
        check: An object's checksum; b"" for records.
    """

    folder: str
    digest: bytes
    what: str
    check: bytes


def namespace_folder(layout: ObjectLayout, key: bytes, namespace: Namespace) -> str:
    """What all names of a namespace begin with, without the last slash."""
    return f"{layout.digest(key).hex()}/{layout.namespace_digest(key, namespace).hex()}"


def record_name(folder: str, digest: bytes, what: str) -> str:
    """The name of a record."""
    return f"{folder}/{digest.hex()}.{what}"


def object_names(folder: str, record: Stretch | Manifest, groups: dict[str, int]) -> Iterator[str]:
    """The names of a record's objects, in order; `groups` has the place of each group in the layout."""
    return (object_name(folder, record.digest, groups[r.group], r.check) for r in record.objects)


def object_name(folder: str, digest: bytes, group: int, check: bytes) -> str:
    """The name of an object."""
    return f"{folder}/{digest.hex()}.{group}.{check.hex()}"


def parse_name(name: str) -> ObjectName | None:
    """Take a name apart; None for what is no name of ours."""
    folder, _, last = name.rpartition("/")
    parts = last.split(".")
    try:
        digest = bytes.fromhex(parts[0])
        if len(digest) == _DIGEST and len(parts) == 2 and parts[1] in (STRETCH, MANIFEST, INDEX):
            return ObjectName(folder, digest, parts[1], b"")
        if len(digest) == _DIGEST and len(parts) == 3 and parts[1].isdecimal() and len(parts[2]) == 2 * _DIGEST:
            return ObjectName(folder, digest, "", bytes.fromhex(parts[2]))
    except ValueError:
        pass
    return None
