"""GPUs by name: memory and peak rates, from the vendors' data sheets.

Rates are those of dense matrices; a sheet that prints the rate with sparsity is halved. Gigabytes are 10^9 bytes, as
the sheets print them; what the driver keeps for itself is not taken off.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from headway.errors import ConfigError

__all__ = ["GPUS", "Gpu", "gpu_of"]

_GB, _TB, _TERA = 10**9, 1e12, 1e12


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    Attributes:
        name: Its name on the command line.
        memory_bytes: Device memory.
        bf16_flops: Peak FLOP/s in bf16, dense.
        fp8_flops: Peak FLOP/s in fp8, dense; None where it has no fp8.
        memory_bandwidth: Bytes/s between it and its memory.
        source: Where the figures are from.
        link: Its link to the host, of `LINKS`.
    """

    name: str
    memory_bytes: int
    bf16_flops: float
    fp8_flops: float | None
    memory_bandwidth: float
    source: str
    link: str = "pcie5"


_ALL = (
    Gpu("a100-40gb", 40 * _GB, 312 * _TERA, None, 1.555 * _TB, "NVIDIA A100 data sheet, SXM", "pcie4"),
    Gpu("a100-80gb", 80 * _GB, 312 * _TERA, None, 2.039 * _TB, "NVIDIA A100 data sheet, SXM", "pcie4"),
    Gpu("h100", 80 * _GB, 989.4 * _TERA, 1978.9 * _TERA, 3.35 * _TB, "NVIDIA H100 data sheet, SXM; rates halved"),
    Gpu("h20", 96 * _GB, 148 * _TERA, 296 * _TERA, 4.0 * _TB, "NVIDIA H20 figures as quoted by resellers"),
    Gpu("h200", 141 * _GB, 989.4 * _TERA, 1978.9 * _TERA, 4.8 * _TB, "NVIDIA H200 data sheet, SXM; rates halved"),
    Gpu("b200", 180 * _GB, 2250 * _TERA, 4500 * _TERA, 7.7 * _TB, "NVIDIA HGX B200 data sheet, one of eight"),
    Gpu("l40s", 48 * _GB, 362.05 * _TERA, 733 * _TERA, 0.864 * _TB, "NVIDIA L40S data sheet", "pcie4"),
    Gpu("mi300x", 192 * _GB, 1307.4 * _TERA, 2614.9 * _TERA, 5.3 * _TB, "AMD Instinct MI300X data sheet"),
    Gpu("mi325x", 256 * _GB, 1307.4 * _TERA, 2614.9 * _TERA, 6.0 * _TB, "AMD Instinct MI325X data sheet"),
)
GPUS: dict[str, Gpu] = {gpu.name: gpu for gpu in _ALL}
"""Every known GPU by name."""


def gpu_of(name: str) -> Gpu:
    """The GPU of that name, in any case; `a100` is the one of 80 GB.

    Raises:
        ConfigError: Not in the catalogue.
    """
    key = name.lower().replace("_", "-").replace(" ", "-").removesuffix("-sxm")
    found = GPUS.get({"a100": "a100-80gb"}.get(key, key))
    if found is None:
        near = get_close_matches(key, GPUS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ConfigError(f"unknown GPU {name!r}{hint}; known are {', '.join(GPUS)}; or give --memory, of one rank")
    return found
