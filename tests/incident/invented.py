"""The conversations with invented answers and the sizes of a tiny model: what the story is without running one."""

import numpy as np

from headway.cache import FullAttention, LayerSpec, Recurrent
from headway.incident.sessions import ANSWER, Ints, Request, conversations, turns

GROUPS: tuple[LayerSpec, ...] = (FullAttention("full", 800), Recurrent("state", 19200), FullAttention("draft", 320))


def requests() -> list[Request]:
    random = np.random.default_rng(1)

    def answer(_: Ints) -> Ints:
        return random.integers(3, 4096, ANSWER, dtype=np.int32)

    return list(conversations(turns(), answer))
