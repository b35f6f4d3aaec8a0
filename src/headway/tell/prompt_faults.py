"""What in prompts keeps known text from being reused: where it stands, what it costs, and what mending it would win."""

from __future__ import annotations

from dataclasses import dataclass, field

from headway.sizes import counted

__all__ = ["PromptFault", "PromptFix", "on_fault", "on_faults"]


@dataclass(frozen=True)
class PromptFix:
    """A log that was rewritten and replayed.

    Attributes:
        what: What was changed in it, as in "moved ...".
        prompt_tokens: Its prompt tokens.
        hit_tokens: Of these, reused.
    """

    what: str
    prompt_tokens: int
    hit_tokens: int

    @property
    def reused(self) -> float:
        """Share of the prompt tokens that were reused."""
        return self.hit_tokens / max(1, self.prompt_tokens)

    @property
    def computed(self) -> int:
        """Prompt tokens that were computed."""
        return self.prompt_tokens - self.hit_tokens


@dataclass(frozen=True)
class PromptFault:
    """Something in the prompts of a log.

    Attributes:
        kind: "text" (a text that changes), "tools" (their order), "history" (old messages that are cut).
        start: The token at which prompts part because of it: most often, or that of the example.
        message: Number of its message; None where the log has no messages.
        role: Role of that message, or "".
        texts: Some of the texts that change.
        request: A request that shows it.
        requests: Requests that have it.
        known_tokens: Tokens behind it that an earlier request has, over all requests.
        before: The log before it was mended; what stands above it in a list of faults is mended already.
        fixes: Ways to mend it, the best first. Each computes fewer tokens than `before`.
    """

    kind: str
    start: int
    message: int | None
    role: str
    texts: list[str]
    request: int
    requests: int
    known_tokens: int
    before: PromptFix
    fixes: list[PromptFix] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Known tokens behind it, of all prompt tokens."""
        return self.known_tokens / max(1, self.before.prompt_tokens)

    @property
    def gain(self) -> float:
        """Share of the prompt tokens that need not be computed if it is mended."""
        best = min((fix.computed for fix in self.fixes), default=self.before.computed)
        return (self.before.computed - best) / max(1, self.before.prompt_tokens)


def on_fault(fault: PromptFault) -> str:
    """A fault, and what mending it would win."""
    message = "" if fault.message is None else f", message {fault.message} ({fault.role})"
    where = f"token {fault.start:,}{message}"
    if fault.kind == "tools":
        what = f"At {where}, the same tools come in another order than before"
    elif fault.kind == "history":
        what = f"At {where}, messages that stood there before are cut"
    else:
        texts = " and ".join(f"`{text}`" for text in fault.texts)
        what = f"At {where}, a text changes from request to request{': ' + texts if texts else ''}"
    cost = f"Behind it stand {fault.share:.1%} of all prompt tokens, known and yet computed again"
    best, *others = fault.fixes
    text = (
        f"{what} ({counted(fault.requests, 'request')}; see request {fault.request:,}). {cost}. {best.what}, "
        f"{best.reused:.1%} of the prompt tokens would be reused instead of {fault.before.reused:.1%}"
    )
    text += "".join(f"; {other.what[0].lower()}{other.what[1:]}, {other.reused:.1%}" for other in others)
    if best.prompt_tokens > 1.005 * fault.before.prompt_tokens:
        text += (
            f". Prompts would have {counted(best.prompt_tokens - fault.before.prompt_tokens, 'token')} more, and "
            f"{counted(fault.before.computed - best.computed, 'token')} less would be computed"
        )
    return f"{text}."


def on_faults(faults: list[PromptFault]) -> list[str]:
    """Faults in their order; each is priced with those above it mended."""
    told = [on_fault(fault) for fault in faults]
    return [told[0], *(f"With that mended: {text[0].lower()}{text[1:]}" for text in told[1:])] if told else []
