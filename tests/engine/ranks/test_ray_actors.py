"""Ranks as Ray actors, in a cluster of two workers that the test starts. Skipped where Ray is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine.ranks.test_processes import MEMORY, PATIENCE, asked, greedy, prompt, restart_of
from tests.runtime.drafting.tiny_drafters import save_tiny
from tests.server import tiny
from transformers import AutoModelForCausalLM

from headway.engine import EngineConfig, ParallelConfig, RequestFailedError
from headway.engine.build import build_engine
from headway.engine.ranks.ray_actors import RayRanks
from headway.errors import ConfigError

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'headway[ray]'")

# Ray and what it brings leave sockets and deprecated calls behind, in its own modules.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A head without a place for ranks, and two workers with a place for one each."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()
    cluster.shutdown()


def actors_of(engine: Any) -> list[Any]:
    return engine._executor._group.actors


def test_ranks_on_two_workers(cluster: None, tmp_path: Path) -> None:
    """Answers, hits, and a lost actor: as with processes. The actors share the weights and split the tokens."""
    source = tiny.save_model(tmp_path)
    with pytest.raises(ConfigError, match="has no room for 3 ranks with 1 CPU each; it has 2 CPU"):
        RayRanks("cpu", 3, patience=2.0)
    parallel = ParallelConfig(tp=2, dcp=2, executor="ray", rank_timeout=PATIENCE)
    engine = build_engine(str(source), EngineConfig(memory=MEMORY, max_batched_tokens=64, parallel=parallel)).engine
    engine.start()
    try:
        nodes = {node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")}
        assert len(nodes) == 2
        tokens = prompt(1)
        expected = greedy(source, tokens, 12)
        results = [engine.submit(asked(tokens, 12)).result(PATIENCE) for _ in range(2)]
        assert [list(result.tokens) for result in results] == [expected, expected]
        assert [result.cached_tokens for result in results] == [0, 149]
        handle = engine.submit(asked(tokens, 200))
        next(iter(handle))
        ray.kill(actors_of(engine)[1])
        with pytest.raises(RequestFailedError, match=r"rank \d is lost"):
            handle.result(PATIENCE)
        again = engine.submit(asked(tokens, 12)).result(PATIENCE)
        assert (list(again.tokens), again.cached_tokens) == (expected, 0)
        restarted = restart_of(engine._executor)
        ray.kill(actors_of(engine)[0])  # while nothing is asked of them
        assert restarted.wait(PATIENCE), "nobody notices"
        again = engine.submit(asked(tokens, 12)).result(PATIENCE)
        assert (list(again.tokens), again.cached_tokens) == (expected, 0)
    finally:
        engine.close()


@pytest.mark.slow  # drafts on ranks are also tested with processes, and Ray with what it does alone
def test_drafts_on_two_workers(cluster: None, tmp_path: Path) -> None:
    """Greedy answers with a drafter's tokens verified are those of one rank, and the drafter costs no hit."""
    source = tiny.save_model(tmp_path / "model")
    save_tiny("mtp", AutoModelForCausalLM.from_pretrained(source), source / "drafts" / "mtp")
    parallel = ParallelConfig(dcp=2, executor="ray", rank_timeout=PATIENCE)
    config = EngineConfig(memory=MEMORY, max_batched_tokens=64, draft="mtp", draft_tokens=2, parallel=parallel)
    built = build_engine(str(source), config)
    assert built.drafts is not None
    built.drafts.costs = None  # draft as much as there is room for, whether it pays or not
    engine = built.engine.start()
    try:
        tokens = prompt(1)
        expected = greedy(source, tokens, 12)
        results = [engine.submit(asked(tokens, 12)).result(PATIENCE) for _ in range(2)]
        assert [list(result.tokens) for result in results] == [expected, expected]
        assert [result.cached_tokens for result in results] == [0, 149]
        assert all(result.drafted > 0 for result in results)
    finally:
        engine.close()


def test_a_gpu_is_not_named_to_ray() -> None:
    with pytest.raises(ConfigError, match="write cpu or cuda"):
        RayRanks("cuda:1", 2)
