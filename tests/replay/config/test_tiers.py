"""Links to lower memory: what one rank has of them."""

import pytest

from headway.errors import ConfigError
from headway.replay.ask.options import Hardware, ModelChoice, RankChoice
from headway.replay.ask.setting import Setting
from headway.replay.config.gpus import GPUS
from headway.replay.config.tiers import LINKS, TIERS, link_of


def test_a_gpu_has_its_link_and_ranks_share_a_drive() -> None:
    host, disk = link_of("host", "pcie5", 10**9, 8), link_of("disk", "NVMe4", 10**9, 8)
    assert (host.read, host.write) == (pytest.approx(0.8 * 63e9), pytest.approx(0.8 * 63e9))
    assert (disk.read, disk.write) == (pytest.approx(0.8 * 6.9e9 / 8), pytest.approx(0.8 * 4.1e9 / 8))
    assert "one for 8 ranks" in disk.source
    assert "one for" not in host.source
    assert link_of("disk", "nvme4", 10**9, 1).read == pytest.approx(0.8 * 6.9e9)


def test_a_rate_is_that_of_one_rank() -> None:
    found = link_of("store", "2.5GB/s", 10**9, 8)
    assert (found.read, found.write, found.latency) == (2.5e9, 2.5e9, LINKS["100gbe"].latency)
    found = link_of("disk", "2.5GB/s,500MB/s", 10**9, 8)
    assert (found.read, found.write) == (2.5e9, 5e8)


def test_what_is_no_link_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--disk-link 'nvme6'.*did you mean nvme"):
        link_of("disk", "nvme6", 10**9, 8)
    with pytest.raises(ConfigError, match="--host-link"):
        link_of("host", "fast/s", 10**9, 8)


def test_every_link_has_a_source_and_every_gpu_a_link() -> None:
    assert all(link.source and link.read >= link.write > 0 < link.latency for link in LINKS.values())
    assert {gpu.link for gpu in GPUS.values()} <= set(LINKS)
    assert set(TIERS.values()) <= set(LINKS)


def setting(**hardware: str | None) -> Setting:
    return Setting(ModelChoice("kimi-k3"), RankChoice(8, 8), Hardware(**{"memory": "20GB"} | hardware))  # type: ignore[arg-type]


def test_options_become_tiers_the_fastest_first() -> None:
    config, _ = setting(store="2TB", host_memory="80GB", host_link="20GB/s").configure()
    assert [(tier.name, tier.memory) for tier in config.tiers] == [("host", 80 * 10**9), ("store", 2 * 10**12)]
    assert config.tiers[0].read == 20e9
    assert config.roofline is None
    assert setting(host_memory="0").configure()[0].tiers == ()


def test_a_gpu_says_how_fast_prompts_are_and_how_far_the_host_is() -> None:
    old, new = (setting(host_memory="80GB", gpu=gpu, weights="600GB").configure()[0] for gpu in ("a100", "h200"))
    assert old.roofline is not None
    assert new.roofline is not None
    assert old.roofline.flops < new.roofline.flops
    assert new.tiers[0].read == pytest.approx(2 * old.tiers[0].read)


def test_options_that_would_do_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--disk-link: .* give its size"):
        Hardware(memory="20GB", disk_link="nvme4").check()
    with pytest.raises(ConfigError, match="no lower tiers"):
        setting(host_memory="80GB").changed(preset="vllm").configure()
    with pytest.raises(ConfigError, match="endless"):
        setting(memory="endless", host_memory="80GB").configure()
