"""What the cache refuses to do, changing nothing."""

from __future__ import annotations

import numpy as np
import pytest
from tests.cache.engine import ATTENTION, Engine, tokens

from headway.cache import Prompt
from headway.errors import LeaseError


def test_misuse_is_refused_and_changes_nothing() -> None:
    engine = Engine.of(ATTENTION)
    lease = engine.start(tokens((1, 20)))
    step = engine.cache.extend([lease.row], [8])
    for wrong in (
        lambda: engine.cache.extend([lease.row], [1]),
        lambda: engine.cache.finish([lease.row]),
        lambda: engine.cache.preempt([lease.row]),
        lambda: engine.cache.commit(step, counts=[9]),
        lambda: engine.cache.commit(step, counts=[-1]),
        lambda: engine.cache.extend([99], [1]),
    ):
        with pytest.raises(LeaseError):
            wrong()
    engine.cache.commit(step)
    assert lease.computed == 8
    for wrong in (
        lambda: engine.cache.commit(step),
        lambda: engine.cache.fail(step),
        lambda: engine.cache.extend([lease.row, lease.row], [1, 1]),
        lambda: engine.cache.extend([lease.row], [-1]),
    ):
        with pytest.raises(LeaseError):
            wrong()
    engine.cache.finish([lease.row])
    with pytest.raises(LeaseError):
        engine.cache.extend([lease.row], [1])
    with pytest.raises(LeaseError):
        engine.cache.finish([lease.row])
    assert engine.cache.stats().leased == 0


@pytest.mark.parametrize(
    "options",
    [{"breakpoints": (0,)}, {"breakpoints": (21,)}, {"boundaries": (21,)}, {"pin": -1}],
)
def test_a_prompt_with_marks_outside_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(LeaseError):
        Prompt(tokens((1, 20)), **options)  # type: ignore[arg-type]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(LeaseError):
        Prompt(np.empty(0, dtype=np.int32))
