"""Generated workloads have the structure that they promise, and the same seed makes the same trace."""

import numpy as np
import pytest

from headway.errors import ConfigError
from headway.replay import WORKLOADS, Trace, endless_matches, generate


def rate(trace: Trace) -> float:
    return float(endless_matches(trace).sum()) / trace.tokens


@pytest.mark.parametrize("workload", WORKLOADS)
def test_seeds(workload: str) -> None:
    first, second, other = generate(workload, 60), generate(workload, 60), generate(workload, 60, seed=1)
    assert (first.symbols == second.symbols).all()
    assert (first.times == second.times).all()
    assert len(other.symbols) != len(first.symbols) or (other.symbols != first.symbols).any()
    assert len(first) == 60
    assert (np.diff(first.times) >= 0).all()


def test_structure() -> None:
    assert rate(generate("one-off", 200)) == 0.0
    for workload in ("shared", "chat", "agents", "search"):
        assert rate(generate(workload, 400)) > 0.8
    chat = generate("chat", 400)
    assert 0.0 < rate(generate("mixed", 400)) < 1.0
    assert chat.has_answers
    assert chat.outputs == "recorded"


def test_search_sends_one_prompt_several_times() -> None:
    trace = generate("search", 4)
    assert len(set(trace.prompt_tokens.tolist())) == 1
    assert endless_matches(trace)[1:].min() > 0


@pytest.mark.parametrize("wrong", [{"workload": "none"}, {"requests": 0}, {"seed": -1}, {"block_tokens": 0}])
def test_what_cannot_work_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        generate(**wrong)  # type: ignore[arg-type]
