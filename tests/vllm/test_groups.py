"""What vLLM's planner made of a model: read as it is, or refused by name."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tests.vllm.standin import FullAttentionSpec, MambaSpec, SlidingWindowSpec, planned

from headway.cache import ParallelLayout
from headway.errors import ConfigError
from headway.vllm.groups import read_groups
from headway.vllm.options import read_options
from headway.vllm.wishes import read_wishes

FULL, STATE = FullAttentionSpec(block_size=16), MambaSpec()
WINDOW = SlidingWindowSpec(block_size=16, sliding_window=100, extra_retained_tokens=2)


def test_groups_keep_the_spans_that_vllm_gave_them() -> None:
    """A page of split attention covers more tokens of a sequence. The null block is no block of the cache."""
    config = planned(FULL, replace(FULL, block_size=48, dcp_sharded=False), STATE, blocks=50)
    groups = read_groups(config, ParallelLayout(tp=4, dcp=4), lookahead=1)
    assert [group.span for group in groups.groups] == [64, 48, 0]
    assert (groups.attention, groups.states, groups.blocks) == ((0, 1), (2,), 49)
    assert groups.block_bytes % 48 == 0
    window: Any = read_groups(planned(WINDOW), ParallelLayout()).specs[0]
    assert window.window == 102


def test_layers_with_specs_of_their_own() -> None:
    """A group of layers of one kind and unlike sizes is one group."""

    class UniformTypeKVCacheSpecs(SimpleNamespace):
        """vLLM's, as far as it is read."""

    both = UniformTypeKVCacheSpecs(
        kv_cache_specs={"a": FULL, "b": replace(FULL, page_size_bytes=64)}, block_size=16, page_size_bytes=4160
    )
    assert read_groups(planned(both), ParallelLayout()).block_bytes == 4160
    both.kv_cache_specs["b"] = WINDOW
    with pytest.raises(ConfigError, match="group 0 mixes layers"):
        read_groups(planned(both), ParallelLayout())


@pytest.mark.parametrize(
    ("specs", "says"),
    [
        ([], "no KV cache"),
        ([SimpleNamespace(block_size=16)], "SimpleNamespace layers"),
        ([FULL, MambaSpec(mamba_cache_mode="align")], "group 1 keeps its states in mode 'align'.*--no-enable-prefix"),
        ([replace(FULL, tokens_per_state=4)], "one entry for 4 tokens"),
        ([replace(FULL, non_causal=True)], "not causal"),
        ([WINDOW], "SlidingWindowSpec layers split"),
    ],
)
def test_what_cannot_be_served_is_refused(specs: list[Any], says: str) -> None:
    """By group and reason, with what to do."""
    with pytest.raises(ConfigError, match=says):
        read_groups(planned(*specs), ParallelLayout(tp=2, dcp=2))


def test_groups_in_host_memory_are_refused() -> None:
    """They have a pool of their own."""
    config = planned(FULL)
    config.kv_cache_groups[0].host_resident = True
    with pytest.raises(ConfigError, match="HiSparse"):
        read_groups(config, ParallelLayout())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"headway": {"evict": "lru"}}, "unknown evict; there are eviction, placement"),
        ({"headway": 3}, "must be an object"),
        ({"headway": {"pins": 1}}, "pins is 1"),
        ({"headway": {"explain": "some"}}, "one of own, all, off"),
    ],
)
def test_wrong_options_are_refused(given: dict[str, Any], says: str) -> None:
    """With those that there are."""
    with pytest.raises(ConfigError, match=says):
        read_options(given)


def test_options_default_and_are_read() -> None:
    """Other parts of `additional_config` are not ours."""
    assert read_options({"other": 1}) == read_options(None)
    assert read_options({"headway": {"alignment": 64}}).alignment == 64


@pytest.mark.parametrize(
    ("asked", "refused"),
    [
        ({"headway_pin": 101}, "pin must be true or a number of tokens up to 100"),
        ({"headway_pin_seconds": 0}, "pin_seconds must be a number above 0"),
        ({"headway_breakpoints": [0]}, "breakpoints must be a list of positions"),
        ({"headway_no_store": "yes"}, "no_store must be true or false"),
        ({"headway_no_store": 1, "headway_pin": 5}, "pin: a request with no_store"),
        ({"kv_transfer_params": {"headway": 5}}, '"headway" must be an object'),
    ],
)
def test_wrong_wishes_are_left_out_and_said(asked: dict[str, Any], refused: str) -> None:
    """A wish is no reason to refuse an answer."""
    wishes = read_wishes(asked, 100)
    assert wishes.pin == 0
    assert wishes.breakpoints == ()
    assert refused in wishes.refused[0]


@pytest.mark.parametrize(("asked", "pins"), [(1, 100), ("true", 100), (True, 100), (40, 40), (False, 0), (0, 0)])
def test_true_is_true_in_vllm_xargs_too(asked: Any, pins: int) -> None:
    """vLLM makes true 1 there: a pin of one token would be a trap."""
    wishes = read_wishes({"headway_pin": asked, "headway_explain": "true"}, 100)
    assert (wishes.pin, wishes.explain, wishes.refused) == (pins, True, [])


def test_wishes_are_read_from_both_places() -> None:
    """Nested or flat; an operator can allow no pins."""
    asked = {"kv_transfer_params": {"headway": {"pin": True, "explain": True}}, "headway_breakpoints": [5, 9]}
    wishes = read_wishes(asked, 100)
    assert (wishes.pin, wishes.breakpoints, wishes.explain, wishes.refused) == (100, (5, 9), True, [])
    assert read_wishes(asked, 100, pins=False).pin == 0
    assert read_wishes(None, 100).explain is False
    assert read_wishes({"kv_transfer_params": "a client can send this"}, 100).refused == []
