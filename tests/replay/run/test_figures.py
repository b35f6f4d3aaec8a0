"""Hits over time and losses by prefix add up to the totals, and name the right stretch."""

import random
from collections import defaultdict

import numpy as np
import pytest

from headway.cache import FullAttention, LayerSpec, Recurrent
from headway.replay import ReplayConfig, Trace, TraceBuilder, endless_matches, generate, read_outputs, replay_trace
from headway.replay.run.figures import lost_by_prefix, over_time

HYBRID: list[LayerSpec] = [FullAttention("attention", 1000), Recurrent("state", 200_000)]


def made(prompts: list[list[int]], width: int = 10) -> Trace:
    builder = TraceBuilder("made", "test", width)
    for time, prompt in enumerate(prompts):
        builder.add_blocks(prompt, len(prompt) * width + 3, 5, time)
    return builder.build()


@pytest.mark.parametrize("memory", [4_000_000, 60_000_000, None])
def test_parts_add_up_to_the_totals(memory: int | None) -> None:
    result = replay_trace(generate("mixed", 150, seed=4), ReplayConfig(HYBRID, memory))
    whole, prefixes = result.whole, result.prefixes
    for name in ("prompt_tokens", "hit_tokens", "endless_tokens"):
        assert sum(getattr(span, name) for span in result.over_time) == getattr(whole, name)
    assert [span.stop for span in result.over_time[:-1]] == [span.first for span in result.over_time[1:]]
    assert prefixes.lost_tokens == whole.endless_tokens - whole.hit_tokens
    assert prefixes.lost_tokens >= sum(stretch.lost_tokens for stretch in prefixes.worst)
    assert prefixes.stretches >= len(prefixes.worst)


def test_the_stretch_that_loses_is_named() -> None:
    """Four requests share [0, 20), and three of them [20, 40). Nothing is reused but 10 tokens by the second."""
    trace = made([[1, 2, 3, 4], [1, 2, 3, 4, 9], [1, 2, 7], [1, 2, 3, 4, 8]])
    hits, matches = np.array([0, 10, 0, 0]), endless_matches(trace)
    assert matches.tolist() == [0, 40, 20, 40]
    found = lost_by_prefix(trace, read_outputs(trace), hits, matches)
    assert found.lost_tokens == 90
    assert [(s.start, s.stop, s.requests, s.lost_tokens, s.hit_tokens) for s in found.worst] == [
        (0, 20, 4, 50, 10),
        (20, 40, 3, 40, 0),
    ]
    assert [(s.first_request, s.last_request) for s in found.worst] == [(0, 3), (0, 3)]


def test_against_a_dictionary_of_prefixes() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    draw = random.Random(seed)
    trace = made([[draw.randrange(2) for _ in range(draw.randrange(1, 7))] for _ in range(40)], width=4)
    matches = endless_matches(trace)
    hits = np.array([draw.randrange(m // 4 + 1) * 4 for m in matches.tolist()])
    passing, lost = defaultdict(list), defaultdict(int)
    prompts = [tuple(trace.prompt(i).tolist()) for i in range(len(trace))]
    for i, prompt in enumerate(prompts):
        for end in range(1, len(prompt) + 1):
            passing[prompt[:end]].append(i)
            lost[prompt[:end]] += max(0, min(int(matches[i]), 4 * end) - max(int(hits[i]), 4 * end - 4))
    together: dict[tuple[int, ...], int] = defaultdict(int)
    for prefix, tokens in lost.items():
        head = prefix
        while len(head) > 1 and passing[head[:-1]] == passing[head]:
            head = head[:-1]
        together[head] += tokens
    expected = sorted((tokens for tokens in together.values() if tokens), reverse=True)
    found = lost_by_prefix(trace, read_outputs(trace), hits, matches)
    assert [stretch.lost_tokens for stretch in found.worst] == expected[:20]
    assert found.stretches == len(expected)


def test_spans_of_a_short_trace_are_its_requests() -> None:
    trace = made([[1], [1, 2], [3]])
    spans = over_time(trace, np.array([0, 10, 0]), endless_matches(trace))
    assert [(s.first, s.stop, s.time, s.prompt_tokens, s.hit_tokens, s.endless_tokens) for s in spans] == [
        (0, 1, 0.0, 13, 0, 0),
        (1, 2, 1.0, 23, 10, 10),
        (2, 3, 2.0, 13, 0, 0),
    ]
