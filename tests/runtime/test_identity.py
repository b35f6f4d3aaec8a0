"""Which weights a folder has: the same for a copy, another for others of the same shapes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.runtime.drafting.tiny_drafters import save_tiny
from tests.runtime.tiny_models import tiny_model

from headway.engine.ranks.drafting import DraftSource
from headway.errors import ModelError
from headway.runtime import identity
from headway.runtime.identity import weights_identity
from headway.runtime.sources import resolve_source


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("KimiLinear").save_pretrained(folder)
    return folder


def test_a_copy_is_the_same_and_each_changed_tensor_is_another(saved: Path, tmp_path: Path) -> None:
    """T20: weights that were replaced in place, under the same names and of the same shapes."""
    copied = tmp_path / "of_another_name"
    shutil.copytree(saved, copied)
    before = weights_identity(str(saved))
    assert len(before) == 16
    assert weights_identity(str(copied)) == before
    (file,) = copied.glob("*.safetensors")
    tensors = load_file(file)
    for name in (min(tensors), max(tensors), "model.norm.weight"):
        changed = {key: value + (key == name) * torch.tensor(0.5, dtype=value.dtype) for key, value in tensors.items()}
        save_file(changed, file)
        assert weights_identity(str(copied)) != before, name
    save_file(tensors, file)
    again = weights_identity(str(copied))
    (copied / "config.json").write_text((copied / "config.json").read_text().replace("2.446", "2.447"))
    assert weights_identity(str(copied)) != again, "the same weights compute something else by another config"


def test_weights_of_any_format_are_told_apart(saved: Path, tmp_path: Path) -> None:
    found = set()
    for number in range(3):
        torch.save({"a": torch.full((1000,), float(number))}, tmp_path / "pytorch_model.bin")
        found.add(weights_identity(str(tmp_path)))
    assert len(found) == 3
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="holds no weights"):
        weights_identity(str(tmp_path / "empty"))


def test_of_a_hub_id_the_revision_says_it_where_the_weights_are_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[bytes] = []
    for revision in ("1" * 40, "2" * 40):
        folder = tmp_path / "snapshots" / revision
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        monkeypatch.setattr(identity, "try_to_load_from_cache", lambda *_, f=folder: str(f / "config.json"))
        found.append(weights_identity("some/model"))
    assert found[0] != found[1]
    monkeypatch.setattr(identity, "try_to_load_from_cache", lambda *_: None)
    with pytest.raises(ModelError, match="name the folder that holds the model"):
        weights_identity("some/model")


def test_drafters_are_told_apart(tmp_path: Path) -> None:
    model = tiny_model("KimiLinear")
    folders = [save_tiny("mtp", model, tmp_path / str(seed), seed) for seed in (1, 2)]
    of_folders = [DraftSource(str(folder), None, "match").identity(None) for folder in folders]
    assert of_folders[0] != of_folders[1]
    assert {DraftSource(name, None, "match").identity(None) for name in ("none", "lookup")} == {b""}
    with pytest.raises(ModelError, match="brings no such drafter"):
        DraftSource("dspark", None, "match").identity(tmp_path)


def test_the_built_in_model_has_one() -> None:
    path = resolve_source(None)[1]
    assert weights_identity(path) == weights_identity(path)
    brought = {DraftSource(name, None, "match").identity(Path(path)) for name in ("mtp", "dspark")}
    assert len(brought) == 2
