"""A replay agrees with what the trace allows, loses every token on one line, and does not depend on the grid."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headway.cache import (
    ChunkedLocal,
    ComputeCost,
    FullAttention,
    LayerSpec,
    ParallelLayout,
    Recurrent,
    SlidingWindow,
)
from headway.errors import ConfigError
from headway.replay import (
    RecordingWriter,
    ReplayConfig,
    ReplayResult,
    Trace,
    TraceBuilder,
    endless_matches,
    generate,
    read_trace,
    replay_trace,
)
from headway.replay.config.scale import scale
from headway.tell.reasons import LINES

HYBRID: list[LayerSpec] = [FullAttention("attention", 1000), Recurrent("state", 200_000)]
WINDOWED: list[LayerSpec] = [FullAttention("attention", 1000), SlidingWindow("near", 3000, 100)]
CHUNKED: list[LayerSpec] = [FullAttention("attention", 1000), ChunkedLocal("chunk", 500, 128), Recurrent("s", 9_000)]
PLAIN: list[LayerSpec] = [FullAttention("attention", 1000)]
STATES: list[LayerSpec] = [Recurrent("state", 200_000)]
EVERYTHING = [FullAttention("attention", 1000), FullAttention("draft", 300, 1, False), *WINDOWED[1:], *CHUNKED[1:]]
MODELS = {
    "hybrid": HYBRID,
    "windowed": WINDOWED,
    "chunked": CHUNKED,
    "plain": PLAIN,
    "states": STATES,
    "everything": EVERYTHING,
}


def replayed(trace: Trace, groups: list[LayerSpec], memory: int | None, **options: object) -> ReplayResult:
    return replay_trace(trace, ReplayConfig(groups, memory, **options), clairvoyant=True)  # type: ignore[arg-type]


def check(trace: Trace, result: ReplayResult) -> None:
    """What holds of every result."""
    for found in (result.whole, result.second_half):
        assert found.hit_tokens + sum(found.lost.values()) == found.prompt_tokens
        assert 0 <= found.hit_tokens <= found.endless_tokens < max(1, found.prompt_tokens)
        assert 0.0 <= found.compute_saved <= found.endless_compute <= 1.0
        assert set(found.lost) <= set(LINES)
    assert result.whole.requests + result.refused == len(trace)
    assert result.clairvoyant is not None
    assert result.clairvoyant.hit_tokens <= result.whole.endless_tokens
    for kind in result.kinds.values():
        assert kind.evicted_unused <= kind.evicted <= kind.taken
        assert kind.reused <= min(kind.taken, kind.resumed)
    for moment in result.memory:
        assert 0 <= moment.checkpoints <= moment.used
        assert result.blocks == 0 or moment.used <= result.blocks * result.block_bytes


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("memory", [3_000_000, 60_000_000, None])
def test_every_kind_of_model(model: str, memory: int | None) -> None:
    trace = generate("mixed", 80, seed=3, block_tokens=64)
    result = replayed(trace, MODELS[model], memory)
    check(trace, result)
    if result.kinds:
        assert 0 < max(moment.count for moment in result.memory) <= sum(kind.taken for kind in result.kinds.values())
    if memory is None:
        assert result.refused == 0
        assert "evicted" not in result.whole.lost
    if model == "plain" and memory is None:
        assert result.whole.hit_tokens == result.whole.endless_tokens


@settings(max_examples=20)
@example([[0, 0], [0, 0, 0]], 250_000, "everything", "continuation", "lru")  # without the second the first is refused
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=25),
    st.sampled_from([250_000, 500_000, 3_000_000, None]),
    st.sampled_from(sorted(MODELS)),
    st.sampled_from(["never", "continuation"]),
    st.sampled_from(["lru", "value"]),
)
def test_small_traces(prompts: list[list[int]], memory: int | None, model: str, outputs: str, eviction: str) -> None:
    builder = TraceBuilder("made", "test", 16)
    for time, prompt in enumerate(prompts):
        builder.add_blocks([*prompt, "tail"][: len(prompt) + time % 2], len(prompt) * 16 + 5 * (time % 2), 20, time)
    trace = builder.build()
    check(trace, replayed(trace, MODELS[model], memory, outputs=outputs, eviction=eviction))


def test_a_checkpoint_at_every_block_reaches_the_endless_ceiling() -> None:
    trace = generate("mixed", 150, seed=1, block_tokens=64)
    result = replayed(trace, HYBRID, None, placement=("prompt_end", "answer_end", "interval:64"))
    assert result.whole.hit_tokens == result.whole.endless_tokens
    assert result.clairvoyant is not None
    assert result.clairvoyant.hit_tokens == result.whole.endless_tokens
    assert set(result.whole.lost) <= {"nothing_matched", "parted", "last_token"}


def test_runs_are_deterministic() -> None:
    trace = generate("mixed", 150, seed=5)
    first, second = (replayed(trace, HYBRID, 8_000_000) for _ in range(2))
    assert first.whole == second.whole
    assert first.clairvoyant == second.clairvoyant
    assert first.kinds == second.kinds


def conversations(seed: int) -> list[tuple[list[int], list[int]]]:
    """Prompts and answers of conversations that take turns, as tokens."""
    random = np.random.default_rng(seed)
    systems = [random.integers(0, 1000, 300).tolist() for _ in range(3)]
    texts = [list(systems[int(random.integers(3))]) for _ in range(12)]
    requests = []
    for _ in range(150):
        text = texts[int(random.integers(len(texts)))]
        text += random.integers(0, 1000, int(random.integers(20, 200))).tolist()
        answer = random.integers(0, 1000, int(random.integers(5, 150))).tolist()
        requests.append((list(text), answer))
        text += answer
    return requests


def recorded(path: Path, requests: list[tuple[list[int], list[int]]], content: str, width: int = 16) -> Trace:
    with path.open("w", encoding="utf-8") as file:
        writer = RecordingWriter(file, content=content, block_tokens=width)
        for time, (prompt, answer) in enumerate(requests):
            writer.add(time, prompt, answer)
    return read_trace(path)


@pytest.mark.parametrize("memory", [5_000_000, 10_000_000, None])
@pytest.mark.parametrize("placement", [("prompt_end", "junction"), ("prompt_end", "answer_end", "junction")])
def test_blocks_and_tokens_agree(tmp_path: Path, memory: int | None, placement: tuple[str, ...]) -> None:
    """What a trace of blocks cannot tell costs little: less than a block of each prompt."""
    requests = conversations(7)
    coarse, fine = (
        replayed(recorded(tmp_path / "r", requests, content), HYBRID, memory, placement=placement, eviction="lru")
        for content in ("hashes", "tokens")
    )
    assert fine.symbol == 1 < coarse.symbol
    assert abs(coarse.whole.token_hit_rate - fine.whole.token_hit_rate) < (0.02 if memory is None else 0.05)


def by_the_token(trace: Trace) -> Trace:
    """The same prompts, told apart into tokens."""
    whole = [np.repeat(trace.prompt(i)[:-1], trace.width) for i in range(len(trace))]
    rest = [np.repeat(trace.prompt(i)[-1:], trace.prompt_tokens[i] - len(one)) for i, one in enumerate(whole)]
    symbols = np.concatenate([part for pair in zip(whole, rest, strict=True) for part in pair])
    offsets = np.concatenate(([0], np.cumsum(trace.prompt_tokens)))
    return replace(trace, width=1, outputs="never", symbols=symbols, offsets=offsets)


def test_models_with_windows_reuse_about_what_they_reuse_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers as those of Gemma 3. A running request holds a window and a step of entries, not those of all its prompt.

    200 prompts are few: a document more or less in the memory is half a point.
    """
    groups: list[LayerSpec] = [FullAttention("full", 81_920), SlidingWindow("near", 425_984, 1024)]
    random, builder = np.random.default_rng(4), TraceBuilder("documents", "test", 512)
    for time in range(200):
        document = min(random.integers(0, 60, 2))
        known = [f"{document}-{i}" for i in range(15 + document % 20)]
        asked = [f"{time}/{i}" for i in range(random.integers(2, 12))]
        builder.add_blocks([*known, *asked], 512 * (len(known) + len(asked)) - 502, 200, time)
    trace = replace(builder.build(), outputs="never")

    def reused(one: Trace) -> float:
        return replay_trace(one, ReplayConfig(groups, 50 * 10**9, eviction="lru")).whole.token_hit_rate

    by_token = reused(by_the_token(trace))
    assert abs(reused(trace) - by_token) < 0.02
    monkeypatch.setattr("headway.replay.run.order.STEP_TOKENS", 2**40)
    assert reused(trace) < by_token - 0.02, "whole prompts in one step hold more than an engine does"


