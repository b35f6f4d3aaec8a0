"""Names of presets carry the version that they were checked against."""

import pytest

from headway.errors import ConfigError
from headway.replay import HeadwayInVllmPreset, MarconiPreset, VllmPreset
from headway.replay.config.presets import described, preset_name, preset_of
from headway.tell.engines import VERSIONS


def test_a_name_without_a_version_means_the_newest() -> None:
    assert preset_of("vllm-0.33") == preset_of("vllm") == VllmPreset()
    assert preset_of("vllm-0.32,running=32") == VllmPreset(running=32, version="0.32")
    assert preset_of("headway-in-vllm-0.33") == preset_of("headway-in-vllm") == HeadwayInVllmPreset()


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("vllm", "vllm-0.33"),
        ("vllm-0.32", "vllm-0.32"),
        ("headway-in-vllm", "headway-in-vllm-0.33"),
        ("sglang,memory_ratio=2.0", "sglang-0.5,memory_ratio=2.0"),
        ("marconi", "marconi-2411.19379"),
        (MarconiPreset(alpha=1.0), "marconi-2411.19379,alpha=1.0,bootstrap=0.1"),
        ("headway", None),
        (None, None),
    ],
)
def test_what_is_shown_can_be_given_again(given: str | MarconiPreset | None, shown: str | None) -> None:
    assert preset_name(given) == shown
    assert preset_of(shown) == preset_of(given)


def test_settings_that_were_found_are_described_in_full() -> None:
    found = VllmPreset(block_tokens=64, state_groups=3)
    assert described(found) == (
        "vllm-0.33,block_tokens=64,state_groups=3,retention=latest,match_unit=0,running=16,step_tokens=8192,geometry=group"
    )
    assert preset_of(described(found)) == found


def test_advice_names_the_flags_of_the_versions_that_are_imitated() -> None:
    for engine in ("vLLM", "SGLang"):
        assert preset_name(engine.lower()) == f"{engine.lower()}-{VERSIONS[engine]}"


@pytest.mark.parametrize("name", ["vllm-0.31", "vllm-", "headway-in", "marconi-1", "0.32", ""])
def test_other_versions_are_not_imitated(name: str) -> None:
    with pytest.raises(ConfigError, match=r"use one of vllm-0\.33, .*, or such a name without its version"):
        preset_of(name)
