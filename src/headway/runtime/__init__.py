"""What computes: transformers models over one arena of blocks, through the block tables of the prefix cache.

A model is loaded (`loading`) and compared with transformers alone before anything is served (`selfcheck`). What is
inside stands in rooms, each of which uses only those before it: `model` (what a model stores, read off a dry run),
`parallel` (ranks that share a model), `forward` (one step: `ModelRunner.run` takes a `RunBatch` and gives a
`RunResult`, and `sampling` turns logits into tokens), `drafting` (speculative decoding).

The names below are imported when they are asked for, because torch takes seconds: a command that fails for a cheap
reason must not wait for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.runtime.forward.arena import Arena
    from headway.runtime.forward.batch import RunBatch, RunResult, StateMove, batch_of
    from headway.runtime.forward.runner import ModelRunner
    from headway.runtime.forward.sampling import Sampled, sample
    from headway.runtime.interface import SampleRow, SamplingParams, TokenLogprob
    from headway.runtime.loading import LoadedModel, load_model
    from headway.runtime.model.inspection import inspect_model
    from headway.runtime.model.layout import ModelLayout
    from headway.runtime.model.memory import Capacity, blocks_that_fit, capacity, default_memory
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
    "Arena": "headway.runtime.forward.arena",
    "Capacity": "headway.runtime.model.memory",
    "LoadedModel": "headway.runtime.loading",
    "ModelLayout": "headway.runtime.model.layout",
    "ModelRunner": "headway.runtime.forward.runner",
    "RunBatch": "headway.runtime.forward.batch",
    "RunResult": "headway.runtime.forward.batch",
    "SampleRow": "headway.runtime.interface",
    "Sampled": "headway.runtime.forward.sampling",
    "SamplingParams": "headway.runtime.interface",
    "SelfCheck": "headway.runtime.selfcheck",
    "StateMove": "headway.runtime.forward.batch",
    "TokenLogprob": "headway.runtime.interface",
    "Verdict": "headway.runtime.selfcheck",
    "batch_of": "headway.runtime.forward.batch",
    "blocks_that_fit": "headway.runtime.model.memory",
    "capacity": "headway.runtime.model.memory",
    "default_memory": "headway.runtime.model.memory",
    "inspect_model": "headway.runtime.model.inspection",
    "load_model": "headway.runtime.loading",
    "sample": "headway.runtime.forward.sampling",
    "self_check": "headway.runtime.selfcheck",
}
"""Every public name, and the module that it is imported from when it is first asked for."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
