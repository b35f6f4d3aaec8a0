"""The `headway` object of an answer: why no more of a prompt was reused, in the words of the client's own prompt.

What is told must not tell a client what others have sent. How far a prompt follows what is known says which tokens
somebody else has sent, one by one, and whoever asks often enough can spell out a stranger's prompt. So a report is
told in full only where everybody who shares the cache may know: to a prompt with a salt, since all that it is compared
with has the same salt, or to everybody if the operator says so. Else it is rounded to the position that the request
resumed at, which its usage tells anyway. All text comes from the client's own prompt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache, cached_property
from itertools import accumulate
from typing import Any

from headway.cache import Displaced, Explanation, Loss, Outcome, Reason
from headway.engine import RequestResult, TextTokenizer
from headway.server.prompts import PreparedPrompt, common_start, plain_message
from headway.server.protocol import ChatRequest, CompletionRequest
from headway.sizes import counted

__all__ = ["PromptText", "headway_report", "pin_report"]

NOT_TOLD = "not_told"
_NOT_TOLD = (
    "no more is told of a prompt that others may share: send a cache_salt of your own, or start the server with "
    "--salt-by-key or --explain all"
)
_AROUND = 24
"""Characters that are shown on each side of a position."""
_LONGEST_CHANGE = 80
_WORD, _WORD_ENDS = re.compile(r"[\w.:/=+@#%&-]*"), re.compile(r"[\w.:/=+@#%&-]*\Z")
"""What is shown of the words that a change begins and ends in: a time, a date, a name with its value."""
_MARK = "\ue000"
"""A character that no template and hardly a message has: where it comes out, a message ends."""


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
    losses, changed, matched = _rounded_losses(result), None, result.cached_tokens
    if told_in_full and found is not None:
        lines = found.losses if everything else _own_losses(found)
        losses = [_loss(one.reason.value, one.start, one.stop, one.detail or "") for one in lines]
        changed, matched = found.displaced, found.matched
    return {
        "prompt_tokens": result.prompt_tokens,
        "cached_tokens": result.cached_tokens,
        "resumed_from": result.resumed_from or None,
        "matched_tokens": matched,
        "losses": [loss | text.place(loss["start"]) for loss in losses],
        "changed": None if changed is None else _changed(changed, text),
        "boundaries": list(prompt.boundaries),
        "breakpoints": list(prompt.breakpoints),
        "preemptions": result.preemptions,
        "seconds": {
            "queue": _rounded(timings.queue),
            "first_token": _rounded(timings.to_first_token),
            "total": _rounded(timings.total),
        },
    }


def pin_report(result: RequestResult) -> dict[str, Any]:
    """What became of the pin of a request that asked for one: the tokens that it protects, or why there is none."""
    wish = next((wish for wish in result.wishes if wish.kind == "pin"), None)
    if wish is None:  # the server reuses no prefixes, or the request never ran
        return {"tokens": 0, "outcome": Outcome.NOT_STORED.value}
    return {"tokens": wish.position if wish.outcome is Outcome.KEPT else 0, "outcome": wish.outcome.value}


class PromptText:
    """A prompt as its client knows it: its characters, and the messages that they stand in.

    A token's characters are the bytes that the tokenizer says it stands for, so that what is shown is there whatever
    a template made of the messages. Where a message ends is found by rendering the conversation with a mark behind it.
    """

    def __init__(
        self, request: ChatRequest | CompletionRequest, prompt: PreparedPrompt, tokenizer: TextTokenizer
    ) -> None:
        self._messages = request.messages if isinstance(request, ChatRequest) else []
        self._options = request.chat_template_kwargs or {} if isinstance(request, ChatRequest) else {}
        self._tokens: list[int] = prompt.tokens.tolist()
        self._text = prompt.text
        self._tokenizer = tokenizer
        self._piece = cache(tokenizer.piece)
        self._end = cache(self._find_end)

    def place(self, position: int) -> dict[str, Any]:
        """Where a token stands: its message, and the characters before it and from it on."""
        return {
            "message": self._message(position),
            "before": self.characters(max(0, position - _AROUND), position)[-_AROUND:],
            "after": self.characters(position, position + _AROUND)[:_AROUND],
        }

    def characters(self, start: int, stop: int) -> str:
        """The whole characters in tokens [start, stop)."""
        return b"".join(map(self._piece, self._tokens[start:stop])).decode(errors="ignore")

    def _message(self, position: int) -> dict[str, Any] | None:
        """The message that a token stands in; None behind the last one, and where that cannot be told."""
        offset = self._offset(position) if self._messages else None
        if offset is None:
            return None
        low, high = 0, len(self._messages)
        while low < high:
            middle = (low + high) // 2
            end = self._end(middle)
            if end is None:
                return None
            low, high = (low, middle) if offset <= end else (middle + 1, high)
        return None if low == len(self._messages) else {"index": low, "role": self._messages[low].role}

    def _offset(self, position: int) -> int | None:
        """Characters of the text before a token, or None if the tokens do not spell the text."""
        if not self._stops:
            return None
        stop = self._stops[position - 1] if position else 0
        return len(self._text.encode()[: max(0, stop)].decode(errors="ignore"))

    @cached_property
    def _stops(self) -> list[int]:
        """Bytes of the text before the end of each token; empty if the tokens do not spell the text."""
        pieces = [self._piece(token) for token in self._tokens]
        spelled, text = b"".join(pieces), self._text.encode()
        space = spelled == b" " + text  # some tokenizers write one in front
        return list(accumulate(map(len, pieces), initial=-space))[1:] if space or spelled == text else []

    def _find_end(self, index: int) -> int | None:
        """Characters of the text up to the end of a message's content; None where the template hides it."""
        plain = [plain_message(message, message.parts()) for message in self._messages]
        plain[index]["content"] += _MARK
        try:
            rendered = self._tokenizer.render(plain, answer=True, options=self._options)
        except Exception:  # a template may refuse what it does not know
            return None
        return None if rendered == self._text else common_start(rendered, self._text)


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
    if start == stop - 1:
        return [_loss(Reason.LAST_TOKEN.value, start, stop, "")]
    return [_loss(NOT_TOLD, start, stop, _NOT_TOLD)]


