"""The cache policy of vLLM's CPU tier, under a manager that keeps the tier's books. vLLM's base class is a stand-in."""

import random
import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

BASE = "vllm.v1.kv_offload.cpu.policies.base"


class Base:
    """What vLLM's `CachePolicy` gives to a policy."""

    def __init__(self, cache_capacity: int) -> None:
        self.cache_capacity = cache_capacity

    def on_request_access(self, keys: object, req_context: object) -> None: ...


@pytest.fixture
def policy_class(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    parts = BASE.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    sys.modules[BASE].CachePolicy = Base  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "headway.vllm.offload", raising=False)
    yield import_module("headway.vllm.offload").ValueCachePolicy
    sys.modules.pop("headway.vllm.offload", None)


class Context:
    """A request as the tier knows it."""

    def __init__(self) -> None:
        self._positions: dict[bytes, int] = {}
        self._state: dict[type, object] = {}

    def place(self, key: bytes, position: int) -> None:
        self._positions[key] = position

    def get_offload_key_position(self, key: bytes) -> int | None:
        return self._positions.get(key)

    def get_state(self, kind: type) -> Any:
        return self._state.get(kind)

    def set_state(self, value: object) -> None:
        self._state[type(value)] = value


def key(prefix: str, group: int = 0) -> bytes:
    return prefix.encode().ljust(16) + group.to_bytes(4, "big")


