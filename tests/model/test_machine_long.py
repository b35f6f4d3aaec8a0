"""The stateful random test for ten times as long, 20,000 examples: `make slow` runs it."""

from __future__ import annotations

import pytest
from tests.model import test_machine


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(test_machine.PARTS))
def test_long_beside_oracle_and_device(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_machine, "EXAMPLES", 10 * test_machine.EXAMPLES)
    test_machine.test_cache_beside_oracle_and_device(test_machine.PARTS + part)
