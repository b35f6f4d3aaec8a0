"""Numbers of namespaces: prompts in different ones never share.

Clients choose cache salts without end, so a name is remembered only as long as something is known under it, in any of
the caches that use the same numbers: a device's cache and the one of host memory below it are two.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from headway.cache.index.tree import NAMESPACE_BYTES

__all__ = ["Namespaces", "digest_of"]

_LONGEST = 256
"""Characters beyond which a name is remembered by its digest."""
_KEPT = 1024
"""Names that are remembered in any case."""

Name = tuple[str, str, str]


class Namespaces:
    """Names (model, adapter, salt) and their numbers. The empty name is 0.

    Attributes:
        nbytes: Bytes that the names which are remembered in any case take.
    """

    nbytes = _KEPT * NAMESPACE_BYTES

    def __init__(self) -> None:
        """Know the empty name."""
        self._numbers: dict[Name | bytes, int] = {("", "", ""): 0}
        self._given = 0
        self._known: list[Mapping[int, object]] = []

    def __getstate__(self) -> dict[str, object]:
        """The names alone: what a copy of a cache knows, it watches anew."""
        return {**vars(self), "_known": []}

    def __len__(self) -> int:
        """Names that are remembered."""
        return len(self._numbers)

    def watch(self, known: Mapping[int, object]) -> None:
        """Remember a name at least while its number is a key of `known`."""
        self._known.append(known)

    def number(self, name: Name) -> int:
        """The number of a name, which is never given to another."""
        key = _key(name)
        if key not in self._numbers:
            if len(self._numbers) > 2 * sum(map(len, self._known)) + _KEPT:
                self._forget_unknown()
            self._given += 1
            self._numbers[key] = self._given
        return self._numbers[key]

    def name(self, number: int) -> Name | bytes | None:
        """The name with this number, a long one as its digest; None if it is forgotten.

        O(1) for one that was given out lately, O(names) for an old one.
        """
        for name, given in reversed(self._numbers.items()):
            if given == number:
                return name
        return None

    def _forget_unknown(self) -> None:
        self._numbers = {
            name: number
            for name, number in self._numbers.items()
            if number == 0 or any(number in known for known in self._known)
        }

    def forget(self) -> None:
        """Forget all names but those of other caches: what is known in the one that asks is gone."""
        if len(self._known) > 1:
            self._forget_unknown()
        else:
            self._numbers = {("", "", ""): 0}


def digest_of(name: Name | bytes) -> bytes:
    """A digest of a name, the same in every process; of a name that was remembered by its digest, that."""
    return name if isinstance(name, bytes) else hashlib.sha256(repr(name).encode()).digest()


def _key(name: Name) -> Name | bytes:
    return digest_of(name) if sum(map(len, name)) > _LONGEST else name
