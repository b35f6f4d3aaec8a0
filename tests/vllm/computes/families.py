"""Which families vLLM computes as transformers does: without any cache, each prompt whole and in chunks.

Where vLLM itself differs, a cache cannot be judged by the numbers.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.vllm.computes.models import OPTIONS, VOCABULARY, forgotten, log_probabilities, make, rounding

__all__ = ["EXACT", "Family", "compare", "table"]

EXACT = 1e-4
"""fp32 in another order of operations differs by less. For bf16 see `Family.near`."""
_LENGTHS = (400, 257, 130, 49)
_ANSWER = 16
_CHUNK, _WHOLE = 48, 1024


@dataclass(frozen=True)
class Family:
    """What was found of a family.

    Attributes:
        name: Its name.
        dtype: What vLLM's kernels for it take: "float32", or else "bfloat16".
        near: Log-probabilities that differ by less are equal. In bf16: twice what transformers in bf16 differs by.
        groups: vLLM's KV cache groups, and tokens per page of each.
        whole: Largest difference in log-probability from transformers, each prompt in one step.
        chunked: The same in chunks of 48 tokens.
        tokens: Answers, of `2 * len(_LENGTHS)`, whose tokens are all those that transformers finds best, or nearly.
        forgotten: Difference that it makes to forget all but a prompt's last token.
        error: What vLLM said instead.
    """

    name: str
    dtype: str = "float32"
    groups: dict[str, int] = field(default_factory=dict)
    near: float = EXACT
    whole: float = 0.0
    chunked: float = 0.0
    tokens: int = 0
    forgotten: float = 0.0
    error: str = ""

    @property
    def equal(self) -> bool:
        """Whether a cache can be judged on it."""
        return not self.error and max(self.whole, self.chunked) < self.near and self.tokens == 2 * len(_LENGTHS)


def compare(name: str, folder: Path, log: Path) -> Family:
    """Judge one family. `folder` gets its model, `log` what vLLM prints."""
    from tests.vllm.computes.engine import apart

    try:
        apart(make, name, folder, log=log)
        memory = apart(forgotten, folder, _prompts()[0], log=log)
        try:
            return _compare(name, folder, "float32", EXACT, memory, log)
        except RuntimeError as error:
            if "BF16" not in str(error):
                raise
        near = 2 * apart(rounding, folder, _prompts()[0], log=log)
        return _compare(name, folder, "bfloat16", near, memory, log)
    except RuntimeError as error:
        return Family(name, error=str(error).splitlines()[0][:160])


def _compare(name: str, folder: Path, dtype: str, near: float, memory: float, log: Path) -> Family:
    from tests.vllm.computes.engine import apart

    gaps, groups, equal = [], {}, 0
    for tokens_per_step in (_WHOLE, _CHUNK):
        groups, answers = apart(_answer, folder, {"dtype": dtype, **OPTIONS.get(name, {})}, tokens_per_step, log=log)
        gap, same = apart(_judge, folder, near, answers, log=log)
        gaps.append(gap)
        equal += same
    return Family(name, dtype, groups, near, *gaps, equal, memory)


def _prompts() -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(3, VOCABULARY) for _ in range(length)] for length in _LENGTHS]


def _answer(folder: Path, options: dict[str, Any], tokens_per_step: int) -> tuple[dict[str, int], list[Any]]:
    from tests.vllm.computes.engine import Engine

    engine = Engine(folder, "none", **options, max_num_seqs=4, max_num_batched_tokens=tokens_per_step)
    answers = []
    for i, prompt in enumerate(_prompts()):
        engine.ask(str(i), prompt, _ANSWER, of_prompt=True)
        while engine.busy:
            answers += [(answer.prompt, answer.tokens, answer.logs) for answer in engine.step().values()]
    return engine.groups, answers


def _judge(folder: Path, near: float, answers: list[Any]) -> tuple[float, int]:
    worst, equal = 0.0, 0
    for prompt, tokens, logs in answers:
        text = prompt + tokens
        right = log_probabilities(folder, text)
        told = right[range(len(text) - 1), text[1:]].tolist()
        worst = max(worst, *(abs(a - b) for a, b in zip(told, logs, strict=True)))
        of_answer = right[len(prompt) - 1 : -1]
        equal += bool((of_answer.max(-1).values - of_answer[range(len(tokens)), tokens] < near).all())
    return worst, equal


def table(found: list[Family]) -> str:
    """The families as a table of Markdown."""
    lines = [
        "| family | vLLM's groups | dtype | prompts whole | in chunks of 48 | answers equal | all forgotten | |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for one in found:
        if one.error:
            lines.append(f"| {one.name} | | | | | | | does not run: {one.error} |")
            continue
        lines.append(
            f"| {one.name} | {', '.join(f'{kind} {size}' for kind, size in one.groups.items())} | {one.dtype} "
            f"| {one.whole:.1e} | {one.chunked:.1e} "
            f"| {one.tokens} of {2 * len(_LENGTHS)} | {one.forgotten:.2f} | {'equal' if one.equal else 'differs'} |"
        )
    return "\n".join(lines)