def test_context_parallelism_is_memory() -> None:
    trace = generate("chat", 200, seed=4)
    sharded = replayed(trace, PLAIN, 2_000_000, layout=ParallelLayout(tp=4, dcp=4))
    alone = replayed(trace, PLAIN, 8_000_000)
    assert abs(sharded.whole.token_hit_rate - alone.whole.token_hit_rate) < 0.002


def test_more_memory_helps_and_the_future_helps_more() -> None:
    trace = generate("mixed", 300, seed=6)
    small, large = (replayed(trace, HYBRID, memory) for memory in (60_000_000, 400_000_000))
    assert small.whole.hit_tokens < large.whole.hit_tokens
    assert small.clairvoyant is not None
    assert small.clairvoyant.hit_tokens > small.whole.hit_tokens
    assert small.whole.lost["evicted"] > large.whole.lost.get("evicted", 0)


def test_prompts_larger_than_the_memory_are_refused() -> None:
    builder = TraceBuilder("made", "test", 64)
    builder.add_blocks(range(100), 6400, 0, 0.0)
    builder.add_blocks([1000], 64, 0, 1.0)
    result = replayed(builder.build(), HYBRID, 1_000_000)
    assert (result.refused, result.refused_tokens) == (1, 6400)
    assert (result.whole.requests, result.whole.prompt_tokens) == (1, 64), "it is in no figure"
    assert replayed(builder.build(), HYBRID, result.needed).refused == 0
    assert replayed(builder.build(), HYBRID, result.needed - result.block_bytes).refused == 1


