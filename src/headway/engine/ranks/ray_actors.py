"""One Ray actor per rank, on any machines of a Ray cluster.

A placement group keeps a place for every rank, all or none, so that a cluster that is too small is told at start and
not in the middle. Ray moves the messages; what is in them is ours (`headway.engine.ranks.messages`). The ranks form
their group over TCP, at rank 0's machine.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

from headway.engine.errors import RanksLostError
from headway.engine.ranks.rank import Rank
from headway.errors import ConfigError
from headway.runtime.parallel.distributed import Rendezvous

__all__ = ["RankActor", "RayRanks", "require_ray"]

_PLACE_SECONDS = 60.0
"""How long to wait for places in the cluster."""
_START_SECONDS = 600.0
"""How long actors may take to start: each imports torch."""


def require_ray() -> Any:
    """Return the module `ray`.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError("--executor ray needs Ray: pip install 'headway[ray]'") from error
    return ray


class RankActor:
    """What runs in the actor of one rank."""

    def __init__(self, rank: int, device: str) -> None:
        self._rank = Rank(rank, device)

    def meeting(self) -> tuple[str, int]:
        """This machine's address in the cluster, and a port that is free now."""
        host = str(require_ray().util.get_node_ip_address())
        with socket.socket() as probe:
            probe.bind((host, 0))
            return host, int(probe.getsockname()[1])

    def answer(self, message: bytes) -> bytes:
        """Do what a message asks for (see `Rank.answer`)."""
        return self._rank.answer(message)

    def there(self) -> None:
        """Do nothing: Ray tells who asks whether this actor is still there."""


class RayRanks:
    """Ranks as Ray actors (see `headway.engine.ranks.driver.RankGroup`). They run once this returns, without a model.

    It joins the cluster that this process is connected to or that `RAY_ADDRESS` names; without one, it starts a cluster
    of this machine alone.

    Args:
        device: `cpu`, or `cuda` for a GPU of its own for every rank.
        ranks: How many.
        patience: Seconds to wait for their places.

    Attributes:
        actors: The actor of each rank.

    Raises:
        ConfigError: Ray is not installed, a GPU is named, or the cluster has no room for all ranks.
        RanksLostError: An actor does not start.
    """

    def __init__(self, device: str, ranks: int, patience: float = _PLACE_SECONDS) -> None:
        if device not in ("cpu", "cuda"):
            raise ConfigError(f"--device {device}: with Ray write cpu or cuda, Ray gives every rank a GPU of its own")
        self._ray = require_ray()
        self.size = ranks
        self.actors: list[Any] = []
        self._pending: dict[Any, int] = {}
        self._asked: dict[Any, int] = {}
        if not self._ray.is_initialized():
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            self._ray.init(log_to_driver=False, configure_logging=False)
        needs = {"CPU": 1.0, **({"GPU": 1.0} if device == "cuda" else {})}
        self._places = self._ray.util.placement_group([needs] * ranks, strategy="PACK")
        try:
            self._start(device, needs, patience)
        except BaseException:
            self.kill()
            raise

    def _start(self, device: str, needs: dict[str, float], patience: float) -> None:
        ray = self._ray
        ready, _ = ray.wait([self._places.ready()], timeout=patience)
        if not ready:
            raise ConfigError(
                f"the Ray cluster has no room for {self.size} ranks with {_in_words(needs)} each; it has "
                f"{_in_words(ray.cluster_resources())}: add machines or lower --tp, --dcp or --pcp"
            )
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        actor: Any = ray.remote(RankActor)
        for rank in range(self.size):
            options = actor.options(
                num_cpus=needs["CPU"],
                num_gpus=needs.get("GPU", 0.0),
                scheduling_strategy=strategy(self._places, placement_group_bundle_index=rank),
            )
            self.actors.append(options.remote(rank, device))
        try:
            host, port = ray.get(self.actors[0].meeting.remote(), timeout=_START_SECONDS)
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise RanksLostError(f"rank 0 does not start in the Ray cluster: {error}") from error
        self.meeting = Rendezvous(host=host, port=port)

    def send(self, messages: Sequence[bytes], timeout: float) -> None:
        """Send every rank a message; Ray does not make the sender wait (see `RankGroup.send`)."""
        held = [self._ray.put(message) for message in messages]
        self._pending = {actor.answer.remote(held[rank % len(held)]): rank for rank, actor in enumerate(self.actors)}

    def receive(self, timeout: float) -> tuple[int, bytes] | None:
        """Return the next answer (see `RankGroup.receive`)."""
        ready, _ = self._ray.wait(list(self._pending), num_returns=1, timeout=timeout)
        if not ready:
            return None
        rank = self._pending.pop(ready[0])
        answer: bytes = self._result(rank, ready[0])
        return rank, answer

    def check(self) -> None:
        """Look whether all ranks are there (see `RankGroup.check`): what was asked in one call is read in the next."""
        try:
            if not self._asked:
                self._asked = {actor.there.remote(): rank for rank, actor in enumerate(self.actors)}
            ready, _ = self._ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0.0)
        except self._ray.exceptions.RayError as error:
            raise RanksLostError(f"the Ray cluster does not answer: {error}") from error
        for each in ready:
            self._result(self._asked.pop(each), each)

    def _result(self, rank: int, reference: Any) -> Any:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            reason = str(error).strip().partition("\n")[0]
            raise RanksLostError(f"rank {rank} is lost: {type(error).__name__}: {reason}") from error

    def stopped(self) -> Sequence[int]:
        """Ray does not tell (see `RankGroup.stopped`)."""
        return ()

    def kill(self) -> None:
        """End all ranks now and give their places back."""
        actors, self.actors, self._pending, self._asked = self.actors, [], {}, {}
        for actor in actors:
            self._ray.kill(actor)
        if self._places is not None:
            self._ray.util.remove_placement_group(self._places)
            self._places = None


def _in_words(resources: dict[str, float]) -> str:
    return " and ".join(f"{resources.get(name, 0.0):g} {name}" for name in _kinds(resources))


def _kinds(resources: dict[str, float]) -> Sequence[str]:
    return [name for name in ("CPU", "GPU") if name in resources] or ["CPU"]
