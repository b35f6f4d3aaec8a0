"""What computes: transformers models over one arena of blocks, through the block tables of the prefix cache.

A model is loaded (`loading`), what it stores is read off a dry run (`inspection`, into a `layout`), its memory is one
byte tensor (`arena`), and `ModelRunner.run` takes a `RunBatch` and gives a `RunResult`. `selfcheck` compares the result
with transformers alone before anything is served, and `sampling` turns logits into tokens.

The names below are imported when they are asked for, because torch takes seconds: a command that fails for a cheap
reason must not wait for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.runtime.arena import Arena
    from headway.runtime.batch import RunBatch, RunResult, StateMove, batch_of
    from headway.runtime.inspection import inspect_model
    from headway.runtime.layout import ModelLayout
    from headway.runtime.loading import LoadedModel, load_model
    from headway.runtime.memory import Capacity, blocks_that_fit, capacity, default_memory
    from headway.runtime.runner import ModelRunner
    from headway.runtime.sampling import Sampled, SampleRow, SamplingParams, TokenLogprob, sample
    from headway.runtime.selfcheck import SelfCheck, Verdict, self_check

__all__ = [
    "Arena",
    "Capacity",
    "LoadedModel",
    "ModelLayout",
    "ModelRunner",
    "RunBatch",
    "RunResult",
    "SampleRow",
    "Sampled",
    "SamplingParams",
    "SelfCheck",
    "StateMove",
    "TokenLogprob",
    "Verdict",
    "batch_of",
    "blocks_that_fit",
    "capacity",
    "default_memory",
    "inspect_model",
    "load_model",
    "sample",
    "self_check",
]

_HOMES = {
    "Arena": "headway.runtime.arena",
    "Capacity": "headway.runtime.memory",
    "LoadedModel": "headway.runtime.loading",
    "ModelLayout": "headway.runtime.layout",
    "ModelRunner": "headway.runtime.runner",
    "RunBatch": "headway.runtime.batch",
    "RunResult": "headway.runtime.batch",
    "SampleRow": "headway.runtime.sampling",
    "Sampled": "headway.runtime.sampling",
    "SamplingParams": "headway.runtime.sampling",
    "SelfCheck": "headway.runtime.selfcheck",
    "StateMove": "headway.runtime.batch",
    "TokenLogprob": "headway.runtime.sampling",
    "Verdict": "headway.runtime.selfcheck",
    "batch_of": "headway.runtime.batch",
    "blocks_that_fit": "headway.runtime.memory",
    "capacity": "headway.runtime.memory",
    "default_memory": "headway.runtime.memory",
    "inspect_model": "headway.runtime.inspection",
    "load_model": "headway.runtime.loading",
    "sample": "headway.runtime.sampling",
    "self_check": "headway.runtime.selfcheck",
}
"""Every public name, and the module that it is imported from when it is first asked for."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