def test_what_only_refused_requests_had_is_nothing_that_others_could_reuse() -> None:
    """The second prompt begins like the first, which is refused; the third begins like the second."""
    builder = TraceBuilder("made", "test", 64)
    builder.add_blocks(range(100), 6400, 0, 0.0)
    for time in (1.0, 2.0):
        builder.add_blocks(range(4), 256, 0, time)
    builder.add_blocks(range(100), 6400, 0, 3.0)
    result = replayed(builder.build(), HYBRID, 1_000_000)
    assert (result.refused, result.refused_tokens) == (2, 12_800)
    assert result.whole.endless_tokens == 255
    assert set(result.whole.lost) <= {"nothing_matched", "last_token", "evicted"}
    assert [(one.first_request, one.last_request) for one in result.prefixes.worst] in ([], [(1, 2)]), "as in the trace"


def test_an_answer_that_does_not_fit_is_refused_as_the_server_would() -> None:
    builder = TraceBuilder("made", "test", 64)
    builder.add_blocks([1000], 64, 6400, 0.0)
    builder.add_blocks([1000], 64, 0, 1.0)
    result = replayed(builder.build(), HYBRID, 1_000_000)
    assert (result.refused, result.whole.requests) == (1, 1)


def test_memory_for_nobody_gives_no_figures() -> None:
    builder = TraceBuilder("made", "test", 64)
    builder.add_blocks(range(100), 6400, 0, 0.0)
    result = replayed(builder.build(), HYBRID, 1_000_000)
    assert (result.refused, result.whole.requests, result.whole.prompt_tokens) == (1, 0, 0)
    assert (result.over_time, result.prefixes.worst) == ([], [])


def test_a_resend_skips_all_but_its_last_token() -> None:
    builder = TraceBuilder("made", "test", 64)
    for time in range(2):
        builder.add_blocks(range(4), 200, 0, time)
    for placement, hits in (("prompt_end",), 199), (("interval:64",), 192):
        result = replayed(builder.build(), HYBRID, None, placement=placement)
        assert result.whole.hit_tokens == hits
        check(builder.build(), result)


def test_answers_that_come_back_are_hit_at_their_end() -> None:
    builder = TraceBuilder("made", "test", 10)
    builder.add_blocks([1, 2], 23, 20, 0.0)
    builder.add_blocks([1, 2, 3, 4, 5], 57, 4, 1.0)
    trace = builder.build()
    never = replayed(trace, HYBRID, None, outputs="never")
    assert never.whole.hit_tokens == 20
    continued = replayed(trace, HYBRID, None, outputs="continuation")
    assert continued.whole.hit_tokens == 40
    assert continued.kinds["answer_end"].reused == 1


def test_message_boundaries_reach_the_placement() -> None:
    trace = generate("chat", 120, seed=8)
    result = replayed(trace, HYBRID, None)
    assert result.kinds["boundary"].reused > 0
    check(trace, result)


def test_states_are_hardly_rounded_up() -> None:
    for state in (10_000_000, 12_345_678, 33_000_000, 444_444_444):
        config = ReplayConfig([FullAttention("attention", 10_000), Recurrent("state", state)], 10**9)
        sized = scale(config, 512)
        table = sized.cache.geometry().state_table
        assert table is not None
        assert state <= table.state_blocks * sized.block_bytes < 1.07 * state
    k3 = ReplayConfig([FullAttention("a", 27_648), Recurrent("s", 56_171_520)], 10**9, ParallelLayout(tp=8, dcp=8))
    assert scale(k3, 512).parts == 1


def test_compute_is_quadratic() -> None:
    builder = TraceBuilder("made", "test", 10)
    builder.add_blocks([1, 2], 25, 0, 0.0)
    builder.add_blocks([1, 2], 25, 0, 0.0)
    result = replayed(builder.build(), PLAIN, None, cost=ComputeCost(0.0, 1.0))
    assert result.whole.compute_saved == pytest.approx(20**2 / (2 * 25**2))


def test_matches_may_be_given() -> None:
    trace = generate("chat", 100)
    config = ReplayConfig(HYBRID, 10_000_000)
    assert replay_trace(trace, config, matches=endless_matches(trace)).whole == replay_trace(trace, config).whole


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"outputs": "sometimes"}, "outputs"),
        ({"memory": 0}, "memory"),
        ({"alignment": 0}, "alignment"),
        ({"alignment": 100}, "does not fit"),
        ({"placement": ("everywhere",)}, "placement='everywhere' is unknown"),
        ({"eviction": "random"}, "unknown eviction"),
        ({"memory": 10}, "less than one block"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replay_trace(generate("one-off", 3), ReplayConfig(**({"groups": HYBRID, "memory": 10**8} | options)))  # type: ignore[arg-type]
