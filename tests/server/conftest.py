from pathlib import Path

import pytest
from tests.server.tiny import save_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny random hybrid model."""
    return save_model(tmp_path_factory.mktemp("models") / "tiny")
