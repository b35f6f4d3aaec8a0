"""Whatever way a text is cut, batched, forked and restored, the logits are those of one forward by transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.runtime.hand_cache import HandCache
from tests.runtime.tiny_models import SOUND, tiny_model
from transformers import PreTrainedModel

from headway.cache import TableKind
from headway.errors import ConfigError
from headway.runtime.forward.batch import RunBatch, StateMove

TOLERANCE = 1e-4
"""Absolute, on logits that reach about 6."""


def reference(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Logits of transformers' own forward, no cache: [tokens, vocab]."""
    with torch.no_grad():
        positions = torch.arange(len(tokens))[None]
        output = model(input_ids=torch.tensor([tokens]), position_ids=positions, use_cache=False)
    return output["logits"][0]


def text(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 256, length).tolist()


def worst(found: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (found - expected).abs().max().item()
    return difference if np.isfinite(difference) else float("inf")


@pytest.mark.parametrize("name", SOUND)
def test_random_chunks_then_ragged_decoding(name: str) -> None:
    model = tiny_model(name)
    cache = HandCache(model)
    rng = np.random.default_rng(1)
    texts = {"a": text(1, 150), "b": text(2, 97), "c": text(3, 40)}
    expected = {row: reference(model, tokens) for row, tokens in texts.items()}
    done = dict.fromkeys(texts, 0)
    for row in texts:
        cache.start(row)
    while any(done[row] < len(texts[row]) for row in texts):
        work = {}
        for row, tokens in texts.items():
            left = len(tokens) - 10 - done[row]
            if left > 0 and rng.random() < 0.7:
                work[row] = tokens[done[row] : done[row] + min(left, int(rng.integers(1, 60)))]
            elif 0 < len(tokens) - done[row] <= 10:
                work[row] = [tokens[done[row]]]
        if not work:
            continue
        result = cache.step(work, whole=True)
        for i, (row, tokens) in enumerate(work.items()):
            stop = done[row] + len(tokens)
            assert worst(result.all_logits[i], expected[row][done[row] : stop]) < TOLERANCE, (row, done[row], stop)
            assert torch.equal(result.logits[i], result.all_logits[i][-1])
            done[row] = stop


@pytest.mark.parametrize("name", SOUND)
def test_decoding_rows_of_very_different_lengths_run_together(name: str) -> None:
    model = tiny_model(name)
    cache = HandCache(model)
    texts = {"a": text(1, 131), "b": text(2, 4), "c": text(3, 66), "d": text(4, 33)}
    expected = {row: reference(model, tokens) for row, tokens in texts.items()}
    for row, tokens in texts.items():
        cache.start(row)
        cache.step({row: tokens[:-3]})
    for back in (3, 2, 1):
        result = cache.step({row: [tokens[-back]] for row, tokens in texts.items()})
        for i, row in enumerate(texts):
            assert worst(result.logits[i], expected[row][-back]) < TOLERANCE


@pytest.mark.parametrize("name", SOUND)
def test_a_fork_inside_a_block_goes_its_own_way(name: str) -> None:
    model = tiny_model(name)
    cache = HandCache(model)
    stem, left, right = text(1, 71), text(2, 25), text(3, 25)
    cache.start("left")
    cache.step({"left": stem})
    copies = cache.fork("left", "right")
    result = cache.step({"left": left, "right": right}, copies=copies, whole=True)
    for logits, branch in zip(result.all_logits, (left, right), strict=True):
        assert worst(logits, reference(model, stem + branch)[len(stem) :]) < TOLERANCE


@pytest.mark.parametrize("name", SOUND)
def test_a_state_exported_after_a_step_can_be_restored(name: str) -> None:
    model = tiny_model(name)
    cache = HandCache(model)
    stem, left, right = text(1, 53), text(2, 30), text(3, 30)
    cache.start("a")
    taken, moves = cache.snapshot("a")
    cache.step({"a": stem}, exports=moves)
    copies = cache.fork("a", "b")
    states = state_copies(cache, taken, "b")
    written = {destination for _, destination in states}
    cache.step({"a": left}, copies=[pair for pair in copies if pair[1] not in written])
    result = cache.step({"b": right}, copies=states, whole=True)
    assert worst(result.all_logits[0], reference(model, stem + right)[len(stem) :]) < TOLERANCE


def state_copies(cache: HandCache, taken: list[np.ndarray], row: str) -> list[tuple[int, int]]:
    """Copies that restore an exported state into a row."""
    pairs = []
    for table, exported, mine in zip(cache.geometry.tables, taken, cache.tables[row], strict=True):
        if table.kind is TableKind.STATE:
            pairs += [(int(x), int(y)) for x, y in zip(exported, mine[: table.state_blocks], strict=True)]
    return pairs


@pytest.mark.parametrize("name", SOUND)
def test_an_early_token_moves_the_last_logits(name: str) -> None:
    """A dead path would pass every comparison; so a token that only the memory of earlier steps holds must matter."""
    model = tiny_model(name)
    last = []
    for first in (7, 8):
        cache = HandCache(model)
        cache.start("a")
        tokens = [first, *text(1, 20)]
        cache.step({"a": tokens[:9]})
        cache.step({"a": tokens[9:]})
        last.append(cache.step({"a": [5]}).logits[0])
    assert worst(*last) > 100 * TOLERANCE


def test_a_state_alone_carries_the_past() -> None:
    """Where only some layers keep states, zeroing these must show: attention cannot hide it."""
    model = tiny_model("KimiLinear")
    cache = HandCache(model)
    tokens = text(1, 40)
    cache.start("a")
    cache.step({"a": tokens[:30]})
    table = cache.geometry.tables[-1]
    blocks = torch.from_numpy(cache.tables["a"][-1][: table.state_blocks].astype(np.int64))
    cache.runner.arena.data[blocks] = 0
    result = cache.step({"a": tokens[30:]}, whole=True)
    assert worst(result.all_logits[0], reference(model, tokens)[30:]) > 100 * TOLERANCE


def test_windows_read_only_what_is_held() -> None:
    """The hand cache poisons blocks as they leave the window; here they really do leave."""
    model = tiny_model("Gemma3")
    cache = HandCache(model)
    tokens = text(1, 150)
    cache.start("a")
    cache.step({"a": tokens[:120]})
    window = next(t for t in cache.geometry.tables if t.kind is TableKind.WINDOW)
    held = np.flatnonzero(cache.tables["a"][window.index] >= 0)
    assert held.min() * window.span <= 120 - 31 < (held.min() + 1) * window.span
    result = cache.step({"a": tokens[120:]}, whole=True)
    assert worst(result.all_logits[0], reference(model, tokens)[120:]) < TOLERANCE


def test_logits_at_every_position_only_where_asked() -> None:
    cache = HandCache(tiny_model("Qwen3"))
    cache.start("a")
    result = cache.step({"a": [5, 6, 7]})
    assert result.all_logits == (None,)
    assert result.logits.shape == (1, 256)
    assert result.logits.dtype == torch.float32


def test_bf16_runs_and_stays_near_fp32() -> None:
    import copy

    model = copy.deepcopy(tiny_model("OlmoHybrid")).to(torch.bfloat16)
    cache = HandCache(model)
    tokens = text(1, 60)
    cache.start("a")
    cache.step({"a": tokens[:41]})
    result = cache.step({"a": tokens[41:]}, whole=True)
    expected = reference(tiny_model("OlmoHybrid"), tokens)[41:]
    relative = (result.all_logits[0] - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert relative < 0.1


@pytest.mark.parametrize("name", ["Jamba", "FalconMamba"])
def test_single_steps_mend_models_that_cannot_continue_by_several_tokens(name: str) -> None:
    model = tiny_model(name)
    tokens = text(1, 70)
    expected = reference(model, tokens)[50:]
    found = []
    for single in (False, True):
        cache = HandCache(model, single_steps=single)
        cache.start("a")
        cache.step({"a": tokens[:50]})
        logits = cache.step({"a": tokens[50:]}, whole=True).all_logits[0]
        assert logits.shape == (20, 256)
        found.append(worst(logits, expected))
    assert found[0] > 0.1
    assert found[1] < TOLERANCE


def test_the_model_itself_is_left_as_it_was() -> None:
    model = tiny_model("GptOss")
    before = model.config._attn_implementation
    cache = HandCache(model)
    cache.start("a")
    cache.step({"a": text(1, 20)})
    assert model.config._attn_implementation == before
    assert len(model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, pad_token_id=0)[0]) == 6


def test_a_batch_whose_parts_contradict_each_other_is_refused() -> None:
    one = np.zeros(1, dtype=np.int64)
    with pytest.raises(ConfigError, match="make them equal"):
        RunBatch(np.zeros(1, np.int32), one, np.ones(2, np.int64), [], np.array([True]))
    with pytest.raises(ConfigError, match="without tokens"):
        RunBatch(np.zeros(0, np.int32), one, one, [], np.array([True]))
    with pytest.raises(ConfigError, match="add up to 1"):
        RunBatch(np.zeros(3, np.int32), one, np.ones(1, np.int64), [], np.array([True]))


def test_exports_run_in_order_after_the_forward() -> None:
    """A chain of moves carries the newest state to its end."""
    cache = HandCache(tiny_model("Mamba2"))
    cache.start("a")
    row = cache.tables["a"][0][:1].copy()
    spare = [np.array([cache.free.pop()], dtype=np.int32) for _ in range(2)]
    cache.step({"a": [5, 6, 7]}, exports=[StateMove(row, spare[0], 0), StateMove(spare[0], spare[1], 0)])
    data = cache.runner.arena.data
    assert torch.equal(data[int(row[0])], data[int(spare[1][0])])
