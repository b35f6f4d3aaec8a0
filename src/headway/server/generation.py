"""From the fields of a request to what the engine generates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headway.engine import Engine, GenerationRequest
from headway.errors import RequestError
from headway.runtime.interface import Constraint, SamplingParams
from headway.server.prompts import PreparedPrompt
from headway.server.protocol import ChatRequest, CompletionRequest, GenerationFields
from headway.sizes import counted

__all__ = ["generation_requests"]

_MOST_DIGITS = 10
"""Digits of a token id; int() refuses texts of thousands."""
_COMPLETION_TOKENS = 16
"""Tokens of a plain completion that does not say how many it wants, as in the OpenAI API."""


def generation_requests(
    request: ChatRequest | CompletionRequest,
    prompt: PreparedPrompt,
    engine: Engine,
    constraint: Constraint | None = None,
) -> list[GenerationRequest]:
    """One request to the engine for each of the `n` answers to a prompt, which all have the form of `constraint`.

    Raises:
        RequestError: Fields that contradict each other or the model's length.
    """
    limit = _max_tokens(request, len(prompt.tokens), engine.max_model_len)
    pin = request.headway.pin
    common: dict[str, Any] = {
        "tokens": prompt.tokens,
        "text": prompt.text,
        "max_tokens": limit,
        "stop": request.stops,
        "stop_token_ids": tuple(request.stop_token_ids or ()),
        "ignore_eos": request.ignore_eos,
        "user": request.user or request.cache_salt or "",
        "salt": request.cache_salt or "",
        "boundaries": prompt.boundaries,
        "breakpoints": prompt.breakpoints,
        "pin": len(prompt.tokens) if pin is True else min(int(pin), len(prompt.tokens)),
        "no_store": request.headway.no_store,
        "constraint": constraint,
        "pin_seconds": _pin_seconds(request, engine.config.pin_seconds),
        "stop_shown": request.include_stop_str_in_output,
        "special_shown": not request.skip_special_tokens,
        "answers": request.n or 1,
    }
    if pin and request.headway.no_store:
        raise RequestError("pin keeps a prefix and no_store keeps nothing; choose one", "headway.pin", "invalid_value")
    if (request.min_tokens or 0) > limit:
        told = f"min_tokens is {request.min_tokens}, and the answer has at most {limit}"
        raise RequestError(told, "min_tokens", "invalid_value")
    if request.min_tokens and constraint is not None:
        told = "a form says where the answer ends, and so does min_tokens: leave one of them out"
        raise RequestError(told, "min_tokens", "invalid_value")
    size = engine.model.vocab_size
    made = [GenerationRequest(sampling=_sampling(request, i, size), **common) for i in range(request.n or 1)]
    if isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None:
        made[0] = replace(made[0], prompt_logprobs=request.logprobs)
    return made


def _pin_seconds(request: GenerationFields, longest: float) -> float | None:
    seconds, name = request.headway.pin_seconds, "headway.pin_seconds"
    if seconds is not None and not request.headway.pin:
        raise RequestError("headway.pin_seconds needs headway.pin", name, "invalid_value")
    if seconds is not None and seconds > longest:
        raise RequestError(f"pins last {longest:g} seconds at most here (--pin-seconds)", name, "invalid_value")
    return seconds


def _max_tokens(request: GenerationFields, prompt: int, model_limit: int) -> int:
    given, name = request.max_tokens, "max_tokens"
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        if given not in (None, request.max_completion_tokens):
            raise RequestError(
                "max_tokens and max_completion_tokens differ; send one of them", "max_tokens", "invalid_value"
            )
        given, name = request.max_completion_tokens, "max_completion_tokens"
    room = model_limit - prompt
    if given is not None and isinstance(request, ChatRequest) and request.CLIPS:
        given = min(given, max(1, room))
    if given is not None and given > room >= 1:
        raise RequestError(
            f"{name} is {given} and the prompt has {counted(prompt, 'token')}, but this server allows {model_limit} of "
            f"both together: ask for at most {room}",
            name,
            "context_length_exceeded",
        )
    if room < 1:
        raise RequestError(
            f"the prompt has {counted(prompt, 'token')}, and this server allows {model_limit} of prompt and answer "
            f"together",
            "messages" if isinstance(request, ChatRequest) else "prompt",
            "context_length_exceeded",
        )
    if given is not None:
        return given
    return room if isinstance(request, ChatRequest) else min(room, _COMPLETION_TOKENS)


def _sampling(request: ChatRequest | CompletionRequest, choice: int, vocabulary: int) -> SamplingParams:
    """Sampling parameters of one answer; with a seed, each answer gets its own."""
    return SamplingParams(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=max(0, request.top_k or 0),
        min_p=request.min_p or 0.0,
        seed=None if request.seed is None else _seed_of(request.seed, choice),
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=_logit_bias(request, vocabulary),
        logprobs=_logprobs(request),
        min_tokens=request.min_tokens or 0,
    )


def _seed_of(seed: int, choice: int) -> int:
    return (seed + choice + 2**63) % 2**64 - 2**63


def _logit_bias(request: GenerationFields, vocabulary: int) -> dict[int, float]:
    biases = {}
    for token, bias in (request.logit_bias or {}).items():
        if not token.isdecimal() or len(token) > _MOST_DIGITS or int(token) >= vocabulary:
            shown = token if len(token) <= _MOST_DIGITS else token[:_MOST_DIGITS] + "..."
            raise RequestError(f"logit_bias: {shown!r} is not one of the {vocabulary} tokens", "logit_bias")
        biases[int(token)] = bias
    return biases


def _logprobs(request: ChatRequest | CompletionRequest) -> int | None:
    """How many likely tokens to report at each place; None for no log probabilities at all."""
    if isinstance(request, CompletionRequest):
        return request.logprobs
    if request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None
