"""Windows and chunks without states: a checkpoint serves every position whose entries it holds."""

from __future__ import annotations

from typing import Any

from tests.cache.engine import ATTENTION, STATE, Engine, tokens

from headway.cache import ChunkedLocal, Outcome, Prompt, SlidingWindow


def windowed(window: int, **options: Any) -> Engine:
    return Engine.of(ATTENTION, SlidingWindow("window", 16, window), blocks=4000, block_tokens=16, **options)


def test_a_prompt_that_parts_shortly_before_the_end_of_another_hits_there() -> None:
    engine = windowed(128)
    engine.run(tokens((1, 4100)))
    assert engine.hit(tokens((1, 4097))) == 4096
    assert engine.hit(tokens((1, 4097), (2, 9))) == 4097
    assert engine.hit(tokens((1, 4000), (2, 9))) == 0, "of these entries the window has let go"


def test_a_prompt_shorter_than_the_window_is_hit_wherever_it_is_edited() -> None:
    engine = windowed(1024)
    engine.run(tokens((1, 900)))
    assert engine.run(tokens((1, 450), (2, 400))) == 450
    assert engine.run(tokens((1, 200), (3, 700))) == 200
    assert engine.run(tokens((1, 300), (4, 700))) == 300, "it is found behind the place where the others parted"
    assert [engine.run(tokens((9, 500), (10 + i, 300))) for i in range(3)] == [0, 500, 500]


def test_where_one_resumes_before_a_checkpoint_one_is_kept_at_once() -> None:
    engine = windowed(1024)
    engine.run(tokens((1, 900)))
    engine.run(tokens((1, 450), (2, 400)))
    parts = engine.cache.path(Prompt(tokens((1, 900)))).parts
    kinds = {one.position: one.kind for part in parts for one in part.checkpoints}
    assert kinds == {450: "junction", 899: "prompt_end", 900: "answer_end"}
    lease = engine.start(tokens((5, 100)), pin=60)
    engine.compute(lease)
    engine.cache.finish([lease.row])
    pinned = engine.start(tokens((5, 40), (6, 50)), pin=40)
    assert (pinned.hit.tokens, pinned.wishes[0].outcome) == (40, Outcome.KEPT), "a pin is kept at the hit itself"


def test_a_chunk_serves_from_its_start_on() -> None:
    engine = Engine.of(ATTENTION, ChunkedLocal("chunk", 16, 256), blocks=4000, block_tokens=16)
    engine.run(tokens((1, 700)))
    hits = {n: engine.hit(tokens((1, n), (2, 9))) for n in (699, 600, 513, 512, 511, 300)}
    assert hits == {699: 699, 600: 600, 513: 513, 512: 512, 511: 0, 300: 0}
    state = Engine.of(ATTENTION, ChunkedLocal("chunk", 16, 256), STATE, blocks=4000, block_tokens=16)
    state.run(tokens((1, 700)))
    assert state.hit(tokens((1, 690), (2, 9))) == 0, "a state serves its own position alone"
