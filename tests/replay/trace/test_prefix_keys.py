"""Keys of prefixes against the tokens themselves: equal exactly where the same tokens lie before."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.replay import Trace, TraceBuilder
from headway.replay.trace.prefixes import PrefixKeys, Reading, answer_blocks, read_outputs


def tokens(trace: Trace, reading: Reading, request: int) -> list[object]:
    """A request's tokens, told apart as far as the trace can."""
    prompt, answer = trace.prompt(request).tolist(), answer_blocks(trace, reading, request).tolist()
    total = int(trace.prompt_tokens[request] + trace.answer_tokens[request])
    if trace.width == 1:
        known: list[object] = [*prompt, *answer]
    elif answer:
        known = [(block, j) for block in prompt[:-1] + answer for j in range(trace.width)]
    else:
        tail = int(trace.prompt_tokens[request]) - (len(prompt) - 1) * trace.width
        known = [(block, j) for block in prompt[:-1] for j in range(trace.width)]
        known += [(prompt[-1], j) for j in range(tail)]
    return (known + [(request, "own", p) for p in range(len(known), total)])[:total]


@settings(max_examples=60, print_blob=True)
@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=3), st.booleans()), min_size=1, max_size=5),
    st.sampled_from(["never", "continuation"]),
)
def test_keys_are_equal_where_prefixes_are(width: int, prompts: list[tuple[list[int], bool]], outputs: str) -> None:
    builder = TraceBuilder("made", "test", width)
    for time, (blocks, cut) in enumerate(prompts):
        if width == 1:
            builder.add_tokens(blocks, (), time, answer_tokens=3)
        else:
            builder.add_blocks([*blocks, "tail"][: len(blocks) + cut], len(blocks) * width + cut, 2 * width, time)
    trace = builder.build()
    reading = read_outputs(trace, outputs)
    keys = PrefixKeys(trace, reading)
    by_key: dict[int, tuple[object, ...]] = {}
    by_prefix: dict[tuple[object, ...], int] = {}
    for request in range(len(trace)):
        sequence = tokens(trace, reading, request)
        found = keys.at(request, np.arange(1, len(sequence) + 1))
        assert keys.multiples(request, 2, len(sequence)) == found[1::2]
        for position, key in enumerate(found, start=1):
            prefix = tuple(sequence[:position])
            assert by_key.setdefault(key, prefix) == prefix
            assert by_prefix.setdefault(prefix, key) == key
