"""A name that is no folder: one question to the hub, and one clear answer."""

from __future__ import annotations

from typing import Any

import pytest
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError

from headway.errors import ModelError
from headway.runtime import loading


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[Exception | None]:
    """A hub that knows nothing by heart, and raises the exception in the list when it is asked."""
    says: list[Exception | None] = [None]

    def ask(url: str, **more: Any) -> None:
        if says[0] is not None:
            raise says[0]

    monkeypatch.setattr(loading, "try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr(loading, "get_hf_file_metadata", ask)
    return says


def error_of(kind: type[Exception]) -> Exception:
    """An error of the hub without the response that it comes with."""
    made = kind.__new__(kind)
    made.args = ("no",)
    return made


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ConnectionError("no route"), "the hub could not be reached"),
        (error_of(RepositoryNotFoundError), "the hub has no model of that name"),
    ],
)
def test_it_is_told(hub: list[Exception | None], error: Exception, text: str) -> None:
    hub[0] = error
    with pytest.raises(ModelError, match=text) as raised:
        loading.layout_without_weights("nothere")
    assert "there is no folder 'nothere' here" in str(raised.value)


def test_what_the_hub_has_is_loaded(hub: list[Exception | None], monkeypatch: pytest.MonkeyPatch) -> None:
    hub[0] = error_of(EntryNotFoundError)
    monkeypatch.setattr(loading.AutoConfig, "from_pretrained", lambda path, **_: 1 / 0)
    with pytest.raises(ModelError, match="cannot load the config of model 'nothere'"):
        loading.layout_without_weights("nothere")
