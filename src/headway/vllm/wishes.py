"""What a request may ask of the cache, and what it is told.

A request asks by `kv_transfer_params={"headway": {...}}`, or by flat names in `vllm_xargs`: `headway_pin` and so on.
What cannot be granted is no reason to refuse an answer: it is left out, and said.

What is told must not tell a client what others have sent: see `headway.server.report`. So it is told in full to who has
a `cache_salt`, and to everybody if the operator says so; else it is rounded to where the request resumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.cache import Explanation, Hit, Lease, Loss, Reason

__all__ = ["DryRun", "Wishes", "read_wishes", "report"]

_NAMES = ("pin", "pin_seconds", "breakpoints", "no_store", "explain", "dry_run")
_FLAGS = ("no_store", "explain", "dry_run")
_WORDS = {"true": True, "false": False}
"""vLLM's `vllm_xargs` have no truth values: what a client sends as true arrives as 1, so `pin` takes 1 as true."""
NOT_TOLD = "not_told"
"""The reason that stands for all where no more may be told."""


@dataclass
class Wishes:
    """What a request asks for.

    Attributes:
        pin: First tokens to protect from eviction.
        pin_seconds: For how long; None for the operator's default.
        breakpoints: Positions that should get a checkpoint.
        no_store: It leaves nothing behind.
        explain: It wants to know what became of its tokens.
        dry_run: It wants to know what would, and no answer: nothing is computed.
        refused: What is wrong with wishes that are left out.
    """

    pin: int = 0
    pin_seconds: float | None = None
    breakpoints: tuple[int, ...] = ()
    no_store: bool = False
    explain: bool = False
    dry_run: bool = False
    refused: list[str] = field(default_factory=list)


def read_wishes(extra_args: Mapping[str, Any] | None, tokens: int, *, pins: bool = True) -> Wishes:
    """The wishes in the `extra_args` of a request's sampling parameters.

    Args:
        extra_args: Or None.
        tokens: Tokens of its prompt.
        pins: Whether the operator allows pins and breakpoints.
    """
    wishes = Wishes()
    if not extra_args:
        return wishes
    given = extra_args.get("kv_transfer_params")
    nested = (given.get("headway") or {}) if isinstance(given, Mapping) else {}
    flat = {name[8:]: value for name, value in extra_args.items() if name.startswith("headway_")}
    if not isinstance(nested, Mapping):
        nested, wishes.refused = {}, [f'"headway" must be an object, not {nested!r}']
    for name, value in {**nested, **flat}.items():
        if name not in _NAMES:
            wishes.refused.append(f"unknown: {name}; there are {', '.join(_NAMES)}")
        elif not pins and name not in _FLAGS:
            wishes.refused.append(f"{name}: the operator allows no pins")
        else:
            _take(wishes, name, value, tokens)
    if wishes.pin and wishes.no_store:
        wishes.pin = 0
        wishes.refused.append("pin: a request with no_store leaves nothing behind")
    return wishes


def _take(wishes: Wishes, name: str, value: Any, tokens: int) -> None:
    """Set one wish, or say what is wrong with it."""
    value = _WORDS.get(value, value) if isinstance(value, str) else value
    whole = isinstance(value, int)
    if name in _FLAGS:
        if value in (0, 1):
            setattr(wishes, name, bool(value))
        else:
            wishes.refused.append(f"{name} must be true or false, not {value!r}")
    elif name == "pin":
        if whole and 0 <= value <= max(1, tokens):
            wishes.pin = tokens if value == 1 else int(value)
        else:
            wishes.refused.append(f"pin must be true or a number of tokens up to {tokens}, not {value!r}")
    elif name == "pin_seconds":
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1e12:
            wishes.pin_seconds = float(value)
        else:
            wishes.refused.append(f"pin_seconds must be a number above 0, not {value!r}")
    elif isinstance(value, list) and all(type(one) is int and 0 < one <= tokens for one in value):
        wishes.breakpoints = tuple(value)
    else:
        wishes.refused.append(f"breakpoints must be a list of positions from 1 to {tokens}, not {value!r}")


@dataclass(frozen=True)
class DryRun:
    """What is known of a request that has no lease: of a `Lease` what `report` reads."""

    explanation: Explanation
    hit: Hit
    wishes: tuple[()] = ()


def report(
    first: Lease | DryRun, now: Lease | DryRun, wishes: Wishes, *, full: bool, everything: bool = False
) -> dict[str, Any]:
    """What became of a request's tokens and wishes, as data for JSON.

    Args:
        first: Its first lease.
        now: Its present one, another if it was preempted.
        wishes: What it asked for.
        full: Whether it may know how far the prompt follows what is known.
        everything: And whether it may know what prompts of other salts have told the cache.
    """
    found = first.explanation
    lines = list(found.losses)
    for i, one in enumerate(() if everything else lines):
        if one.reason is Reason.OTHER_NAMESPACE:
            reason = Reason.PARTED if found.matched else Reason.NOTHING_MATCHED
            lines[i:] = [Loss(reason, one.start, found.prompt_tokens)]
            break
    losses = [_loss(one.reason, one.start, one.stop, one.detail) for one in lines] if full else _rounded(found)
    told: dict[str, Any] = {
        "prompt_tokens": found.prompt_tokens,
        "cached_tokens": found.hit_tokens,
        "resumed_from": first.hit.kind or None,
        "losses": losses,
        "wishes": [{"kind": one.kind, "asked": one.asked, "outcome": one.outcome.value} for one in now.wishes],
    }
    if full:
        told["matched_tokens"] = found.matched
    if wishes.refused:
        told["refused"] = wishes.refused
    return told


def _loss(reason: Reason, start: int, stop: int, detail: object = None) -> dict[str, Any]:
    return {"reason": reason.value, "start": start, "stop": stop, "detail": str(detail or "")}


def _rounded(found: Explanation) -> list[dict[str, Any]]:
    """What is lost, as far as the position that the request resumed at tells it."""
    start, stop = found.hit_tokens, found.prompt_tokens
    loss = _loss(Reason.LAST_TOKEN, start, stop)
    return [loss if start == stop - 1 else {**loss, "reason": NOT_TOLD}]
