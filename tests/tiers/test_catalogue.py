"""The catalogue against a list of paths: what is found, what is evicted, what is forgotten."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiers.world import ATTENTION, HYBRID, KEY, NAME

from headway.tiers import ObjectLayout
from headway.tiers.catalogue import Catalogue, Entry
from headway.tiers.objects import Manifest, PathDigests, Reference, Stretch

FOLDER = "layout/namespace"
SMALL = {
    "hybrid": ObjectLayout(HYBRID.identity, HYBRID.groups, stretch=4),
    "attention": ObjectLayout(ATTENTION.identity, ATTENTION.groups, stretch=4),
    "lookahead": ObjectLayout(HYBRID.identity, HYBRID.groups, lookahead=2, stretch=4),
}


def data(tokens: list[int]) -> bytes:
    return np.array(tokens, np.int32).tobytes()


@dataclass
class Modelled:
    """A catalogue, and the same as lists of tokens."""

    layout: ObjectLayout
    catalogue: Catalogue = field(init=False)
    checkpoints: dict[tuple[int, ...], Entry] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.catalogue = Catalogue(self.layout)

    def digests(self, tokens: list[int]) -> PathDigests:
        return PathDigests(self.layout, KEY, self.layout.namespace_digest(KEY, NAME), data(tokens))

    def add(self, tokens: list[int], worth: float = 1.0) -> None:
        """A checkpoint whose path, with the lookahead, is `tokens`."""
        digests, size, ahead = self.digests(tokens), self.layout.stretch, self.layout.lookahead
        position = len(tokens) - ahead
        if position < 1:
            return
        for number in range(position // size):
            record = Stretch(
                digest=digests.boundary(number + 1),
                before=digests.boundary(number),
                tokens=digests.part(number * size, number * size + size),
                objects=self.references(self.layout.stretch_spans(number)),
                number=number,
            )
            self.catalogue.add(Entry(FOLDER, record))
        made = Manifest(
            digest=digests.manifest(position),
            before=digests.boundary(position // size),
            tokens=digests.rest(position),
            objects=self.references(self.layout.manifest_spans(position)),
            position=position,
            kind="end",
            worth=worth,
        )
        self.checkpoints[tuple(tokens)] = self.catalogue.add(Entry(FOLDER, made, worth=worth))

    def references(self, spans: list[tuple[str, int, int]]) -> tuple[Reference, ...]:
        return tuple(Reference(*span, self.layout.length(span), b"c" * 16) for span in spans)  # type: ignore[arg-type]

    def found(self, tokens: list[int]) -> set[int]:
        digests = self.digests(tokens)
        path = self.catalogue.path(FOLDER, digests, 0, len(tokens))
        for number in range(digests.stretches):
            if path.stretches[number] is None:
                return {position for position in path.checkpoints if position < (number + 1) * self.layout.stretch}
        return set(path.checkpoints)

    def expected(self, tokens: list[int]) -> set[int]:
        paths = [path for path, entry in self.checkpoints.items() if entry.present]
        return {len(p) - self.layout.lookahead for p in paths if p == tuple(tokens[: len(p)])}

    def verify_paths(self) -> None:
        for path in self.checkpoints:
            assert self.found(list(path)) <= self.expected(list(path))

    def verify(self) -> None:
        entries = self.catalogue.entries()
        assert self.catalogue.used == sum(entry.record.size for entry in entries if entry.own)
        assert all(entry.present for entry in entries)
        for path in self.checkpoints:
            assert self.found(list(path)) == self.expected(list(path))
        if not self.layout.resumes_anywhere:
            needed = {p[: n * self.layout.stretch + self.layout.lookahead] for p in self.present() for n in range(1, 9)}
            stretches = [entry for entry in entries if isinstance(entry.record, Stretch)]
            assert all(self.spelled(entry) in needed for entry in stretches)

    def present(self) -> list[tuple[int, ...]]:
        return [path for path, entry in self.checkpoints.items() if entry.present]

    def spelled(self, entry: Entry) -> tuple[int, ...]:
        """All tokens that an entry speaks of."""
        parts = [entry.record.tokens]
        while (before := self.catalogue.stretch(FOLDER, entry.record.before)) is not None:
            entry = before
            parts.insert(0, entry.record.tokens)
        return tuple(np.frombuffer(b"".join(parts), np.int32).tolist())


paths = st.lists(st.integers(0, 1), min_size=1, max_size=18)


@pytest.mark.parametrize("layout", SMALL.values(), ids=SMALL)
@settings(max_examples=30)
@given(adds=st.lists(paths, min_size=1, max_size=12), asked=paths)
def test_what_is_added_is_found_on_every_path_that_begins_with_it(
    layout: ObjectLayout, adds: list[list[int]], asked: list[int]
) -> None:
    m = Modelled(layout)
    for tokens in adds:
        m.add(tokens)
    m.verify()
    assert m.found(asked) == m.expected(asked)


@pytest.mark.parametrize("layout", SMALL.values(), ids=SMALL)
@settings(max_examples=50)
@given(adds=st.lists(paths, min_size=1, max_size=12), prefix=paths)
def test_forgetting_a_prefix_is_what_a_list_of_paths_says(
    layout: ObjectLayout, adds: list[list[int]], prefix: list[int]
) -> None:
    m = Modelled(layout)
    for tokens in adds:
        m.add(tokens)
    before = m.present()
    doomed = [p for p in before if p[: len(prefix)] == tuple(prefix)]
    others = [p for p in before if p not in doomed and p != tuple(prefix[: len(p)])]
    shared = max([_common(p, tuple(prefix)) for p in others], default=0)
    if layout.resumes_anywhere:  # stretches are worth something by themselves, and share as well
        ends = [p[: n * 4] for p in others for n in range(1, 9) if n * 4 <= len(p)]
        shared = max([shared, *(_common(p, tuple(prefix)) for p in ends)])
    m.catalogue.forget(FOLDER, data(prefix), m.digests(prefix))
    kept = [p for p in before if p not in doomed and (p in others or len(p) <= shared)]
    assert sorted(m.present()) == sorted(kept)
    m.verify()


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize("layout", SMALL.values(), ids=SMALL)
@settings(max_examples=30)
@given(adds=st.lists(st.tuples(paths, st.floats(0, 9)), min_size=1, max_size=12), share=st.floats(0, 1))
def test_eviction_frees_what_is_asked_and_leaves_whole_paths(
    layout: ObjectLayout, adds: list[tuple[list[int], float]], share: float
) -> None:
    m = Modelled(layout)
    for tokens, worth in adds:
        m.add(tokens, worth)
    capacity = int(m.catalogue.used * share)
    gone = m.catalogue.evict(0, capacity)
    assert m.catalogue.used <= capacity
    assert all(not entry.present for entry in gone)
    m.verify()


def test_what_is_worth_least_per_byte_goes_first_and_what_is_wanted_stays() -> None:
    m = Modelled(SMALL["hybrid"])
    for number, worth in enumerate([3.0, 1.0, 2.0]):
        m.add([number, *range(10)], worth)
    for expected in ({0, 2}, {0}):
        m.catalogue.evict(1, m.catalogue.used)
        assert {path[0] for path in m.present()} == expected
    m.add([5, *range(10)], 1.0)
    m.catalogue.rank(m.checkpoints[0, *range(10)])
    m.catalogue.evict(1, m.catalogue.used)
    assert {path[0] for path in m.present()} == {0}


def test_what_is_held_stays() -> None:
    m = Modelled(SMALL["hybrid"])
    m.add([0, *range(10)])
    m.add([1, *range(10)], worth=9.0)
    entry = m.checkpoints[0, *range(10)]
    entry.holds += 1
    m.catalogue.evict(1, m.catalogue.used)
    assert {path[0] for path in m.present()} == {0}
    m.catalogue.evict(1, m.catalogue.used)
    assert {path[0] for path in m.present()} == {0}
    m.catalogue.release(entry)
    m.catalogue.evict(1, m.catalogue.used)
    assert m.present() == []
    assert m.catalogue.used == 0


def test_what_others_wrote_is_not_ours_to_evict_and_is_bounded_in_memory() -> None:
    m = Modelled(SMALL["hybrid"])
    for number in range(20):
        m.add([number, *range(10)])
    for entry in m.catalogue.entries():
        m.catalogue.disown(entry)
    assert m.catalogue.used == 0
    assert m.catalogue.evict(1, 0) == []
    assert len(m.present()) == 20
    m.catalogue.trim(1000)
    assert len(m.present()) == 20
    m.catalogue.trim(16)
    assert len(m.catalogue.entries()) == 14
    assert {path[0] for path in m.present()} <= set(range(15, 20))
    m.verify_paths()


def test_records_may_come_in_any_order() -> None:
    first, second = Modelled(SMALL["hybrid"]), Modelled(SMALL["hybrid"])
    first.add(list(range(18)))
    for entry in reversed(first.catalogue.entries()):
        second.catalogue.add(Entry(FOLDER, entry.record))
    assert second.found(list(range(18))) == {18}
