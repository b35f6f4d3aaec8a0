"""Generation on one prefix cache: an `Engine` takes requests, its scheduler forms steps, an `Executor` computes them.

Rooms: `scheduling` (who computes what next, and what fits), `ranks` (this process, processes or Ray actors as
executors), and `build`, which puts an engine together from a model's name.

Nothing imported here needs torch: the scheduler runs as well in a replay of traces. What runs a model, `ranks` and
`build`, is imported by those who want it.
"""

from headway.engine.config import DEFAULT_WAIT_TOKENS, EngineConfig, ParallelConfig
from headway.engine.engine import Engine, ModelFacts
from headway.engine.errors import (
    EngineBusyError,
    EngineStoppedError,
    NotFiniteError,
    QueueFullError,
    RanksLostError,
    RequestFailedError,
)
from headway.engine.executor import Executor, StepWork
from headway.engine.handle import RequestHandle
from headway.engine.request import (
    Delta,
    GenerationRequest,
    RequestResult,
    RunningRequest,
    Timings,
    Update,
)
from headway.engine.scheduling.admission import longest_servable
from headway.engine.scheduling.drafts import DraftPlanner, StepCosts
from headway.engine.scheduling.queue import FairQueue
from headway.engine.scheduling.scheduler import Scheduler
from headway.engine.scheduling.step import ScheduledStep
from headway.engine.stats import (
    TOKEN_SECONDS,
    Distribution,
    EngineCounters,
    EngineSnapshot,
    EngineSurvey,
    LowerStats,
    Observer,
    RequestView,
)
from headway.engine.text import TextStream
from headway.engine.tokenizer import HubTokenizer, TextTokenizer
from headway.runtime.interface import Constraint, RowAnswer, TokenLogprob

__all__ = [
    "DEFAULT_WAIT_TOKENS",
    "TOKEN_SECONDS",
    "Constraint",
    "Delta",
    "Distribution",
    "DraftPlanner",
    "Engine",
    "EngineBusyError",
    "EngineConfig",
    "EngineCounters",
    "EngineSnapshot",
    "EngineStoppedError",
    "EngineSurvey",
    "Executor",
    "FairQueue",
    "GenerationRequest",
    "HubTokenizer",
    "LowerStats",
    "ModelFacts",
    "NotFiniteError",
    "Observer",
    "ParallelConfig",
    "QueueFullError",
    "RanksLostError",
    "RequestFailedError",
    "RequestHandle",
    "RequestResult",
    "RequestView",
    "RowAnswer",
    "RunningRequest",
    "ScheduledStep",
    "Scheduler",
    "StepCosts",
    "StepWork",
    "TextStream",
    "TextTokenizer",
    "Timings",
    "TokenLogprob",
    "Update",
    "longest_servable",
]
