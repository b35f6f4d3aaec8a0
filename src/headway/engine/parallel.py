"""How many ranks compute, what they split, and what happens when one is lost: the options in one record."""

from __future__ import annotations

from dataclasses import dataclass

from headway.cache import ParallelLayout
from headway.errors import ConfigError
from headway.runtime.choices import COMMUNICATIONS

__all__ = ["EXECUTORS", "ON_RANK_FAILURE", "ParallelConfig"]

EXECUTORS = ("auto", "local", "processes", "ray")
"""Who computes: this process, one process a rank on this machine, or one Ray actor a rank on any machines."""
ON_RANK_FAILURE = ("restart", "exit")
"""What the engine does when it has lost a rank."""


@dataclass(frozen=True)
class ParallelConfig:
    """The ranks of an engine.

    Attributes:
        dcp: Decode-context-parallel size: ranks over which the tokens of full attention are split. Windows, chunks and
            states are not. Without tensor parallelism each of these ranks holds the whole model; with it they are among
            the ranks that share the weights.
        interleave: Consecutive tokens that one rank stores before the next takes over.
        communication: `ag_rs` (all-gather and reduce-scatter) or `a2a` (all-to-all); both give the same results.
        executor: One of `EXECUTORS`; `auto` is `local` for one rank and `processes` for more.
        rank_timeout: Seconds that a step may take on any rank before the ranks count as lost.
        on_rank_failure: `restart` starts new ranks with an empty cache, `exit` ends the engine.
        tp: Tensor-parallel size: ranks that share the weights, and states by heads. `dcp` divides it.
        pcp: Prefill-context-parallel size. Only 1 can run.
    """

    dcp: int = 1
    interleave: int = 1
    communication: str = "ag_rs"
    executor: str = "auto"
    rank_timeout: float = 300.0
    on_rank_failure: str = "restart"
    tp: int = 1
    pcp: int = 1

    def __post_init__(self) -> None:
        """Refuse what cannot run.

        Raises:
            ConfigError: The message names the option and what to change.
        """
        for name in ("dcp", "interleave", "tp", "pcp"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if self.tp > 1 and self.tp % self.dcp:
            raise ConfigError(
                f"dcp={self.dcp} does not divide tp={self.tp}: decode context parallelism reuses the ranks that share "
                f"the weights, so choose --dcp among the divisors of --tp, or leave --tp out"
            )
        if self.pcp > 1:
            raise ConfigError(
                f"pcp={self.pcp}: prefill context parallelism is geometry only (`headway inspect --pcp`), no executor "
                f"splits a prompt over ranks yet: use --dcp"
            )
        _one_of("executor", self.executor, EXECUTORS)
        _one_of("on_rank_failure", self.on_rank_failure, ON_RANK_FAILURE)
        _one_of("communication", self.communication, COMMUNICATIONS)
        if not self.rank_timeout > 0:
            raise ConfigError(f"rank_timeout is {self.rank_timeout}, it must be more than 0 seconds")
        if self.executor == "local" and self.ranks > 1:
            raise ConfigError(
                f"executor=local computes in one process, and tp={self.tp}, dcp={self.dcp} need {self.ranks}: use "
                f"auto, processes or ray"
            )

    @property
    def ranks(self) -> int:
        """How many ranks compute."""
        return self.tp if self.tp > 1 else self.dcp

    @property
    def kind(self) -> str:
        """The executor that `executor` means: `local`, `processes` or `ray`."""
        if self.executor != "auto":
            return self.executor
        return "local" if self.ranks == 1 else "processes"

    @property
    def layout(self) -> ParallelLayout:
        """The layout for the cache: context parallelism without tensor parallelism has ranks of its own."""
        return ParallelLayout(tp=self.ranks, dcp=self.dcp, interleave=self.interleave)


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}, it must be {', '.join(choices[:-1])} or {choices[-1]}")
