"""The cells of judge 1: which model, trace, memory and engine, and in which order."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["LONGEST", "SESSIONS", "SESSION_REQUESTS", "Cell", "cells"]

SESSIONS, SESSION_REQUESTS, LONGEST = 60, 600, 131_072
REQUESTS = 3993
"""Of a Mooncake trace: all of `synthetic`, the first third of `conversation`."""


@dataclass(frozen=True)
class Cell:
    """What is run.

    Attributes:
        model: A name of `LAYOUTS`.
        trace: "conversation", "synthetic" or "agents".
        memory: GB per rank.
        engine: A name of `ENGINES`.
        requests: The first requests of the trace; of sessions, the most.
        asynchronous: Two steps under way.
        drafts: Drafted tokens per step.
        checked: On the emulated worker, with faults.
    """

    model: str
    trace: str
    memory: float
    engine: str = "vllm"
    requests: int = REQUESTS
    asynchronous: bool = False
    drafts: int = 0
    checked: bool = False

    @property
    def name(self) -> str:
        """For people, and for `--only`."""
        mode = ("asynchronous/" if self.asynchronous else "") + ("checked/" if self.checked else "")
        drafts = f"drafts {self.drafts}/" if self.drafts else ""
        return f"{self.model}/{self.trace}/{self.memory:g} GB/{mode}{drafts}{self.engine}"


def cells() -> list[Cell]:
    """All of them, those that matter most first; engines in turns."""
    k3 = [
        *(("conversation", 14.5), ("conversation", 58.0), ("agents", 14.5), ("agents", 58.0)),
        *(("synthetic", 14.5), ("synthetic", 58.0)),
        *(("conversation", 232.0), ("agents", 232.0), ("synthetic", 232.0)),
    ]
    plain = [Cell("kimi-k3", trace, memory) for trace, memory in k3]
    plain += [
        Cell(model, trace, 58.0) for model in ("gpt-oss-120b", "qwen3-next") for trace in ("conversation", "agents")
    ]
    plain += [Cell("kimi-k3", "conversation", 58.0, asynchronous=True)]
    both = []
    for turn, cell in enumerate(plain):
        pair = [cell, replace(cell, engine="headway")]
        both += pair if turn % 2 == 0 else pair[::-1]
    checked = [
        Cell("kimi-k3", "conversation", 2.0, "headway", 200, checked=True),
        Cell("kimi-k3", "conversation", 2.0, "headway", 200, asynchronous=True, checked=True),
        Cell("gpt-oss-120b", "conversation", 9.0, "headway", 200, asynchronous=True, checked=True),
        Cell("gpt-oss-120b", "conversation", 9.0, "headway", 200, asynchronous=True, drafts=3, checked=True),
        Cell("kimi-k3", "conversation", 2.0, "headway", 200, asynchronous=True, drafts=3, checked=True),
        Cell("kimi-k3", "agents", 4.5, "headway", 200, asynchronous=True, checked=True),
    ]
    fine = [replace(cell, engine="vllm-512") for cell in plain if cell.model == "kimi-k3" and not cell.asynchronous]
    return both + checked + fine
