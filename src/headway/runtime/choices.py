"""What options may be, where the engine's option records check it and the runtime acts on it.

Nothing here needs torch, so that a command line can be refused before it is imported.
"""

from __future__ import annotations

from enum import StrEnum

__all__ = ["COMMUNICATIONS", "MOST_DRAFT_TOKENS", "AcceptanceRule"]

COMMUNICATIONS = ("ag_rs", "a2a")
"""How context-parallel ranks merge their attention; see `headway.runtime.context_parallel`."""

MOST_DRAFT_TOKENS = 16
"""Most tokens of one draft; the cache takes a bounded number of tokens from one step."""


class AcceptanceRule(StrEnum):
    """How drafted tokens of a sampled answer are judged; a greedy answer is the same under each.

    See `headway.runtime.drafting.acceptance`.
    """

    MATCH = "match"
    TOKEN = "token"
    BLOCK = "block"
