"""What computes: transformers models over one arena of blocks, through the block tables of the prefix cache.

A model is loaded (`loading`), what it stores is read off a dry run (`inspection`, into a `layout`), its memory is one
byte tensor (`arena`), and `ModelRunner.run` takes a `RunBatch` and gives a `RunResult`. `selfcheck` compares the result
with transformers alone before anything is served, and `sampling` turns logits into tokens.
"""

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
