"""What routers count is what can be used: compared with the cache after every step of random traffic."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from tests.cache.engine import ATTENTION, DRAFT, STATE, Engine, tokens
from tests.server.kv_reader import DECODER, Index

from headway.cache import CheckpointStored, Event, Lease, Prompt, ResidentGrown, SlidingWindow
from headway.server.kv_events import AllBlocksCleared, encode_batch, wire_events
from headway.tell.usable_blocks import UsableBlocks

WINDOW = SlidingWindow("window", 64, window=7)
WORLDS: dict[str, tuple[Any, ...]] = {
    "anywhere": (ATTENTION,),
    "states": (ATTENTION, STATE),
    "states alone": (STATE,),
    "windows": (ATTENTION, WINDOW),
    "drafts": (ATTENTION, DRAFT, STATE),
    "all": (ATTENTION, WINDOW, STATE),
}


@dataclass
class Told:
    """A cache, the blocks that are told of it, and a reader who hears everything as it goes over the wire."""

    engine: Engine
    size: int
    heard: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        cache = self.engine.cache
        self.blocks = UsableBlocks(self.size, floats=not cache.geometry.tail_tables)
        self.reader = Index(self.size)
        cache.subscribe(self.hear)

    def hear(self, event: Event) -> None:
        self.heard.append(event)
        if getattr(event, "cause", "") == "reset":
            self.blocks.clear()
            self.read([AllBlocksCleared()])
            return
        model, _, salt = self.engine.cache.namespace_name(event.namespace) or ("", "", "")
        change = self.blocks.hear(event, salt, model)
        if change is not None:
            self.read(wire_events([change], self.size))

    def read(self, events: list[Any]) -> None:
        self.reader.apply(DECODER.decode(encode_batch(events)))

    def ends(self) -> set[tuple[str, tuple[int, ...]]]:
        """Salt and tokens of everything that can be resumed at, by the cache's own tree."""
        tree, found = self.engine.cache._index.tree, set()
        for edge in tree.edges():
            name = self.engine.cache.namespace_name(edge.root().namespace)
            assert name is not None
            for checkpoint in edge.checkpoints:
                if checkpoint.position > edge.start:
                    found.add((name[2], tuple(edge.prefix(checkpoint.position, 0).tolist())))
        return found

    def compare(self) -> None:
        """The reader knows the blocks before all these, and no others."""
        right = {(salt, text[:end]) for salt, text in self.ends() for end in range(self.size, len(text) + 1, self.size)}
        told = [(place[2], tuple(self.reader.path(name))) for name, place in self.reader.blocks.items()]
        assert sorted(told) == sorted(right)

    def check_hit(self, text: np.ndarray, salt: str, *, exactly: bool) -> None:
        """What a router expects is never below the hit, and with the checkpoints it is the hit."""
        cache = self.engine.cache
        hit = cache.lookup(Prompt(text, namespace=cache.namespace(salt=salt))).tokens
        assert self.reader.overlap(text.tolist(), salt) >= hit // self.size * self.size
        if exactly:
            assert self.reader.resume(text.tolist(), salt) == hit


@pytest.mark.parametrize("world", WORLDS)
def test_a_reader_knows_what_can_be_used_and_nothing_else(world: str) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    told = Told(Engine.of(*WORLDS[world], blocks=rng.choice([24, 60])), rng.choice([1, 3, 4, 16]))
    engine, cache, running = told.engine, told.engine.cache, list[Lease]()
    models = rng.choice([[""], ["", "long"]])
    texts = [np.array([rng.randrange(50) for _ in range(rng.randrange(5, 50))], np.int32)]
    for _ in range(150):
        if len(running) < 3 and rng.random() < 0.4:
            base = rng.choice(texts)
            more = [rng.randrange(3) for _ in range(rng.randrange(1, 12))]
            text = np.concatenate([base[: rng.randrange(1, len(base) + 1)], np.array(more, np.int32)])[:60]
            salt = rng.choice(["", "", "me"])
            namespace = cache.namespace(rng.choice(models), salt=salt)
            boundaries = [rng.randrange(1, len(text) + 1)] if rng.random() < 0.3 else []
            texts.append(text)
            running.append(engine.start(text, namespace=namespace, boundaries=boundaries))
            told.check_hit(text, salt, exactly=world != "anywhere" and len(models) == 1)
        elif running:
            lease = rng.choice(running)
            granted = engine.step(lease, count=min(lease.next_stop - lease.computed, rng.randrange(1, 9)))[0]
            if granted == 0 or lease.tokens > len(lease.prompt.tokens) + 6:
                rng.choice([cache.finish, cache.preempt, cache.abort])([lease.row])
                running.remove(lease)
        if rng.random() < 0.02:
            rng.choice([cache.reset, lambda: cache.forget_namespace(cache.namespace(salt="me"))])()
        told.compare()


