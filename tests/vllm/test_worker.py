"""Pages that are copied whole, whatever views the layers have of them."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from headway.errors import ConfigError
from headway.vllm.worker import WholePages, copy_pages, install

PAGES, PAGE = 6, 16


def views() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The bytes of two layers' pages, side by side in one buffer, and the views of a state and of attention on each."""
    memory = torch.arange(PAGES * 2 * PAGE, dtype=torch.int32).view(PAGES, 2, PAGE)
    layers = [memory[:, layer] for layer in (0, 1)]
    states = [layer[:, : PAGE // 4] for layer in layers]  # shorter than the page, and named first
    return memory, [*states, *layers]


def test_a_page_is_copied_with_the_extent_of_its_longest_view() -> None:
    memory, caches = views()
    before = memory.clone()
    copy_pages(caches, PAGES, [(1, 4)])
    assert (memory[4] == before[1]).all()
    others = [0, 1, 2, 3, 5]
    assert (memory[others] == before[others]).all()


def test_a_destination_that_is_a_source_gives_what_it_had() -> None:
    memory, caches = views()
    before = memory.clone()
    copy_pages(caches, PAGES, [(0, 1), (1, 2)])
    assert (memory[1] == before[0]).all()
    assert (memory[2] == before[1]).all()


def test_pages_of_several_kernel_blocks() -> None:
    """A kernel may cut a page in blocks of its own: the view then has several rows per page."""
    memory = torch.arange(PAGES * PAGE, dtype=torch.int32).view(PAGES, PAGE)
    before = memory.clone()
    copy_pages([memory.view(PAGES * 4, PAGE // 4)], PAGES, [(5, 0)])
    assert (memory[0] == before[5]).all()
    assert (memory[1:] == before[1:]).all()


def test_nothing_to_copy_reads_nothing() -> None:
    copy_pages(iter([]), PAGES, [])


@pytest.mark.parametrize(
    ("scheduler", "options", "prefix_caching", "says"),
    [
        ("headway.vllm.Scheduler", {"evict": "lru"}, False, "unknown evict"),
        ("headway.vllm.Scheduler", {"eviction": "lruu"}, False, "unknown eviction policy 'lruu'"),
        ("headway.vllm.Scheduler", {"placement": ["junctoin"]}, False, "junctoin"),
        ("headway.vllm.Scheduler", {"pin_share": 2}, False, "pin_share"),
        ("headway.vllm.Scheduler", {}, True, "--no-enable-prefix-caching"),
        ("headway.vllm.Scheduler", {"alignment": 64, "eviction": "lru"}, False, None),
        (None, {"evict": "lru"}, True, None),
    ],
)
def test_a_worker_refuses_before_weights_are_loaded(
    scheduler: str | None, options: dict[str, Any], prefix_caching: bool, says: str | None
) -> None:
    off = dict.fromkeys(("is_encoder_decoder", "is_diffusion", "enabled"), False)
    worker = WholePages()
    worker.vllm_config = SimpleNamespace(
        scheduler_config=SimpleNamespace(scheduler_cls=scheduler),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, prefill_context_parallel_size=1),
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
        model_config=SimpleNamespace(runner_type="generate", **off),
        aux_output_config=SimpleNamespace(**off),
        additional_config={"headway": options},
        kv_transfer_config=None,
        num_prefill_lookahead_tokens=0,
    )
    with pytest.raises(ConfigError, match=says) if says else nullcontext():
        worker.init_worker_extension()


def test_every_runner_of_the_process_takes_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has the old one by name, and one that is imported later and takes it from where vLLM has it."""
    utils, runner = ModuleType("vllm.v1.worker.utils"), ModuleType("vllm.v1.worker.gpu_model_runner")
    for module in (ModuleType("vllm"), ModuleType("vllm.v1"), ModuleType("vllm.v1.worker"), utils, runner):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for module in (utils, runner):
        vars(module)["copy_kv_cache_blocks_inplace"] = None
    install()
    assert vars(utils)["copy_kv_cache_blocks_inplace"] is vars(runner)["copy_kv_cache_blocks_inplace"] is copy_pages
