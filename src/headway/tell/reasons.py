"""The lines of the hit waterfall: every prompt token that a run served is reused or on exactly one of them."""

from __future__ import annotations

from headway.cache import Reason

__all__ = ["FORGOTTEN", "LINES", "LOADED", "MEANING", "REMEDIES", "UNSAVABLE"]

FORGOTTEN = "forgotten"
"""Known to an endless memory, and so long gone here that not even its tokens were remembered."""
LOADED = "loaded"
"""Tokens that were reused, and read back from lower tiers of memory: a line of its own beside "reused"."""
LINES = (*(reason.value for reason in Reason), FORGOTTEN)
"""The lines, by name."""
MEANING = {
    Reason.NOTHING_MATCHED.value: "no earlier prompt begins like this one",
    Reason.PARTED.value: "earlier prompts go on differently from here",
    Reason.LAST_TOKEN.value: "the last token is always computed",
    Reason.OTHER_NAMESPACE.value: "known under another model, adapter or salt",
    Reason.EVICTED.value: "was kept, and had to make room",
    FORGOTTEN: "so long gone that nothing of it is remembered",
    Reason.STATE_NEVER_TAKEN.value: "computed before, but no checkpoint was taken there",
    Reason.LOOKAHEAD.value: "a draft's entries depend on later tokens",
    Reason.NO_ROOM.value: "the memory cannot hold the prompt and what resuming here would copy",
    Reason.COMPUTED_ANEW.value: "computing it anew took less, or log probabilities of it were asked for",
    Reason.STILL_COMPUTING.value: "a running request is computing it",
    Reason.TIER_MISSED.value: "no lower tier had it",
    Reason.TIER_FAILED.value: "a lower tier failed to load it",
}
"""What each line of the waterfall means."""
UNSAVABLE = (Reason.NOTHING_MATCHED.value, Reason.PARTED.value, Reason.LAST_TOKEN.value, Reason.OTHER_NAMESPACE.value)
"""Lines that no memory could save."""
REMEDIES = {
    Reason.EVICTED.value: "give more memory, split the attention over more ranks (--dcp), or make states smaller",
    FORGOTTEN: "give more memory: these prefixes come back long after they had to go",
    Reason.STATE_NEVER_TAKEN.value: "try other places for checkpoints (--placement), or mark breakpoints in requests",
    Reason.LOOKAHEAD.value: "use a draft whose entries do not look ahead (DFlash, DSpark)",
    Reason.NO_ROOM.value: "give a little more memory than the longest prompt needs",
    Reason.COMPUTED_ANEW.value: "mark breakpoints near the ends of prompts, serve a model that continues by chunks, or "
    "give lower tiers a faster link",
    Reason.STILL_COMPUTING.value: "send what shares a prefix a little apart, or all of it to one server",
}
"""What an operator can do about each line that a memory could save."""
