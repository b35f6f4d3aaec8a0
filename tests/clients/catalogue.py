"""The clients of the table: what is installed for each, and what a machine without the internet needs besides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["CLIENTS", "PROGRAMS", "Client"]

PROGRAMS = Path(__file__).parent / "programs"


@dataclass(frozen=True)
class Client:
    """A client, and the program `programs/use_NAME.py` that uses it.

    Attributes:
        name: Its name.
        packages: What is installed for it; the first is the client itself. From npm for programs in JavaScript.
        title: Its name as its makers write it.
        environment: Variables that it needs on a machine without the internet.
        notes: Every setting beyond base URL, key and model, and why it is there.
        loops: Whether it calls tools in loops, of which the server is to explain every step.
        late: Whether it is among those that are tried as time allows.
        borrows: A variable that names a folder in which it is installed already, for what is too heavy to install.
    """

    name: str
    packages: tuple[str, ...]
    title: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    loops: bool = False
    late: bool = False
    borrows: str = ""

    @property
    def program(self) -> Path:
        """What is run."""
        return next(PROGRAMS.glob(f"use_{self.name}.*"))


_COSTS = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
_COSTS_NOTE = "`LITELLM_LOCAL_MODEL_COST_MAP=True`: the list of prices is not fetched"
_OFFLINE = {"HF_HUB_OFFLINE": "1"}
_TOKENIZER_NOTE = "the tokenizer's folder: it would be looked for on the hub under the model's name"

CLIENTS = (
    Client("openai", ("openai",), loops=True),
    Client("anthropic", ("anthropic",), loops=True),
    Client("litellm", ("litellm",), environment=_COSTS, notes=(_COSTS_NOTE,), loops=True),
    Client("langchain_openai", ("langchain-openai",), "langchain-openai", loops=True),
    Client("pydantic_ai", ("pydantic-ai-slim[openai]",), "pydantic-ai", loops=True),
    Client("instructor", ("instructor",)),
    Client(
        "openai_agents",
        ("openai-agents",),
        "openai-agents",
        notes=("`set_tracing_disabled(True)`: traces would be sent to OpenAI",),
        loops=True,
    ),
    Client("smolagents", ("smolagents[openai]",), loops=True),
    Client(
        "mini_swe_agent",
        ("mini-swe-agent",),
        "mini-swe-agent",
        environment=_COSTS | {"MSWEA_CONFIGURED": "true", "MSWEA_SILENT_STARTUP": "1"},
        notes=(
            _COSTS_NOTE,
            '`cost_tracking="ignore_errors"`: no price is known of a local model',
            "`MSWEA_CONFIGURED=true`: no questions at the first start",
            '`tool_choice: "required"`: so that a model as small as the built-in one makes calls',
        ),
        loops=True,
    ),
    Client(
        "aider",
        ("aider-chat",),
        environment=_COSTS,
        notes=(
            _COSTS_NOTE,
            "`--no-check-update`, `--analytics-disable`: nothing is sent or fetched",
            "`max_tokens: 200` in `.aider.model.settings.yml`: a model as small as the built-in one may never end",
        ),
    ),
    Client(
        "vercel_ai",
        ("ai", "@ai-sdk/openai-compatible", "@ai-sdk/openai", "zod"),
        "Vercel's ai",
        notes=("`store: false`, for `openai.responses` alone: else it refers to answers that it takes to be stored",),
        loops=True,
    ),
    Client("guidellm", ("guidellm",), environment=_OFFLINE, notes=(f"`--processor`: {_TOKENIZER_NOTE}",)),
    Client(
        "lm_eval",
        ("lm-eval[api]", "transformers"),
        "lm-eval",
        environment=_OFFLINE | {"HF_DATASETS_OFFLINE": "1"},
        notes=(f"`tokenizer`: {_TOKENIZER_NOTE}", "tasks in local files"),
    ),
    Client("cache_pressure", ("cache-pressure",), "cache-pressure"),
    Client(
        "vllm",
        ("vllm",),
        "vllm bench serve",
        environment=_OFFLINE,
        notes=(f"`--tokenizer`: {_TOKENIZER_NOTE}",),
        borrows="VLLM",
    ),
    Client("llama_index", ("llama-index-llms-openai-like",), "llama-index", late=True),
    Client("llm", ("llm",), late=True),
    Client("dspy", ("dspy",), environment=_COSTS, notes=(_COSTS_NOTE,), late=True),
    Client("aiperf", ("aiperf",), notes=(f"`--tokenizer`: {_TOKENIZER_NOTE}",), late=True),
)