class Tier:
    """The books of vLLM's manager: what is stored, what is in use, what each request has seen."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.used: dict[bytes, int] = {}
        self.evicted: list[bytes] = []

    def serve(self, prompt: str, *, states: tuple[int, ...] = (), end: bool = True) -> int:
        """A request whose prompt has a character for each chunk, with states stored behind so many of them."""
        policy, context = self.policy, Context()
        chunks = [key(prompt[: n + 1]) for n in range(len(prompt))]
        marks = [key(prompt[:n], 1) for n in states]
        for n, name in enumerate(chunks):
            context.place(name, (n + 1) * 100)
        for n, name in zip(states, marks, strict=True):
            context.place(name, n * 100)
        known = next((n for n, name in enumerate(chunks) if policy.get(name) is None), len(chunks))
        hit = known
        if states:
            hit = next((n for n in range(known, 0, -1) if policy.get(key(prompt[:n], 1)) is not None), 0)
        reused = chunks[:hit] + ([key(prompt[:hit], 1)] if states and hit else [])
        for n in range(hit):
            context.place(key(prompt[: n + 1], 1), (n + 1) * 100)
        policy.on_request_access(reused, context)
        stored = [name for name in (*chunks[hit:], *marks) if policy.get(name) is None]
        policy.on_store_miss(stored, context)
        policy.on_request_access(stored, context)
        need = len(self.used) + len(stored) - policy.cache_capacity
        if need > 0:
            gone = policy.evict(need, {*chunks, *marks})
            assert gone is not None
            assert len(gone) == need == len({name for name, _ in gone})
            for name, _ in gone:
                assert name not in (*chunks, *marks)
                assert policy.get(name) is None
                del self.used[name]
                self.evicted.append(name)
        for name in stored:
            self.used[name] = 0
            policy.insert(name, SimpleNamespace(name=name), context)
            policy.mark_evictable(name)
        if end:
            groups = [chunks, [key(prompt[:hit], 1)] * bool(hit and states) + marks]
            policy.on_request_finished([g for g in groups if g], set(stored), set(reused), context)
        assert set(self.used) == {name for name in self.used if policy.get(name) is not None}
        return hit


def check(policy: Any) -> None:
    """Places, chunks and what is needed fit together."""
    keys = [name for place in policy._places.values() for name in place.keys.values()]
    assert sorted(keys) == sorted(policy._chunks)
    for place in policy._places.values():
        if place.parent is not None:
            assert place.parent.position < place.position
    children: dict[int, int] = {}
    everything = [*policy._places.values(), *policy._ghosts.values()]
    for place in everything:
        if place.parent is not None and place.needed:
            children[id(place.parent)] = children.get(id(place.parent), 0) + 1
    for place in everything:
        assert place.children == children.get(id(place), 0)
        assert place.needed == bool(place.keys or place.open or place.children)


def test_what_is_wanted_stays_and_ends_go_first(policy_class: Any) -> None:
    tier = Tier(policy_class(8))
    for _ in range(3):
        tier.serve("abc")
    tier.serve("xyz")
    assert tier.serve("pqr") == 0
    assert tier.evicted == [key("xyz")], "of what was used once, the end"
    assert tier.serve("abc") == 3
    check(tier.policy)


def test_a_state_and_the_entries_before_it_go_together(policy_class: Any) -> None:
    tier = Tier(policy_class(12))
    for _ in range(4):
        tier.serve("abcd", states=(4,))
    tier.serve("wxyz", states=(4,))
    tier.serve("pqrs", states=(4,))
    assert tier.evicted[0] == key("wxyz", 1), "the state, and then what led to it, from its end"
    assert tier.evicted[1:] == [key("wxyz"), key("wxy")][: len(tier.evicted) - 1]
    assert tier.serve("abcd", states=(4,)) == 4
    check(tier.policy)


def test_a_state_inside_a_path_goes_alone(policy_class: Any) -> None:
    policy = policy_class(100)
    tier = Tier(policy)
    tier.serve("ab", states=(2,))
    for _ in range(5):
        tier.serve("abcdef", states=(6,))
    gone = policy.evict(1, set())
    assert [name for name, _ in gone] == [key("ab", 1)]
    check(policy)


def test_a_tier_whose_chunks_are_all_in_use_refuses(policy_class: Any) -> None:
    tier = Tier(policy_class(4))
    tier.serve("ab")
    for name in list(tier.used):
        tier.policy.mark_non_evictable(name)
    assert tier.policy.evict(1, set()) is None
    tier.policy.mark_evictable(key("ab"))
    assert tier.policy.evict(1, {key("ab")}) is None, "protected"
    assert [name for name, _ in tier.policy.evict(1, set())] == [key("ab")]


def test_what_a_request_under_way_stored_goes_last(policy_class: Any) -> None:
    tier = Tier(policy_class(100))
    tier.serve("ab")
    tier.serve("xyz", end=False)
    assert {name for name, _ in tier.policy.evict(2, set())} == {key("a"), key("ab")}
    assert len(tier.policy.evict(3, set())) == 3, "but it goes if there is nothing else"


def test_a_failed_store_leaves_nothing(policy_class: Any) -> None:
    tier = Tier(policy_class(100))
    tier.serve("abc")
    tier.policy.remove(key("abc"))
    tier.policy.remove(key("abc"))
    assert tier.policy.get(key("abc")) is None
    check(tier.policy)
    tier.policy.clear()
    assert tier.policy.get(key("a")) is None
    assert tier.policy.evict(1, set()) is None


@pytest.mark.parametrize("seed", range(20))
def test_books_agree_whatever_comes(policy_class: Any, seed: int) -> None:
    draw, hybrid = random.Random(seed), seed % 2 == 1
    tier = Tier(policy_class(draw.choice((25, 40, 80))))
    for _ in range(120):
        prompt = "".join(draw.choice("ab") for _ in range(draw.randint(1, 8)))
        cut = draw.randint(1, len(prompt))
        tier.serve(prompt, states=tuple(sorted({cut, len(prompt)})) if hybrid else (), end=draw.random() < 0.95)
        check(tier.policy)


def test_an_older_vllm_is_refused(policy_class: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "headway.vllm.offload")
    sys.modules[BASE].CachePolicy = object  # type: ignore[attr-defined]
    with pytest.raises(Exception, match=r"needs the cache policies of vLLM 0\.33"):
        import_module("headway.vllm.offload")
