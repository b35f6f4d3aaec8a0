"""KV events, as a router reads them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from tests.vllm.standin import MambaSpec, planned
from tests.vllm.test_manager import World, _served

from headway.cache import ParallelLayout, PrefixCache
from headway.errors import ConfigError
from headway.vllm.events import KvEvents
from headway.vllm.groups import read_groups


def _stored(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(name="stored", **fields)


def _removed(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(name="removed", **fields)


def _listen(cache: PrefixCache, groups: Any) -> KvEvents:
    return KvEvents(
        cache,
        groups,
        stored=_stored,
        removed=_removed,
        cleared=lambda: SimpleNamespace(name="cleared"),
        kind=lambda spec: f"kind of {type(spec).__name__}",
    )


@dataclass
class Router:
    """Reads events as routers do: blocks by their hashes, each behind its parent."""

    blocks: dict[int, tuple[Any, ...]] = field(default_factory=dict)

    def read(self, events: list[Any]) -> None:
        for event in events:
            if event.name == "cleared":
                self.blocks.clear()
            elif event.name == "removed":
                for one in event.block_hashes:
                    del self.blocks[one]
            else:
                parent = () if event.parent_block_hash is None else self.blocks[event.parent_block_hash]
                size = event.block_size
                assert len(event.token_ids) == size * len(event.block_hashes) == size * len(event.extra_keys)
                for i, (one, keys) in enumerate(zip(event.block_hashes, event.extra_keys, strict=True)):
                    assert one not in self.blocks, "told twice"
                    parent = (*parent, *([keys] if not parent else ()), *event.token_ids[i * size : (i + 1) * size])
                    self.blocks[one] = parent


def _usable(cache: PrefixCache, span: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """All whole blocks at whose end or behind it a request can resume: namespace, and the tokens up to its end."""
    todo = [child for root in cache._index.tree.roots.values() for child in root.children.values()]
    for edge in todo:
        todo.extend(edge.children.values())
        for checkpoint in (one for one in edge.checkpoints if one.position > edge.start):  # at its start: nothing of it
            tokens = edge.prefix(checkpoint.position, 0).tolist()
            space = edge.root().namespace
            yield from ((space, tuple(tokens[:end])) for end in range(span, checkpoint.position + 1, span))


@pytest.mark.parametrize("layout", ["full", "hybrid", "spans"])
def test_a_router_knows_exactly_the_blocks_that_can_be_used(layout: str) -> None:
    world = World.make(7, layout, blocks=90)
    world.manager.events = _listen(world.manager.cache, world.manager.groups)
    router, checked = Router(), 0
    commit = world.manager.commit

    def commit_and_compare(*args: Any) -> None:
        nonlocal checked
        commit(*args)
        router.read(world.manager.take_events())
        told = sorted(block[1:] for block in router.blocks.values())
        assert told == sorted(tokens for _, tokens in set(_usable(world.manager.cache, 8)))
        checked = max(checked, len(told))

    world.manager.commit = commit_and_compare  # type: ignore[method-assign]
    world.run(30)
    assert checked > 10


def test_a_store_says_what_vllm_says() -> None:
    world = World.make(1, "hybrid", blocks=90, dcp=2)
    world.manager.events = _listen(world.manager.cache, world.manager.groups)
    lora = SimpleNamespace(lora_name="law", lora_int_id=4, lora_path="/law")
    _served(world, "a", list(range(40)), 1, cache_salt="me", lora_request=lora)
    events = world.manager.take_events()
    first = events[0]
    assert (first.name, first.parent_block_hash, first.block_size) == ("stored", None, 16)  # of both ranks
    assert (first.lora_id, first.lora_name, first.medium, first.group_idx) == (4, "law", "GPU", 0)
    assert first.kv_cache_spec_kind == "kind of MLAAttentionSpec"
    assert [keys for event in events for keys in event.extra_keys] == [("law", "me"), ("law",)]
    assert [token for event in events for token in event.token_ids] == list(range(32))
    world.manager.reset_prefix_cache()
    assert [event.name for event in world.manager.take_events()] == ["cleared"]


def test_images_and_embeddings_are_not_told() -> None:
    world = World.make(1, "full", blocks=90)
    world.manager.events = _listen(world.manager.cache, world.manager.groups)
    image = SimpleNamespace(mm_position=SimpleNamespace(offset=18, length=4), identifier="cat")
    _served(world, "a", list(range(40)), 1, mm_features=[image])
    assert [token for event in world.manager.take_events() for token in event.token_ids] == list(range(16))
    _served(world, "b", list(range(40)), 1, prompt_embeds=object())
    assert world.manager.take_events() == []


def test_a_model_without_full_attention_is_refused() -> None:
    groups = read_groups(planned(MambaSpec()), ParallelLayout())
    with pytest.raises(ConfigError, match="leave --kv-events-config out"):
        _listen(World.make(1, "full", blocks=9).manager.cache, groups)
