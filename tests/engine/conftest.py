"""What tests of the engine leave behind is ended after each."""

from collections.abc import Iterator

import pytest
from tests.engine.bench import close_tiers


@pytest.fixture(autouse=True)
def _tiers_end() -> Iterator[None]:
    yield
    close_tiers()
