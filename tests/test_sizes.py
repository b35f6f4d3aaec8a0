"""Sizes of memory, as people write them and as they are shown to them."""

import pytest

from headway.errors import ConfigError
from headway.sizes import format_bytes, parse_bytes


def test_sizes_are_read_in_powers_of_1000_and_of_1024() -> None:
    texts = ("20GB", "1.5 GiB", "7", "2k", "3 mib", "1t", "512 B")
    assert [parse_bytes(t) for t in texts] == [20 * 10**9, 3 * 2**29, 7, 2000, 3 * 2**20, 10**12, 512]
    for wrong in ("", "much", "-3GB", "0", "5ib", "GB"):
        with pytest.raises(ConfigError, match="is not a size: write it like"):
            parse_bytes(wrong)


def test_sizes_are_shown_in_either() -> None:
    assert [format_bytes(n, 1000) for n in (5, 999, 27_648, 56_171_520, 20e9, 2e13)] == [
        "5 B", "999 B", "27.6 kB", "56.2 MB", "20.0 GB", "20.00 TB",
    ]  # fmt: skip
    assert [format_bytes(n) for n in (5, 1024, 3 * 2**30, 2**41)] == ["5 B", "1.0 KiB", "3.0 GiB", "2.0 TiB"]


def test_what_is_shown_can_be_read_again() -> None:
    for size in (7, 2000, 5 * 10**6, 20 * 10**9, 4 * 10**12):
        assert parse_bytes(format_bytes(size, 1000)) == size
    for size in (512, 2**20, 3 * 2**30):
        assert parse_bytes(format_bytes(size)) == size


def test_what_is_rounded_up_is_enough() -> None:
    for size in (7, 1001, 6_420_000_001, 6_400_000_000, 2_001_000_000_001):
        assert size <= parse_bytes(format_bytes(size, 1000, up=True)) < 1.1 * size + 1
    assert format_bytes(6_420_000_000, 1000, up=True) == "6.5 GB"
    assert format_bytes(6_400_000_000, 1000, up=True) == "6.4 GB"