def _loss(reason: str, start: int, stop: int, detail: object) -> dict[str, Any]:
    return {"reason": reason, "start": start, "stop": stop, "detail": str(detail)}


def _changed(found: Displaced, text: PromptText) -> dict[str, Any]:
    place = text.place(found.start)
    message, change = place["message"], _whole_words(found, text)
    where = "" if message is None else f", message {message['index']} ({message['role']})"
    same = counted(found.tokens, "token")
    what = f", `{change}`" if found.stop > found.start else ": text that stood there before is missing"
    return {
        "start": found.start,
        "stop": found.stop,
        "message": message,
        "text": change,
        "same_tokens": found.tokens,
        "told": f"changed at token {found.start:,}{where}{what}; {same} behind it are the same as before: if what "
        f"changes stood behind them, or not at all, they could be reused",
    }


def _whole_words(found: Displaced, text: PromptText) -> str:
    """The text of a change, with the rest of the words that it begins and ends in."""
    if found.start == found.stop:
        return ""
    before = text.characters(max(0, found.start - _AROUND), found.start)
    change = text.characters(found.start, found.stop)
    after = text.characters(found.stop, found.stop + _AROUND)
    head, tail = _WORD_ENDS.search(before), _WORD.match(after)
    assert head is not None
    assert tail is not None
    whole = (head[0] + change + tail[0]).strip(" \n\t.,;:!?()[]{}\"'")
    return whole if len(whole) <= _LONGEST_CHANGE else whole[: _LONGEST_CHANGE - 3] + "..."


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
