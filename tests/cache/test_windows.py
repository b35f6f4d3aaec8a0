"""Windows and chunks without states: a checkpoint serves every position whose entries it holds."""

from __future__ import annotations

from tests.cache.engine import ATTENTION, STATE, Engine, tokens

from headway.cache import CheckpointReduced, CheckpointRemoved, ChunkedLocal, Event, Outcome, Prompt, SlidingWindow


def windowed(window: int, blocks: int = 4000) -> Engine:
    return Engine.of(ATTENTION, SlidingWindow("window", 64, window), blocks=blocks, block_tokens=16)


def test_a_prompt_that_parts_shortly_before_the_end_of_another_hits_there() -> None:
    engine = windowed(128)
    engine.run(tokens((1, 4100)))
    assert engine.hit(tokens((1, 4097))) == 4096
    assert engine.hit(tokens((1, 4097), (2, 9))) == 4097


def test_what_slid_out_of_a_window_stays_while_memory_is_free_and_goes_first() -> None:
    engine = windowed(128, blocks=600)
    first = engine.start(tokens((1, 4100)))
    engine.step(first, count=2048)
    engine.compute(first)
    engine.cache.finish([first.row])
    assert engine.hit(tokens((1, 3000), (2, 9))) == 3000
    assert engine.hit(tokens((1, 2000), (2, 9))) == 0, "the step before took no checkpoint"
    heard: list[Event] = []
    engine.cache.subscribe(heard.append)
    engine.run(tokens((3, 2000)))
    assert [(e.position, e.first) for e in heard if isinstance(e, CheckpointReduced)] == [(4099, 4095)]
    assert not [event for event in heard if isinstance(event, CheckpointRemoved)]
    assert engine.hit(tokens((1, 3000), (2, 9))) == 0
    assert engine.hit(tokens((1, 4097), (2, 9))) == 4097


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


def test_a_checkpoint_behind_a_place_where_paths_part_serves_it() -> None:
    """Without junctions nothing is kept at the place itself."""
    window = SlidingWindow("window", 64, 1024)
    engine = Engine.of(ATTENTION, window, blocks=4000, block_tokens=16, placement=["prompt_end"])
    for text in (tokens((1, 900)), tokens((1, 450), (2, 400)), tokens((1, 450), (3, 40), (4, 100))):
        engine.run(text)
    assert engine.hit(tokens((1, 450), (5, 9))) == 450
    assert engine.hit(tokens((1, 450), (3, 20), (5, 9))) == 470
    assert engine.hit(tokens((1, 300), (5, 9))) == 300
