"""What clients are told of their pins, and how they take them back.

A pin belongs to a prefix, not to who asked: who pins the same prefix renews it, and taking it back ends it for all. Its
id is a keyed hash of salt and tokens, so one prefix has one id, and nobody can make the id of a prefix that they only
guess. The list of ids is bounded, and an id is forgotten when its pin is over.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.cache import Outcome
from headway.engine import Engine, RequestResult

__all__ = ["PinIds"]

_MOST_IDS = 4096
_WORDS = {
    Outcome.KEPT: "",
    Outcome.PENDING: "the request ended before its prompt was computed",
    Outcome.ENDED: "the request ended before its prompt was computed",
    Outcome.NO_CHECKPOINT: "the prompt resumed behind this position, where no state was kept; pin a longer prompt",
    Outcome.NO_ROOM: "no memory was free for a checkpoint; send it again later, or give the server more --memory",
    Outcome.PIN_SHARE: "pins would protect more than their share of the cache (--pin-share of the server), or leave "
    "this request too little; take others back, or pin less",
    Outcome.NOT_PLACED: "the server's --placement has no breakpoints",
    Outcome.NOT_STORED: "nothing of this request was kept: prefix reuse is off (--no-prefix-reuse), or the cache was "
    "reset meanwhile",
}
"""What became of a pin, for its client."""


class PinIds:
    """The pins that clients were told of, by id."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[float, NDArray[np.int32], str]] = OrderedDict()

    def tell(self, answers: Sequence[RequestResult]) -> dict[str, Any]:
        """The `pin` of a response to one prompt, of which there may be several answers; {} if none was asked for."""
        request = answers[0].request
        if not request.pin:
            return {}
        wishes = [answer.pin for answer in answers if answer.pin is not None]
        wish = next((wish for wish in wishes if wish.outcome is Outcome.KEPT), wishes[0] if wishes else None)
        outcome = Outcome.NOT_STORED if wish is None else wish.outcome
        told: dict[str, Any] = {"id": None, "outcome": outcome.value, "tokens": 0, "seconds": None}
        if wish is not None and outcome is Outcome.KEPT:
            seconds = self._engine.config.pin_seconds if request.pin_seconds is None else request.pin_seconds
            name = self._enter(request.tokens[: wish.position], request.salt, seconds)
            told |= {"id": name, "tokens": wish.position, "seconds": seconds}
        return {"pin": told | {"detail": _WORDS[outcome]}}

    def lift(self, name: str) -> bool:
        """End a pin. Returns whether there is one of this id.

        Raises:
            TimeoutError, EngineStoppedError: As `Engine.unpin`.
        """
        with self._lock:
            entry = self._known.pop(name, None)
        return entry is not None and self._engine.unpin(entry[1], entry[2])

    def _enter(self, tokens: NDArray[np.int32], salt: str, seconds: float) -> str:
        prefix = f"{len(salt)} {salt}".encode() + tokens.tobytes()  # with its length: a salt may look like tokens
        digest = hashlib.blake2b(prefix, key=self._key, digest_size=16)
        name, now = f"pin-{digest.hexdigest()}", time.monotonic()
        with self._lock:
            until = max(now + seconds, self._known.pop(name, (0.0,))[0])
            self._known[name] = until, tokens.copy(), salt
            over = [known for known, (end, _, _) in self._known.items() if end < now]
            for known in over or list(self._known)[: max(0, len(self._known) - _MOST_IDS)]:
                del self._known[known]
        return name
