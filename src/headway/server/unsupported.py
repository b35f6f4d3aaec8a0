"""Fields of the OpenAI API that this server does not have. They are refused with the reason, never ignored.

A client that sends such a field with the value that asks for nothing (`"tools": []`, `"store": false`) gets its
answer: many clients always send the whole list. A field that is in neither list is unknown and refused as well, so
that a misspelt one is noticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.errors import RequestError

__all__ = ["UNSUPPORTED", "refuse_unsupported"]

_EMPTY: tuple[Any, ...] = (None,)
_EMPTY_LIST: tuple[Any, ...] = (None, [])
_EMPTY_MAP: tuple[Any, ...] = (None, {})
_ZERO: tuple[Any, ...] = (None, 0)

_TOOLS = "describe the tools in the prompt, and read the calls from the text of the answer"

UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "tools": (_EMPTY_LIST, _TOOLS),
    "tool_choice": ((None, "none", "auto"), _TOOLS),
    "parallel_tool_calls": ((None, True, False), _TOOLS),
    "functions": (_EMPTY_LIST, _TOOLS),
    "function_call": ((None, "none", "auto"), _TOOLS),
    "modalities": ((None, ["text"]), "answers are only text"),
    "audio": (_EMPTY, "answers are only text"),
    "prediction": (_EMPTY, "leave it out; to guess ahead, serve with --draft"),
    "web_search_options": (_EMPTY, "nothing is searched; put what the model should know into the prompt"),
    "reasoning_effort": (_EMPTY, "use chat_template_kwargs if the model's template has such a switch"),
    "verbosity": (_EMPTY, "use the prompt to ask for a shorter or longer answer"),
    "min_tokens": (_ZERO, "use ignore_eos to get answers of a fixed length"),
    "length_penalty": ((None, 1), "there is no beam search; ask for n answers and choose"),
    "use_beam_search": ((None, False), "there is no beam search; ask for n answers and choose"),
    "best_of": ((None, 1), "ask for n answers and choose"),
    "suffix": ((None, ""), "answers only continue a prompt"),
    "prompt_logprobs": (_EMPTY, "log probabilities are those of the answer; ask for logprobs"),
    "store": ((None, False), "answers are not stored"),
    "metadata": (_EMPTY_MAP, "nothing is stored that it could be attached to"),
    "service_tier": ((None, "auto", "default"), "there is one service tier"),
    "prompt_cache_key": (
        _EMPTY,
        "prefixes are found by their tokens, without a key; cache_salt keeps prefixes apart and headway.pin keeps them",
    ),
    "cache_control": (
        _EMPTY,
        "put it on a message or on a part of its content, to mark the end of what others share; the end of a prompt is "
        "kept anyway",
    ),
    "prompt_cache_retention": (_EMPTY, "use headway.pin to keep a prefix"),
    "safety_identifier": (_EMPTY, "use the field user"),
    "continue_final_message": ((None, False), "the prompt always ends with the start of an answer"),
    "add_generation_prompt": ((None, True), "the prompt always ends with the start of an answer"),
    "skip_special_tokens": ((None, True), "special tokens are never part of the text"),
}
"""Field -> the values that ask for nothing, and why it is refused otherwise."""


def refuse_unsupported(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return `body` without the fields of `UNSUPPORTED`.

    Raises:
        RequestError: One of them asks for something; the message says why that is not possible.
    """
    for name, (neutral, reason) in UNSUPPORTED.items():
        if name in body and not any(_same(body[name], value) for value in neutral):
            raise RequestError(f"{name} is not supported here: {reason}", name, "unsupported_parameter")
    return {name: value for name, value in body.items() if name not in UNSUPPORTED}


def _same(given: Any, neutral: Any) -> bool:
    """Equal, and not a boolean that happens to equal a number."""
    return bool(given == neutral) and isinstance(given, bool) == isinstance(neutral, bool)
