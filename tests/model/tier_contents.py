"""What a store really holds, read from beside all tiers: which checkpoints are whole, and whether tags are right."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tests.model.oracle import Names
from tests.model.tier_device import unmarked

from headway.tiers import Namespace, ObjectLayout
from headway.tiers.objects import (
    ABOUT,
    INDEX,
    MANIFEST,
    STRETCH,
    Manifest,
    PathDigests,
    Reference,
    Stretch,
    checksum,
    namespace_folder,
    object_name,
    open_manifest,
    open_positions,
    open_stretch,
    parse_name,
)
from headway.tiers.store import DamagedError, Store

__all__ = ["Contents"]

Place = tuple[str, bytes]


class Contents:
    """The records and objects of one store.

    Attributes:
        names: Everything that is listed.
        manifests: Those that open, by folder and digest.
    """

    def __init__(self, store: Store, layout: ObjectLayout, key: bytes, namespaces: Sequence[Namespace]) -> None:
        self._layout, self._groups = layout, {group.name: i for i, group in enumerate(layout.groups)}
        self._folders = {namespace_folder(layout, key, name): i for i, name in enumerate(namespaces)}
        roots = [PathDigests(layout, key, layout.namespace_digest(key, name), b"").boundary(0) for name in namespaces]
        self._roots = {(folder, roots[i]) for folder, i in self._folders.items()}
        self.names = sorted(item.name for item in store.names(""))
        data = dict(zip(self.names, store.read_small(self.names), strict=True))
        self._data = {name: content for name, content in data.items() if content is not None}
        self._stretches: dict[Place, Stretch] = {}
        self.manifests: dict[Place, Manifest] = {}
        self._listed: set[tuple[str, bytes, int]] = set()
        for name, content in self._data.items():
            parsed = parse_name(name)
            if name.endswith(f"/{ABOUT}"):
                continue
            assert parsed is not None, f"{name} is no name of ours"
            assert parsed.folder in self._folders, f"{name} is of a namespace that nobody has"
            at = parsed.folder, parsed.digest
            try:
                if parsed.what == STRETCH:
                    self._stretches[at] = open_stretch(content, parsed.digest, key)
                elif parsed.what == MANIFEST:
                    self.manifests[at] = open_manifest(content, parsed.digest, key)
                elif parsed.what == INDEX:
                    self._listed.update((*at, position) for position in open_positions(content))
            except DamagedError:
                continue

    def _path(self, place: Place) -> bytes | None:
        """The tokens before the end of a stretch, with the lookahead; None if a stretch before it is missing."""
        parts: list[bytes] = []
        while place not in self._roots:
            stretch = self._stretches.get(place)
            if stretch is None:
                return None
            parts.append(stretch.tokens)
            place = place[0], stretch.before
        return b"".join(reversed(parts))

    def _object(self, folder: str, record: Stretch | Manifest, reference: Reference) -> bytes | None:
        """An object, if it is there and is what was written."""
        name = object_name(folder, record.digest, self._groups[reference.group], reference.check)
        data = self._data.get(name)
        return data if data is not None and checksum(data) == reference.check else None

    def judge(self, names: Names, allowed: set[int]) -> None:
        """Every record is about a path that may be stored, and every tag of its objects is that of this path."""
        for (folder, _), record in [*self._stretches.items(), *self.manifests.items()]:
            before = self._path((folder, record.before))
            if before is None:
                continue
            tokens = np.frombuffer(before + record.tokens, dtype=np.int32).tolist()
            path = names.path(self._folders[folder], tokens)
            assert path[-1] in allowed, f"a store has {tokens}, which must not be there"
            for reference in record.objects:
                data = self._object(folder, record, reference)
                if data is not None:
                    self._judge(names, path, reference, np.frombuffer(data, dtype=np.int64).reshape(-1, 2))

    def _judge(self, names: Names, path: list[int], r: Reference, pairs: np.ndarray) -> None:
        found, groups = unmarked(pairs[:, 0])
        assert (groups == self._groups[r.group]).all(), f"{r}: entries of another group"
        state = r.first == r.stop
        right = path[r.stop : r.stop + 1] if state else path[r.first + 1 : r.stop + 1]
        assert found.tolist() == right, f"{r}: entries of another prefix"
        for name in () if state else pairs[:, 1].tolist():
            while name >= 0 and names.depth[name] >= len(path):
                name = names.parent[name]
            assert name < 0 or path[names.depth[name]] == name, f"{r}: an entry depends on later tokens that differ"

    def deepest(self, salt: int, tokens: list[int], searched: bool) -> int:
        """The deepest position of a prompt that this store can restore by itself.

        `searched`: it must be in an index as well, from which other servers learn of it.
        """
        data, ahead, size = np.array(tokens, dtype=np.int32).tobytes(), self._layout.lookahead, self._layout.stretch
        limit, best = min(len(tokens) - 1, len(tokens) - ahead), 0
        if self._layout.resumes_anywhere:
            for place, stretch in self._stretches.items():
                path = self._whole(place)
                if self._folders[place[0]] == salt and path is not None and data.startswith(path):
                    best = max(best, min((stretch.number + 1) * size, limit))
        for (folder, _), manifest in self.manifests.items():
            path = self._whole((folder, manifest.before))
            if path is None or self._folders[folder] != salt or manifest.position > limit:
                continue
            listed = not searched or (folder, manifest.before, manifest.position) in self._listed
            there = all(self._object(folder, manifest, r) is not None for r in manifest.objects)
            if listed and there and data.startswith(path + manifest.tokens):
                best = max(best, manifest.position)
        return best

    def _whole(self, place: Place) -> bytes | None:
        """As `_path`, if all objects on the way are there too."""
        path, at = self._path(place), place
        while path is not None and at not in self._roots:
            stretch = self._stretches[at]
            if any(self._object(at[0], stretch, r) is None for r in stretch.objects):
                return None
            at = at[0], stretch.before
        return path

    def check_nothing_loose(self) -> None:
        """Every object is named by a record, and every record opens."""
        records = {(*place, STRETCH) for place in self._stretches} | {(*place, MANIFEST) for place in self.manifests}
        named = {
            object_name(folder, record.digest, self._groups[r.group], r.check)
            for (folder, _), record in [*self._stretches.items(), *self.manifests.items()]
            for r in record.objects
        }
        for name in self._data:
            parsed = parse_name(name)
            if parsed is None:
                continue
            known = name in named or (parsed.folder, parsed.digest, parsed.what) in records or parsed.what == INDEX
            assert known, f"{name} is left, and nothing names it"
