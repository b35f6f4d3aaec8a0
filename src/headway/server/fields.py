"""Fields of each kind of API that this server does not have: those that are refused, and those that are ignored.

A field that would change the answer is refused with what to do instead. A client that sends it with the value that
asks for nothing (`"suffix": ""`) gets its answer: many clients always send the whole list. A field that cannot change
the answer is taken, and told (`headway.server.records`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from headway.errors import RequestError

__all__ = [
    "HINTS",
    "MESSAGES_HINTS",
    "MESSAGES_UNSUPPORTED",
    "RESPONSES_HINTS",
    "RESPONSES_UNSUPPORTED",
    "STREAM_HINTS",
    "UNSUPPORTED",
    "Unsupported",
    "named_as",
    "refuse_unsupported",
]

Unsupported = Mapping[str, tuple[tuple[Any, ...], str]]
"""Field -> the values that ask for nothing, and why it is refused otherwise."""

_EMPTY: tuple[Any, ...] = (None,)
_EMPTY_LIST: tuple[Any, ...] = (None, [])

_TOOLS = "send tools and tool_choice, which took its place"
_SAMPLER = "use temperature, top_p, top_k and min_p"

UNSUPPORTED: Unsupported = {
    "functions": (_EMPTY_LIST, _TOOLS),
    "function_call": ((None, "none", "auto"), _TOOLS),
    "modalities": ((None, ["text"]), "answers are only text"),
    "audio": (_EMPTY, "answers are only text"),
    "web_search_options": (_EMPTY, "nothing is searched; put what the model should know into the prompt"),
    "verbosity": ((None, "medium"), "use the prompt to ask for a shorter or longer answer"),
    "documents": (_EMPTY_LIST, "put what the model should know into the messages"),
    "chat_template": (_EMPTY, "a template is a program, and clients do not choose programs; use chat_template_kwargs"),
    "cache_control": (
        _EMPTY,
        "put it on a message or on a part of its content, to mark the end of what others share; the end of a prompt is "
        "kept anyway",
    ),
    "length_penalty": ((None, 1), "there is no beam search; ask for n answers and choose"),
    "use_beam_search": ((None, False), "there is no beam search; ask for n answers and choose"),
    "best_of": ((None, 1), "ask for n answers and choose"),
    "suffix": ((None, ""), "answers only continue a prompt"),
    "prompt_logprobs": (_EMPTY, "ask /v1/completions for echo and logprobs"),
    "bad_words": (_EMPTY_LIST, "use logit_bias to keep tokens away"),
    "allowed_token_ids": (_EMPTY, "use logit_bias to keep tokens away"),
    "logits_processors": (_EMPTY_LIST, "use logit_bias"),
    "typical_p": ((None, 1), _SAMPLER),
    "mirostat": ((None, 0), _SAMPLER),
    "dry_multiplier": ((None, 0), _SAMPLER),
    "xtc_probability": ((None, 0), _SAMPLER),
}
"""Chat and plain completions."""

HINTS = {
    "metadata": "nothing is stored that it could be attached to",
    "store": "answers are not stored",
    "prompt_cache_key": "prefixes are found by their tokens, without a key",
    "prompt_cache_retention": "what is kept is decided by what it saves; headway.pin keeps a prefix",
    "safety_identifier": "the field user is used for a fair queue",
    "service_tier": "there is one service tier",
    "priority": "the queue is fair among users",
    "request_id": "the header x-request-id is used",
    "prediction": "to guess ahead, serve with --draft",
    "spaces_between_special_tokens": "tokens are written as they are",
    "mm_processor_kwargs": "only text is taken",
}
"""Field of a body -> what is done instead; it cannot change the answer, so it is taken and told."""
STREAM_HINTS = frozenset({"continuous_usage_stats", "include_obfuscation", "chunk_size"})
"""The same for `stream_options`."""

_CHAT = "/v1/chat/completions has it"
_OF_CHATS: Unsupported = {
    **{name: told for name, told in UNSUPPORTED.items() if name != "cache_control"},
    "guided_choice": (_EMPTY, _CHAT),
    "guided_grammar": (_EMPTY, _CHAT),
    "guided_json": (_EMPTY, _CHAT),
    "guided_regex": (_EMPTY, _CHAT),
    "add_generation_prompt": ((None, True), _CHAT),
    "add_special_tokens": ((None, False), _CHAT),
    "continue_final_message": ((None, False), _CHAT),
    "logprobs": ((None, False), _CHAT),
    "top_logprobs": ((None, 0), _CHAT),
    "stop": (_EMPTY_LIST, _CHAT),
}
"""What would change the answers of chats, and is no field of the other APIs."""
_NOT_STORED = "nothing is stored: send the earlier input, and the items of the output as they came, in input"

RESPONSES_UNSUPPORTED: Unsupported = {
    **_OF_CHATS,
    "cache_control": UNSUPPORTED["cache_control"],
    "previous_response_id": ((None, ""), f"{_NOT_STORED}; what was computed of it is reused"),
    "conversation": (_EMPTY, f"{_NOT_STORED}; what was computed of it is reused"),
    "background": ((None, False), "the answer is in the response; stream: true shows it as it comes"),
    "prompt": (_EMPTY, "there are no stored prompts: send instructions and input"),
    "moderation": (_EMPTY, "answers are not moderated"),
    "messages": (_EMPTY, "send input"),
    "max_tokens": (_EMPTY, "send max_output_tokens"),
    "max_completion_tokens": (_EMPTY, "send max_output_tokens"),
    "response_format": (_EMPTY, "send text.format"),
    "reasoning_effort": (_EMPTY, "send reasoning.effort"),
    "n": ((None, 1), "there is one answer; send several requests"),
}
RESPONSES_HINTS = {
    **{name: told for name, told in HINTS.items() if name != "prediction"},
    "access_programs": "there are none",
    "background_options": "nothing runs in the background",
    "context_management": "nothing is compacted or left out",
    "image": "only text is taken",
    "include": "there is no more to include",
    "max_tool_calls": "the server calls no tools itself",
    "prompt_cache_options": "what is kept is decided by what it saves; headway.pin keeps a prefix",
    "truncation": "nothing is left out of the input: what does not fit is refused",
}

MESSAGES_UNSUPPORTED: Unsupported = {
    **_OF_CHATS,
    "container": (_EMPTY, "no code is run here"),
    "mcp_servers": (_EMPTY_LIST, "no MCP server is asked; send its tools in tools"),
    "stop": (_EMPTY_LIST, "send stop_sequences"),
    "max_completion_tokens": (_EMPTY, "send max_tokens"),
    "response_format": (_EMPTY, "send output_config.format"),
    "reasoning_effort": (_EMPTY, "send output_config.effort"),
    "n": ((None, 1), "there is one answer; send several requests"),
}
MESSAGES_HINTS = {
    "context_management": "nothing is cleared or compacted",
    "inference_geo": "this server computes where it stands",
    "service_tier": "there is one service tier",
    "speed": "there is one speed",
}


def refuse_unsupported(body: Mapping[str, Any], unsupported: Unsupported = UNSUPPORTED) -> dict[str, Any]:
    """Return `body` without the fields that are `unsupported`, and without those that are null.

    Raises:
        RequestError: One of them asks for something; the message says why that is not possible.
    """
    for name, (neutral, reason) in unsupported.items():
        if name in body and not any(_same(body[name], value) for value in neutral):
            raise RequestError(f"{name} is not supported here: {reason}", name, "unsupported_parameter")
    return {name: value for name, value in body.items() if name not in unsupported and value is not None}


@contextlib.contextmanager
def named_as(names: Mapping[str, str]) -> Iterator[None]:
    """Speak of the fields of a body by their names there, not by those of the chat that it was translated to."""
    try:
        yield
    except RequestError as error:
        told, param = str(error), error.param or ""
        for name, here in names.items():
            if "_" in name:  # others are words as well
                told = re.sub(rf"\b{re.escape(name)}\b", here, told)
        for name, here in names.items():
            pattern = re.escape(name).replace(r"\[\]", r"\[(\d+)\]")
            if found := re.match(rf"{pattern}(?!\w)", param):
                renamed = here.replace("[]", f"[{''.join(found.groups())}]")
                told = told.replace(found[0], renamed) if "." in found[0] else told
                param = renamed + param[found.end() :]
                break
        raise RequestError(told, param or None, error.code) from None


def _same(given: Any, neutral: Any) -> bool:
    """Equal, and not a boolean that happens to equal a number."""
    return bool(given == neutral) and isinstance(given, bool) == isinstance(neutral, bool)