def test_blocks_that_nobody_can_use_are_taken_back_while_they_are_kept() -> None:
    """A checkpoint goes while a request runs behind it: its entries stay, for that request alone."""
    told = Told(Engine.of(ATTENTION, STATE, blocks=16), 4)
    engine = told.engine
    engine.run(tokens((1, 8)))
    lease = engine.start(tokens((1, 8), (2, 8)))
    engine.step(lease, count=4)
    assert told.reader.overlap(tokens((1, 8)).tolist()) == 8
    others = [engine.start(tokens((stream, 8))) for stream in (3, 4, 5)]
    for other in others:
        engine.step(other)
    assert not [one for one in told.ends() if one[1] == tuple(tokens((1, 8)).tolist())], "it had to make room"
    assert any(edge.resident for edge in engine.cache._index.tree.edges() if edge.busy)
    told.compare()


def test_two_models_of_one_salt_share_blocks_until_the_last_of_them_has_gone() -> None:
    for groups in (ATTENTION,), (ATTENTION, STATE):
        told = Told(Engine.of(*groups), 4)
        cache, text = told.engine.cache, tokens((1, 9))
        for model in ("", "long"):
            told.engine.run(text, namespace=cache.namespace(model))
            assert told.reader.overlap(text.tolist()) == 8
        for model, left in (("long", 8), ("", 0)):
            cache.forget_namespace(cache.namespace(model))
            assert told.reader.overlap(text.tolist()) == left


@pytest.mark.parametrize("groups", [(ATTENTION,), (ATTENTION, STATE)], ids=["anywhere", "states"])
def test_what_was_lost_comes_back_with_the_traffic(groups: tuple[Any, ...]) -> None:
    """Blocks before new ones are told with them, and what is not known is never taken back."""
    told = Told(Engine.of(*groups), 4)
    text = tokens((1, 12))
    told.engine.run(text)
    told.blocks.clear()
    told.read([AllBlocksCleared()])
    told.engine.run(tokens((1, 12), (2, 8)))
    assert told.reader.overlap(tokens((1, 12), (2, 8)).tolist()) == 20
    told.engine.cache.forget(Prompt(text))
    assert told.reader.blocks == {}


@pytest.mark.parametrize("world", ["anywhere", "all"])
def test_all_there_is_can_be_told_at_once(world: str) -> None:
    told = Told(Engine.of(*WORLDS[world], blocks=60), 4)
    for stream, more in ((1, 5), (1, 9), (2, 7), (1, 3)):
        told.engine.run(tokens((7, 10), (stream, more)), namespace=told.engine.cache.namespace(salt="s" * (stream % 2)))
    late = Index(4)
    late.apply(DECODER.decode(encode_batch([AllBlocksCleared(), *wire_events(told.blocks.all(), 4)])))
    assert (late.blocks, late.points) == (told.reader.blocks, told.reader.points)


def test_nothing_is_told_from_the_first_image_on() -> None:
    blocks, text = UsableBlocks(4, floats=False), np.array([1, 2, 3, 4, 5, 6, -1, -1, 7, 8, 9, 10], np.int32)
    assert blocks.hear(ResidentGrown(0, 12, text, 0), 0) is None
    change = blocks.hear(CheckpointStored(0, 12, text, "prompt_end", 12), 0)
    assert change is not None
    assert change.tokens is not None
    assert change.tokens.tolist() == [1, 2, 3, 4]
