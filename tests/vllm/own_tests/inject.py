"""A pytest plugin that runs vLLM's own scheduler tests with `headway.vllm`: `pytest -p tests.vllm.own_tests.inject`.

The modules of those tests make schedulers by the names `Scheduler` and `AsyncScheduler`; those names get ours. With
ours, vLLM's own prefix caching is off and Headway's cache is always on, so a test that asks for prefix caching asks it
of Headway's.
"""

import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest
import vllm.v1.core.sched.async_scheduler as asynchronous
import vllm.v1.core.sched.scheduler as synchronous

import headway.vllm

OWN = {"Scheduler": synchronous.Scheduler, "AsyncScheduler": asynchronous.AsyncScheduler}


def _ours(base: type[Any]) -> type[Any]:
    class Judged(base):
        def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            vllm_config.cache_config.enable_prefix_caching = False
            vllm_config.parallel_config.worker_extension_cls = "headway.vllm.WholePages"
            super().__init__(vllm_config, *args, **kwargs)

    return Judged


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import tests.v1.core.utils as helper

    modules = {helper, *(item.module for item in items if isinstance(item, pytest.Function))}
    ours = {name: _ours(getattr(headway.vllm, name)) for name in OWN} if os.environ.get("JUDGED") == "headway" else OWN
    for module in modules:
        for name, own in OWN.items():
            if getattr(module, name, None) is own:
                setattr(module, name, ours[name])


@pytest.fixture
def caplog_vllm(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.LogCaptureFixture]:
    """Logged lines of vLLM, whose logger passes nothing on by default; vLLM's own conftest has one like it."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO):
        yield caplog
