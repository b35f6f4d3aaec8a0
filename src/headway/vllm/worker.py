"""Whole copies of pages in vLLM's workers: `--worker-extension-cls headway.vllm.WholePages`.

In a hybrid model a layer of states and a layer of attention share pages, so their views start at the same address. vLLM
(0.32, 0.33) copies what starts at one address once, with the extent of the first view there. Where that is the state's,
which is shorter, a copied page of attention lacks its end (vllm#55112), and a request that resumes on the copy computes
other tokens. A worker extension is loaded in every worker, before its model runner runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch

from headway.vllm.options import check_config, is_ours

__all__ = ["WholePages", "copy_pages", "install"]

_MODULES = ("vllm.v1.worker.utils", "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
"""Modules of vLLM: the one that has the function, and those that took it from there by name."""


def copy_pages(kv_caches: Iterable[torch.Tensor], num_blocks: int, kv_cache_block_copies: Sequence[Any]) -> None:
    """Copy pages as vLLM's `copy_kv_cache_blocks_inplace` does, but all bytes that any view of a layer has of a page.

    All sources are read before anything is written.

    Args:
        kv_caches: Views of layers, each [k x num_blocks, ...], of any dtype; several may show the same bytes.
        num_blocks: Pages.
        kv_cache_block_copies: Pairs (source, destination) of page ids.
    """
    if not kv_cache_block_copies:
        return
    pairs = torch.from_numpy(np.array(kv_cache_block_copies, dtype=np.int64))
    views = {(v.device, v.data_ptr(), v.dtype, v.shape, v.stride()): v for v in kv_caches}
    moves = []
    for view in views.values():
        pages: torch.Tensor = view.unflatten(0, (num_blocks, -1))  # type: ignore[no-untyped-call]
        sources, destinations = pairs.to(view.device).unbind(dim=1)
        moves.append((pages, destinations, pages[sources]))
    for pages, destinations, content in moves:
        pages[destinations] = content


class WholePages:
    """An extension of vLLM's worker. With it, copied pages are whole.

    Attributes:
        vllm_config: The worker's.
    """

    vllm_config: Any

    def init_worker_extension(self) -> None:
        """Refuse before weights are loaded what the scheduler, which vLLM makes last, would refuse after them.

        vLLM calls it from 0.33 on. Earlier releases know nothing of it, and the scheduler refuses.

        Raises:
            ConfigError: An option or a configuration that cannot be served; says what to do.
        """
        if is_ours(self.vllm_config):
            check_config(self.vllm_config)


def install() -> None:
    """Let vLLM's model runners of this process copy whole pages, those that are imported later too."""
    import_module(_MODULES[0])
    for name in _MODULES:
        if name in sys.modules:
            vars(sys.modules[name])["copy_kv_cache_blocks_inplace"] = copy_pages
