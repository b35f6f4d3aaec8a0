"""vLLM's engine in this process, on a CPU, without a server: made by arguments, driven step by step.

vLLM takes seconds to import and one engine per process. So it is imported once and each engine gets a fork of its own.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
    TQDM_DISABLE="1",
)

from vllm.inputs import TokensPrompt

import vllm
from vllm import LLM, SamplingParams

__all__ = ["LENGTH", "Answer", "Engine", "apart", "vllm_version"]

LENGTH = 512
"""Longest sequence."""


def vllm_version() -> str:
    """The version of the vLLM that is imported."""
    return str(vllm.__version__)


@dataclass
class Answer:
    """What an engine answered.

    Attributes:
        prompt: Tokens asked.
        tokens: Tokens answered.
        logs: Log-probabilities of these tokens, and before them those of the prompt's but the first, if asked for.
        cached: Tokens of the prompt that were not computed.
    """

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logs: list[float] = field(default_factory=list)
    cached: int = 0


class Engine:
    """One vLLM engine.

    Attributes:
        scheduler: Its scheduler.
        preemptions: Requests preempted so far.
    """

    def __init__(self, folder: Path, cache: str, *, length: int = LENGTH, **options: Any) -> None:
        """`cache`: "none", "vllm" or "headway". `length`: tokens of the longest request. `options` are vLLM's own."""
        if cache == "headway":
            options["scheduler_cls"] = "headway.vllm.Scheduler"
            options["worker_extension_cls"] = "headway.vllm.WholePages"
        self._llm = LLM(
            str(folder),
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=length,
            block_size=32,
            enable_prefix_caching=cache == "vllm",
            **options,
        )
        self.scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
        self.preemptions = 0
        self._preempt, self.scheduler._preempt_request = self.scheduler._preempt_request, self._count
        self._asked: dict[str, Answer] = {}

    def _count(self, *args: Any, **kwargs: Any) -> Any:
        self.preemptions += 1
        return self._preempt(*args, **kwargs)

    @property
    def groups(self) -> dict[str, int]:
        """Its KV cache groups: a kind, numbered if there are several of it, to tokens per page."""
        found: dict[str, int] = {}
        for group in self.scheduler.kv_cache_config.kv_cache_groups:
            kind = type(group.kv_cache_spec).__name__.removesuffix("Spec")
            same = sum(name.split()[0] == kind for name in found)
            found[f"{kind} {same + 1}" if same else kind] = group.kv_cache_spec.block_size
        return found

    def ask(self, name: str, prompt: Sequence[int], length: int, *, of_prompt: bool = False) -> None:
        """Add a request for `length` tokens."""
        sampling = SamplingParams(
            max_tokens=length,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            prompt_logprobs=0 if of_prompt else None,
        )
        self._asked[name] = Answer(list(prompt))
        self._llm.llm_engine.add_request(name, TokensPrompt(prompt_token_ids=list(prompt)), sampling)

    def abort(self, name: str) -> None:
        """Give a request up."""
        self._llm.llm_engine.abort_request([name])
        del self._asked[name]

    @property
    def busy(self) -> bool:
        """Whether requests are left."""
        return bool(self._llm.llm_engine.has_unfinished_requests())

    def step(self) -> dict[str, Answer]:
        """One step. Returns the requests that have ended, by name."""
        done = {}
        for output in self._llm.llm_engine.step():
            if not output.finished or output.request_id not in self._asked:
                continue
            answer, got = self._asked.pop(output.request_id), output.outputs[0]
            answer.tokens, answer.cached = list(got.token_ids), output.num_cached_tokens or 0
            told = list(zip(answer.tokens, got.logprobs, strict=True))
            if output.prompt_logprobs:
                told = [*zip(answer.prompt[1:], output.prompt_logprobs[1:], strict=True), *told]
            answer.logs = [of[token].logprob for token, of in told]
            done[output.request_id] = answer
        return done

    def reset(self) -> None:
        """Forget all that is cached."""
        self.scheduler.reset_prefix_cache()


def apart(function: Callable[..., Any], *args: Any, log: Path) -> Any:
    """Run a function in a fork of this process and return what it returns, through JSON. `log` takes what it prints.

    Raises:
        RuntimeError: It raised, with the last line of what it said, or died.
    """
    reading, writing = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(reading)
        with log.open("ab", buffering=0) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        try:
            result = {"value": function(*args)}
        except BaseException as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"}
        with os.fdopen(writing, "w") as pipe:
            json.dump(result, pipe, default=asdict)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    result = json.loads(text) if text else {"error": f"died with status {os.waitstatus_to_exitcode(status)}, see {log}"}
    if "error" in result:
        raise RuntimeError(result["error"])
    return result["value"]
