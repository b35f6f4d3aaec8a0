"""The conversations: multi-turn sessions under two shared instructions, some of which branch.

Texts are random tokens. A cache knows nothing of what tokens mean, and the tiny model knows nothing at all. Lengths are
those of an agent's traffic with Kimi-K3, divided by `SCALE`: the model's blocks of 1,536 tokens become blocks of 32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.formats import Trace, TraceBuilder

__all__ = ["ANSWER", "BLOCK", "SCALE", "Request", "Turn", "conversations", "recorded", "turns"]

BLOCK = 32
"""Tokens in a block on one rank, as vLLM lays pages out: 1,536 for Kimi-K3."""
SCALE = 1536 // BLOCK
ANSWER = 6
"""Tokens of an answer."""
_INSTRUCTIONS = (210, 95)
_SESSIONS = ((0, (14, 42, 23, 31)), (0, (37, 19, 55)), (1, (22, 48, 17)), (1, (64, 29)))
"""For each session its instructions, and the tokens of each message."""
_BRANCHES = ((0, 1, (26, 33)), (2, 0, (41,)))
"""A session, the number of its turn behind which another way is taken, and the tokens of each message there."""
_FIRST, _LAST = 3, 4096
"""Token ids that texts are made of: a vocabulary without its special tokens."""

Ints = NDArray[np.int32]
Answer = Callable[[Ints], Ints]


@dataclass(frozen=True)
class Turn:
    """A request that is to be made.

    Attributes:
        name: Session or branch, and turn, such as `A2`.
        before: Number of the request whose prompt and answer this one continues; None for a first turn.
        messages: int32 [n] each, what follows: instructions and a message, or a message.
    """

    name: str
    before: int | None
    messages: tuple[Ints, ...]


@dataclass(frozen=True)
class Request:
    """A request that was answered.

    Attributes:
        name: As its turn is called.
        tokens: int32 [n], the prompt.
        boundaries: Where its messages end.
        answer: int32 [m].
    """

    name: str
    tokens: Ints
    boundaries: tuple[int, ...]
    answer: Ints


def turns(seed: int = 0) -> list[Turn]:
    """All turns, in the order in which they are asked: the sessions take turns, and branches come last."""
    random = np.random.default_rng(seed)

    def text(tokens: int) -> Ints:
        return random.integers(_FIRST, _LAST, tokens, dtype=np.int32)

    instructions = [text(tokens) for tokens in _INSTRUCTIONS]
    found: list[Turn] = []
    last: dict[tuple[int, int], int] = {}
    for turn in range(max(len(messages) for _, messages in _SESSIONS)):
        for session, (under, messages) in enumerate(_SESSIONS):
            if turn < len(messages):
                start = () if turn else (instructions[under],)
                name = f"{chr(ord('A') + session)}{turn + 1}"
                found.append(Turn(name, last.get((session, turn - 1)), (*start, text(messages[turn]))))
                last[session, turn] = len(found) - 1
    for session, turn, messages in _BRANCHES:
        before = last[session, turn]
        for number, tokens in enumerate(messages, turn + 2):
            found.append(Turn(f"{chr(ord('A') + session)}{number}'", before, (text(tokens),)))
            before = len(found) - 1
    return found


def conversations(asked: list[Turn], answer: Answer) -> Iterator[Request]:
    """Ask every turn: its prompt contains all before it, the answers included.

    Args:
        asked: The turns.
        answer: From a prompt to its answer.
    """
    done: list[Request] = []
    for turn in asked:
        parts: list[Ints] = []
        ends: list[int] = []
        if turn.before is not None:
            before = done[turn.before]
            parts, ends = [before.tokens, before.answer], [*before.boundaries]
            ends.append(len(before.tokens) + len(before.answer))
        for message in turn.messages:
            parts.append(message)
            ends.append(sum(map(len, parts)))
        tokens = np.concatenate(parts)
        done.append(Request(turn.name, tokens, tuple(ends), answer(tokens)))
        yield done[-1]


def recorded(requests: list[Request]) -> Trace:
    """The conversations as a trace, one request per second."""
    builder = TraceBuilder("sessions", "made", 1)
    for time, one in enumerate(requests):
        builder.add_tokens(one.tokens.tolist(), one.answer.tolist(), float(time), boundaries=one.boundaries)
    return builder.build()
