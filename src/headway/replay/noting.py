"""From the cache's explanation of one prompt to lines of the waterfall, in tokens."""

from __future__ import annotations

from headway.cache import Explanation, Reason
from headway.replay.result import FORGOTTEN, LINES, Recording

__all__ = ["note_explanation"]

_LINE = {reason: LINES.index(reason.value) for reason in Reason}


def note_explanation(
    recording: Recording,
    request: int,
    explanation: Explanation,
    length: int,
    symbol: int,
    match: int,
    *,
    tokens: int | None = None,
    resends: bool = False,
    unknown: str = FORGOTTEN,
) -> None:
    """Write down what became of a prompt.

    Args:
        recording: Where to.
        request: The request.
        explanation: What the cache said, in symbols.
        length: Symbols of the prompt.
        symbol: Tokens of a symbol; the last one may have fewer.
        match: Tokens that an endless memory would reuse.
        tokens: Tokens of the prompt; as many as symbols if not given.
        resends: A prompt that is known to its end and resumes behind its whole blocks is a resend: in tokens its
            checkpoint lies before its last token.
        unknown: Line for tokens that an endless memory would reuse and the cache does not know.
    """
    tokens, lost = tokens or length * symbol, recording.lost
    if explanation.matched == length and explanation.hit_tokens == length - 1 and resends:
        recording.hits[request] = tokens - 1
        lost[_LINE[Reason.LAST_TOKEN], request] = 1
        return
    hit = explanation.hit_tokens * symbol
    if hit == tokens:
        hit, lost[_LINE[Reason.LAST_TOKEN], request] = tokens - 1, 1
    recording.hits[request] = hit
    forgotten = match - (tokens - 1 if explanation.matched == length else explanation.matched * symbol)
    for loss in explanation.losses:
        amount = (tokens if loss.stop >= length else loss.stop * symbol) - loss.start * symbol
        if forgotten > 0 and loss.reason in (Reason.PARTED, Reason.NOTHING_MATCHED):
            lost[LINES.index(unknown), request] += forgotten
            amount -= forgotten
        elif loss.reason is Reason.LAST_TOKEN and loss.stop >= length:
            lost[_LINE[Reason.EVICTED], request] += amount - 1
            amount = 1
        lost[_LINE[loss.reason], request] += amount
