"""Generation on one prefix cache: queue, scheduler, executor, engine.

Nothing imported here needs torch: the scheduler runs as well in a replay of traces. What runs a model in this process
is in `headway.engine.local` and `headway.engine.build`, imported by those who want it.
"""

from headway.engine.capacity import blocks_needed, longest_servable
from headway.engine.config import EngineConfig
from headway.engine.drafts import DraftPlanner, StepCosts
from headway.engine.engine import Engine, Vocabulary
from headway.engine.errors import (
    EngineBusyError,
    EngineStoppedError,
    QueueFullError,
    RanksLostError,
    RequestFailedError,
)
from headway.engine.executor import DraftOutput, Executor, StepOutput, StepWork
from headway.engine.handle import RequestHandle
from headway.engine.parallel import ParallelConfig
from headway.engine.queue import FairQueue
from headway.engine.request import (
    Delta,
    GenerationRequest,
    RequestResult,
    RunningRequest,
    Timings,
    Update,
)
from headway.engine.scheduler import Scheduler
from headway.engine.stats import EngineCounters, EngineSnapshot, Observer
from headway.engine.steps import ScheduledStep
from headway.engine.text import TextStream
from headway.engine.tokenizer import HubTokenizer, TextTokenizer
from headway.runtime.sampling_records import TokenLogprob

__all__ = [
    "Delta",
    "DraftOutput",
    "DraftPlanner",
    "Engine",
    "EngineBusyError",
    "EngineConfig",
    "EngineCounters",
    "EngineSnapshot",
    "EngineStoppedError",
    "Executor",
    "FairQueue",
    "GenerationRequest",
    "HubTokenizer",
    "Observer",
    "ParallelConfig",
    "QueueFullError",
    "RanksLostError",
    "RequestFailedError",
    "RequestHandle",
    "RequestResult",
    "RunningRequest",
    "ScheduledStep",
    "Scheduler",
    "StepCosts",
    "StepOutput",
    "StepWork",
    "TextStream",
    "TextTokenizer",
    "Timings",
    "TokenLogprob",
    "Update",
    "Vocabulary",
    "blocks_needed",
    "longest_servable",
]
