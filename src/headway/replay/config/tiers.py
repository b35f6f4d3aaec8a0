"""Memory below a rank's own in a replay: how much, and how fast it is.

Rates are peaks of a link in one direction, as standards and data sheets give them, of which a share is taken to be
reached. A GPU has a link to the host of its own; a drive and a network card are taken to serve all ranks of the model,
so a rank has its part of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from headway.errors import ConfigError
from headway.sizes import parse_bytes

__all__ = ["LINKS", "TIERS", "Link", "Tier", "check_tiers", "link_of"]

_GB = 1e9
_REACHED = 0.8
"""Share of a link's peak that moves of whole blocks are taken to reach."""


@dataclass(frozen=True)
class Link:
    """A way to lower memory.

    Attributes:
        name: Its name on the command line.
        read: Peak bytes/s from there.
        write: Peak bytes/s to there.
        latency: Seconds before the first byte, an assumption.
        shared: All ranks of the model go through one.
        source: Where the rates are from.
    """

    name: str
    read: float
    write: float
    latency: float
    shared: bool
    source: str


_PCIE, _ETHERNET = "PCI Express base specification, 16 lanes", "IEEE 802.3, line rate"
_ALL = (
    Link("pcie3", 15.75 * _GB, 15.75 * _GB, 20e-6, False, _PCIE),
    Link("pcie4", 31.5 * _GB, 31.5 * _GB, 20e-6, False, _PCIE),
    Link("pcie5", 63.0 * _GB, 63.0 * _GB, 20e-6, False, _PCIE),
    Link("nvlink-c2c", 450 * _GB, 450 * _GB, 20e-6, False, "NVIDIA Grace Hopper data sheet, 900 GB/s both ways"),
    Link("nvme3", 3.5 * _GB, 3.0 * _GB, 200e-6, True, "Samsung PM983 data sheet"),
    Link("nvme4", 6.9 * _GB, 4.1 * _GB, 200e-6, True, "Samsung PM9A3 data sheet"),
    Link("nvme5", 14.0 * _GB, 7.1 * _GB, 200e-6, True, "Samsung PM1743 data sheet"),
    Link("10gbe", 1.25 * _GB, 1.25 * _GB, 1e-3, True, _ETHERNET),
    Link("25gbe", 3.125 * _GB, 3.125 * _GB, 1e-3, True, _ETHERNET),
    Link("100gbe", 12.5 * _GB, 12.5 * _GB, 1e-3, True, _ETHERNET),
    Link("200gbe", 25.0 * _GB, 25.0 * _GB, 1e-3, True, _ETHERNET),
    Link("400gbe", 50.0 * _GB, 50.0 * _GB, 1e-3, True, _ETHERNET),
)
LINKS: dict[str, Link] = {link.name: link for link in _ALL}
"""Every known link by name."""
TIERS = {"host": "pcie5", "disk": "nvme4", "store": "100gbe"}
"""The tiers, the fastest first, each with the link that it is taken to have."""


@dataclass(frozen=True)
class Tier:
    """One tier of lower memory, as one rank sees it.

    Attributes:
        name: One of `TIERS`.
        memory: Bytes of it for one rank.
        read: Bytes/s that a rank reads.
        write: Bytes/s that a rank writes.
        latency: Seconds before the first byte of a move.
        source: What the rates are from.
    """

    name: str
    memory: int
    read: float
    write: float
    latency: float = 0.0
    source: str = ""


def link_of(tier: str, choice: str, memory: int, ranks: int) -> Tier:
    """The tier of that name behind a link: one of `LINKS`, or a rate of one rank, `20GB/s` or `READ/s,WRITE/s`.

    Args:
        tier: One of `TIERS`.
        choice: The link.
        memory: Bytes for one rank.
        ranks: Ranks of the model, which share a drive or a network card.

    Raises:
        ConfigError: Neither a link nor a rate.
    """
    text = choice.strip().lower()
    if text.endswith("/s"):
        read, _, write = (part.removesuffix("/s") for part in text.partition(","))
        there, back = (float(parse_bytes(rate, f"--{tier}-link")) for rate in (read, write or read))
        return Tier(tier, memory, there, back, LINKS[TIERS[tier]].latency, f"{choice.strip()}, as given")
    found = LINKS.get(text)
    if found is None:
        near = get_close_matches(text, LINKS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ConfigError(
            f"--{tier}-link {choice!r} is no known link{hint}; known are {', '.join(LINKS)}; or give the rate of one "
            f"rank, such as 20GB/s"
        )
    share = _REACHED / (ranks if found.shared else 1)
    of = f", one for {ranks} ranks" if found.shared and ranks > 1 else ""
    source = f"{found.name} ({found.source}{of}), of which {_REACHED:.0%} is taken to be reached"
    return Tier(tier, memory, found.read * share, found.write * share, found.latency, source)


def check_tiers(tiers: Sequence[Tier], memory: int | None) -> None:
    """Refuse tiers that cannot work below `memory` bytes of a rank.

    Raises:
        ConfigError: The message names the tier.
    """
    names = [tier.name for tier in tiers]
    if names != [name for name in TIERS if name in names]:
        raise ConfigError(f"tiers are {', '.join(names)}: give each of {', '.join(TIERS)} once at most, in that order")
    for tier in tiers:
        if tier.memory < 1 or not (tier.read > 0 and tier.write > 0 and tier.latency >= 0):
            raise ConfigError(f"tier {tier.name}: bytes and rates must be positive, and the latency not negative")
    if tiers and memory is None:
        raise ConfigError(f"tier {names[0]}: an endless memory evicts nothing, so nothing would be kept below it")
