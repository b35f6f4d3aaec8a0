"""One request's way through the cache, position by position: what is told of it, and how it reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headway.sizes import counted, format_bytes
from headway.tell.prompt_text import Change, Place
from headway.tell.reasons import MEANING, REMEDIES, UNSAVABLE
from headway.tell.run import Stretch

__all__ = ["Eviction", "Mark", "PlacedLoss", "Story", "story_lines"]

_MOST_MARKS, _MOST_STRETCHES = 40, 16


@dataclass(frozen=True)
class Mark:
    """Something at a position of the prompt's path.

    Attributes:
        position: Tokens before it.
        what: "checkpoint", "gone" (a checkpoint was here), "resident" (attention is kept up to here), "known" (the
            tree knows the path up to here), or "taken" (this request leaves a checkpoint).
        kind: Kind of placement, where it is about a checkpoint.
        uses: How often requests wanted to resume there so far.
        ago: Seconds since it went, where it is gone.
        cause: Why it went.
    """

    position: int
    what: str
    kind: str = ""
    uses: int = 0
    ago: float = 0.0
    cause: str = ""


@dataclass(frozen=True)
class Eviction:
    """Tokens [start, stop) of the prompt that were lost because something went.

    Attributes:
        start: First token.
        stop: Token after the last.
        position: Where a request could have resumed.
        kind: Kind of placement that had taken the checkpoint there; "path" in models that need no checkpoints.
        cause: Why it went.
        ago: Seconds since.
    """

    start: int
    stop: int
    position: int
    kind: str
    cause: str
    ago: float


@dataclass(frozen=True)
class PlacedLoss:
    """Tokens [start, stop) of the prompt that were not reused, and where they begin.

    Attributes:
        reason: Why: a line of the waterfall.
        start: First token.
        stop: Token after the last.
        place: The message and the characters around `start`, where the trace has text.
    """

    reason: str
    start: int
    stop: int
    place: Place


@dataclass(frozen=True)
class Story:
    """One request.

    Attributes:
        request: Its number.
        time: Seconds of the trace at which it arrives.
        prompt_tokens: Tokens of its prompt.
        answer_tokens: Tokens of its answer.
        hit_tokens: Tokens reused.
        endless_tokens: Tokens that an endless memory would reuse.
        resumed_from: Kind of the checkpoint that it resumes from, "path" where none is needed, "" for no hit.
        stretches: The prompt, by who passed before.
        marks: What lies on its path, by position.
        lost: Tokens lost, by line of the waterfall.
        evictions: What had been there of the tokens lost, and why it went.
        evicted: Checkpoints that had to make room for it, by kind.
        losses: What was lost, by place, as the cache finds it before the request runs.
        changed: What changed in front of text that is known; None where nothing did, or where the trace has blocks.
        needed: Bytes of one rank that it needs where the memory can never hold it, else 0.
    """

    request: int
    time: float
    prompt_tokens: int
    answer_tokens: int
    hit_tokens: int
    endless_tokens: int
    resumed_from: str
    stretches: list[Stretch]
    marks: list[Mark]
    lost: dict[str, int]
    evictions: list[Eviction]
    evicted: dict[str, int]
    losses: list[PlacedLoss]
    changed: Change | None
    needed: int = 0


def story_lines(story: Story, name: str) -> Iterator[str]:
    """A story as lines of text."""
    share = story.hit_tokens / story.prompt_tokens
    yield (
        f"Request {story.request:,} of {name}: {counted(story.prompt_tokens, 'prompt token')}, "
        f"{story.answer_tokens:,} of answer, arrives at {story.time:,.1f} s"
    )
    if story.needed:
        size = format_bytes(story.needed, 1000, up=True)
        yield (
            f"It would be refused: it needs {size} of a rank, more than the whole memory of the cache; give more "
            f"memory, or split the model over more ranks (--tp, --dcp)"
        )
        return
    source = f" from a {story.resumed_from} checkpoint" if story.resumed_from not in ("", "path") else ""
    yield (
        f"{story.hit_tokens:,} tokens are reused ({share:.0%}){source}; an endless memory would reuse "
        f"{story.endless_tokens:,}"
    )
    yield ""
    yield "Who was here before"
    yield from _shortened([_stretch_line(stretch) for stretch in story.stretches], _MOST_STRETCHES)
    yield ""
    yield "What is on its path"
    yield from _path(story)
    yield ""
    yield "What is lost"
    for line, tokens in sorted(story.lost.items(), key=lambda item: (item[0] in UNSAVABLE, -item[1])):
        remedy = f"; {REMEDIES[line]}" if line in REMEDIES else ""
        yield f"  {tokens:>9,}  {line}: {MEANING.get(line, '')}{remedy}"
    for lost in story.evictions:
        what = "the path" if lost.kind == "path" else f"the {lost.kind} checkpoint at {lost.position:,}"
        place = f"[{lost.start:,}, {lost.stop:,})"
        yield f"             {place} evicted: {what} was {lost.cause} {lost.ago:,.1f} s ago"
    for loss in story.losses:
        if place := str(loss.place):
            yield f"             [{loss.start:,}, {loss.stop:,}) {loss.reason} at {place}"
    if story.changed is not None:
        yield f"             {story.changed}"
    if story.evicted:
        gone = ", ".join(f"{count:,} {kind}" for kind, count in story.evicted.items())
        yield ""
        yield f"To make room for it, these checkpoints were evicted elsewhere or here: {gone}"


def _who(stretch: Stretch) -> str:
    if not stretch.requests:
        return "new: nobody"
    if stretch.requests == 1:
        return f"request {stretch.first_request:,}"
    return f"{stretch.requests:,} requests, from {stretch.first_request:,} to {stretch.last_request:,}"


def _path(story: Story) -> Iterator[str]:
    if not story.marks:
        yield "  nothing: the cache knows no prompt that begins like this"
        return
    yield from _shortened([f"  {mark.position:>9,}  {_what(mark, story)}" for mark in story.marks], _MOST_MARKS)


def _stretch_line(stretch: Stretch) -> str:
    place = f"[{stretch.start:,}, {stretch.stop:,})"
    return f"  {place:<22}{_who(stretch)}"


def _shortened(lines: Sequence[str], most: int) -> Iterator[str]:
    """All lines, or the first and the last of them."""
    if len(lines) <= most:
        yield from lines
        return
    yield from lines[: most // 2]
    yield f"             ... {len(lines) - 2 * (most // 2):,} more ..."
    yield from lines[-(most // 2) :]


def _what(mark: Mark, story: Story) -> str:
    if mark.what == "checkpoint":
        times = f"wanted {mark.uses:,} times" if mark.uses != 1 else "wanted once"
        here = "  <- it resumes here" if story.hit_tokens and mark.position == story.hit_tokens else ""
        return f"checkpoint ({mark.kind}), {times} so far{here}"
    if mark.what == "gone":
        return f"a checkpoint ({mark.kind}) was here; {mark.cause} {mark.ago:,.1f} s before"
    if mark.what == "taken":
        return f"this request leaves a checkpoint ({mark.kind})"
    return "attention is kept up to here" if mark.what == "resident" else "the cache knows the path up to here"
