"""The `headway` object of an answer: why no more of a prompt was reused, in the words of the client's own prompt.

What is told must not tell a client what others have sent. How far a prompt follows what is known says which tokens
somebody else has sent, one by one, and whoever asks often enough can spell out a stranger's prompt. So a report is
told in full only where everybody who shares the cache may know: to a prompt with a salt, since all that it is compared
with has the same salt, or to everybody if the operator says so. Else it is rounded to the position that the request
resumed at, which its usage tells anyway. All text comes from the client's own prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from headway.cache import Explanation, Loss, Reason
from headway.engine import RequestResult, TextTokenizer
from headway.server.chat.conversation import conversation_of
from headway.server.prompts import PreparedPrompt
from headway.server.protocol import ChatRequest, CompletionRequest
from headway.tell.prompt_text import Change, Place, PromptText

__all__ = ["headway_report", "prompt_text"]

_SCORED = "log probabilities of the prompt were asked for (echo with logprobs): every token of it has to be computed"
_NOT_TOLD = (
    "no more is told of a prompt that others may share: send a cache_salt of your own, or start the server with "
    "--salt-by-key or --explain all"
)


def headway_report(
    prompt: PreparedPrompt, result: RequestResult, text: PromptText, *, told_in_full: bool, everything: bool
) -> dict[str, Any]:
    """Why no more of a prompt was reused, and when things happened: the `headway` object of a response.

    Args:
        prompt: The prompt.
        result: How its request ended.
        text: The prompt as text. Its tokenizer is used, so call this where that may be done.
        told_in_full: Whether the client may know how far the prompt follows what is known, see the head of this module.
        everything: And whether it may know what prompts of other salts have told the cache.
    """
    found, timings = result.explanation, result.timings
    scored = result.request.prompt_logprobs is not None
    losses, changed, matched = _rounded_losses(result), None, result.cached_tokens
    if told_in_full and found is not None:
        lines = found.losses if everything else _own_losses(found)
        losses = [_loss(one.reason.value, one.start, one.stop, _detail(one, prompt, scored)) for one in lines]
        changed, matched = found.displaced, found.matched
        if changed is not None and _spelled_otherwise(changed.start, prompt):
            changed = None  # the client sent the very text
    return {
        "prompt_tokens": result.prompt_tokens,
        "cached_tokens": result.cached_tokens,
        "loaded_tokens": result.loaded,
        "waited_tokens": result.waited_tokens,
        "resumed_from": result.resumed_from or None,
        "matched_tokens": matched,
        "losses": [_placed(loss, text.place(loss["start"])) for loss in losses],
        "changed": None if changed is None else _changed(text.change(changed)),
        "boundaries": list(prompt.boundaries),
        "breakpoints": list(prompt.breakpoints),
        "own_answers": [
            {"start": own.start, "stop": own.stop, "restored": own.restored}
            for own in prompt.answers
            if own.restored or told_in_full
        ],
        "tools": prompt.tools if told_in_full else "",
        "preemptions": result.preemptions,
        "seconds": {
            "queue": _rounded(timings.queue),
            "first_token": _rounded(timings.to_first_token),
            "total": _rounded(timings.total),
        },
    }


def prompt_text(
    request: ChatRequest | CompletionRequest, prompt: PreparedPrompt, tokenizer: TextTokenizer
) -> PromptText:
    """The prompt of a request as its client knows it."""
    if isinstance(request, CompletionRequest):
        return PromptText(prompt.tokens.tolist(), tokenizer.piece)
    asked = conversation_of(request, tokenizer)

    def render(messages: Sequence[dict[str, Any]]) -> str:
        return replace(asked, messages=messages).render(tokenizer)

    return PromptText(prompt.tokens.tolist(), tokenizer.piece, prompt.text, asked.messages, render)


def _own_losses(explanation: Explanation) -> Iterator[Loss]:
    """The losses without what prompts of other salts have told the cache.

    Operators see it in the metrics, summed over all requests.
    """
    for loss in explanation.losses:
        if loss.reason is Reason.OTHER_NAMESPACE:
            reason = Reason.PARTED if explanation.matched else Reason.NOTHING_MATCHED
            yield Loss(reason, loss.start, explanation.prompt_tokens)
            return
        yield loss


def _rounded_losses(result: RequestResult) -> list[dict[str, Any]]:
    """What is lost, as far as the position that the request resumed at tells it."""
    start, stop = result.cached_tokens, result.prompt_tokens
    if result.request.prompt_logprobs is not None:
        return [_loss(Reason.COMPUTED_ANEW.value, start, stop, _SCORED)]
    if start == stop - 1:
        return [_loss(Reason.LAST_TOKEN.value, start, stop, "")]
    return [_loss("not_told", start, stop, _NOT_TOLD)]


def _detail(loss: Loss, prompt: PreparedPrompt, scored: bool) -> object:
    """What else there is to say of a loss."""
    if scored and loss.reason is Reason.COMPUTED_ANEW:
        return _SCORED
    if prompt.cut and loss.reason in (Reason.NOTHING_MATCHED, Reason.PARTED):
        return (
            f"{prompt.cut} tokens in front of it were cut off (truncate_prompt_tokens): a prompt that grows begins "
            "elsewhere each time, and shares nothing with itself"
        )
    if loss.reason is Reason.PARTED and _spelled_otherwise(loss.start, prompt):
        return (
            f"an answer of this server, in other tokens from {loss.start} on than it was given in: the tokenizer "
            f"writes its text so, and --no-restore-answers leaves it at that"
        )
    return loss.detail or ""


def _spelled_otherwise(position: int, prompt: PreparedPrompt) -> bool:
    """Whether an answer is sent back there as it was given, and begins to be in other tokens."""
    return any(own.differs == position and not own.restored for own in prompt.answers)


def _loss(reason: str, start: int, stop: int, detail: object) -> dict[str, Any]:
    return {"reason": reason, "start": start, "stop": stop, "detail": str(detail)}


def _changed(found: Change) -> dict[str, Any]:
    return {
        "start": found.start,
        "stop": found.stop,
        "message": _message(found.place),
        "text": found.text,
        "same_tokens": found.same_tokens,
        "told": str(found),
    }


def _placed(loss: dict[str, Any], place: Place) -> dict[str, Any]:
    return loss | {"message": _message(place), "before": place.before, "after": place.after}


def _message(place: Place) -> dict[str, Any] | None:
    return None if place.index is None else {"index": place.index, "role": place.role}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
