"""The arena: typed views, states over several blocks, whole-block copies."""

from __future__ import annotations

import dataclasses
import gc
from types import SimpleNamespace

import pytest
import torch
from tests.runtime.tiny_models import SOUND, tiny_model

from headway.cache import CacheGeometry
from headway.errors import ConfigError
from headway.runtime.forward.arena import Arena
from headway.runtime.model.inspection import inspect_model
from headway.runtime.model.layout import LayoutBuilder
from headway.runtime.model.memory import row_bytes


def arena_of(name: str, blocks: int = 60, block_tokens: int = 16) -> Arena:
    layout = inspect_model(tiny_model(name))
    return Arena(layout, CacheGeometry(layout.groups, block_tokens=block_tokens), blocks)


@pytest.mark.parametrize("block_tokens", [5, 7, 16])
@pytest.mark.parametrize("name", SOUND)
def test_no_two_fields_share_a_byte(name: str, block_tokens: int) -> None:
    arena = arena_of(name, 8, block_tokens)
    taken: dict[str, torch.Tensor] = {}
    for layer in arena.layout.layers:
        if layer.tokens is None:
            continue
        for view in arena.entries(layer.index):
            arena.data.zero_()
            view.fill_(float("nan"))
            group = taken.setdefault(layer.tokens.group, torch.zeros_like(arena.data))
            group += arena.data != 0
            assert view.shape[0] == 8
    for marks in taken.values():
        assert marks.max() == 1


@pytest.mark.parametrize("name", ["KimiLinear", "FalconH1", "Lfm2", "Mamba2"])
def test_states_survive_their_blocks(name: str) -> None:
    arena = arena_of(name)
    arena.data.fill_(0xFF)
    count = arena.state_blocks
    ids = torch.randperm(60, generator=torch.Generator().manual_seed(0))[: 2 * count].view(2, count)
    states = arena.new_states(2, count)
    for layer in arena.layout.layers:
        if layer.state is not None:
            for i, view in enumerate(arena.state_fields(states, layer.index).values()):
                view.copy_(torch.randn_like(view) + i)
    arena.scatter_states(ids, states)
    assert torch.equal(arena.gather_states(ids), states)
    assert torch.equal(arena.gather_states(ids.flip(0)), states.flip(0))


def test_copies_read_before_they_write() -> None:
    arena = arena_of("Qwen3", 4)
    arena.data[:] = torch.arange(4, dtype=torch.uint8)[:, None]
    arena.copy_blocks(torch.tensor([0, 1, 2]), torch.tensor([1, 2, 3]))
    assert arena.data[:, 0].tolist() == [0, 0, 1, 2]
    arena.copy_blocks(torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64))


def test_a_state_larger_than_the_block_takes_several() -> None:
    arena = arena_of("KimiLinear")
    assert arena.state_blocks == -(-21504 // (16 * 160)) == 9
    assert row_bytes(arena.geometry) == 2560


def test_mixed_types_are_aligned() -> None:
    """A bf16 convolution state before an fp32 state, over blocks of an odd number of values."""
    builder = LayoutBuilder()
    builder.tokens("full", 0, [("keys", (1, 3), torch.bfloat16), ("values", (1, 4), torch.bfloat16)])
    entries = builder.state([("conv:0", (5, 3), torch.bfloat16), ("recurrent:0", (2, 3), torch.float32)])
    layout = inspect_model(tiny_model("Mamba2"))
    layer = dataclasses.replace(layout.layers[0], state=entries)
    layout = dataclasses.replace(layout, groups=builder.groups(), layers=(layer,))
    arena = Arena(layout, CacheGeometry(layout.groups, block_tokens=1), 20)
    states = arena.gather_states(torch.arange(10).view(2, 5))
    views = arena.state_fields(states, 0)
    views["recurrent:0"].fill_(1.5)
    views["conv:0"].fill_(-2)
    assert views["recurrent:0"].unique().tolist() == [1.5]
    assert views["conv:0"].dtype == torch.bfloat16


def test_pages_are_locked_for_as_long_as_the_arena_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """What CUDA's library is told, without a GPU; and a limit of the system is told by the option that meets it."""
    layout = inspect_model(tiny_model("Qwen3"))
    geometry, told, code = CacheGeometry(layout.groups), [], [0]

    def register(address: int, size: int, flags: int) -> int:
        told.append(("locked", address, size))
        return code[0]

    library = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda at: told.append(("unlocked", at)))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: library)
    arena = Arena(layout, geometry, 4, pinned=True)
    address, size = arena.rows.data_ptr(), arena.bytes
    assert told == [("locked", address, size)]
    del arena
    gc.collect()
    assert told[1:] == [("unlocked", address)]
    code[0] = 2
    with pytest.raises(ConfigError, match=r"cannot be page-locked for the GPU \(CUDA error 2\): lower --host-memory"):
        Arena(layout, geometry, 4, pinned=True, option="--host-memory")


def test_groups_of_another_model_are_refused() -> None:
    layout = inspect_model(tiny_model("Qwen3"))
    other = inspect_model(tiny_model("Gemma3"))
    with pytest.raises(ConfigError, match="without the model's group"):
        Arena(layout, CacheGeometry(other.groups), 4)
