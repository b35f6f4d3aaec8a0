import json
import os
import time
from pathlib import Path

import pytest
from tests.tiers import servers
from tests.tiers.world import HYBRID, World, tier, tokens

from headway import cli
from headway.tiers import ObjectLayout
from headway.tiers.disk import DiskStore


class Ran:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main([str(argument) for argument in arguments])
        told = self._capsys.readouterr()
        return int(ended.value.code or 0), told.out, told.err


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Ran:
    return Ran(capsys)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A disk with two checkpoints of one path and one in another namespace."""
    layout = ObjectLayout(HYBRID.identity, HYBRID.groups, stretch=8, label="some/model")
    with World((tier("disk"), DiskStore(tmp_path / "tier")), layout=layout) as t:
        t.put(tokens(60), 21)
        t.put(tokens(60), 43)
        t.put(tokens(60, 1), 11, ("m", "", "a salt"))
    return tmp_path / "tier"


def objects(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name.count(".") == 2)


def test_ls_lists_models_and_no_salts(run: Ran, folder: Path) -> None:
    code, out, _ = run("tiers", "ls", folder, "--json")
    [holding] = json.loads(out)
    assert code == 0
    assert (holding["label"], holding["namespaces"], holding["checkpoints"]) == ("some/model", 2, 3)
    assert holding["stretches"] == 6
    assert holding["objects"] == len(objects(folder))
    code, out, _ = run("tiers", "ls", folder)
    assert "some/model" in out
    assert "a salt" not in out + "".join(map(str, folder.rglob("*")))


def test_check_passes_what_is_whole(run: Ran, folder: Path) -> None:
    code, out, _ = run("tiers", "check", folder)
    assert code == 0
    assert out.startswith("3 checkpoints")
    assert json.loads(run("tiers", "check", folder, "--json")[1])["faults"] == []


@pytest.mark.parametrize("how", ["altered", "cut", "gone", "record"])
def test_check_finds_and_removes_what_is_damaged(run: Ran, folder: Path, how: str) -> None:
    victim = objects(folder)[0] if how != "record" else next(folder.rglob("*.m"))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    if how == "gone":
        victim.unlink()
    else:
        victim.write_bytes(data[:-1] if how == "cut" else data)
    code, out, _ = run("tiers", "check", folder, "--json")
    [fault] = [fault for fault in json.loads(out)["faults"] if fault["what"] in ("damaged", "missing")]
    assert code == 1
    assert fault["name"].rsplit("/", 1)[1] == victim.name
    assert "with --remove, what is damaged" in run("tiers", "check", folder)[1]
    code, out, _ = run("tiers", "check", folder, "--remove")
    assert code == 1
    assert "what was damaged is removed" in out
    assert "with --remove" not in out
    assert run("tiers", "check", folder)[0] == 0


def test_purge_asks_and_removes_only_what_is_ours(run: Ran, folder: Path) -> None:
    (folder / "mine.txt").write_text("not Headway's")
    code, _, err = run("tiers", "purge", folder)
    assert code == 2
    assert "--yes" in err
    assert objects(folder)
    assert run("tiers", "purge", folder, "--layout", "zz", "--yes", "--json")[1] == '{"removed": 0, "bytes": 0}\n'
    code, out, _ = run("tiers", "purge", folder, "--yes")
    assert code == 0
    assert out.startswith("removed ")
    assert [path.name for path in folder.rglob("*") if path.is_file()] == ["mine.txt"]
    assert "nothing" in run("tiers", "ls", folder)[1]


def test_purge_of_what_nothing_names_leaves_the_rest(run: Ran, folder: Path) -> None:
    record = next(folder.rglob("*.m"))
    record.unlink()
    assert "purge --loose" in run("tiers", "check", folder)[1]
    assert json.loads(run("tiers", "purge", folder, "--loose", "--yes", "--json")[1])["removed"] == 0
    for path in folder.rglob("*"):
        os.utime(path, (time.time() - 7200,) * 2)
    assert json.loads(run("tiers", "purge", folder, "--loose", "--yes", "--json")[1])["removed"] > 0
    assert run("tiers", "check", folder)[0] == 0


def test_a_store_by_its_url(run: Ran) -> None:
    servers.valkey_store().close()
    place = f"valkey://127.0.0.1:{servers.valkey_port()}/0"
    store = servers.valkey_store()
    with World((tier("store", shared=True), store)) as t:
        t.put(tokens(60), 43)
        assert json.loads(run("tiers", "ls", place, "--json")[1])[0]["checkpoints"] == 1
        assert "a server's budget bounds what it wrote since its start" in run("tiers", "ls", place)[1]
        assert run("tiers", "check", place)[0] == 0
        assert run("tiers", "purge", place, "--yes")[0] == 0
        assert t.load(tokens(60)).position == 0


def test_a_place_that_is_none_is_told(run: Ran, tmp_path: Path) -> None:
    code, _, err = run("tiers", "ls", tmp_path / "nothing")
    assert code == 2
    assert "is no folder" in err
    assert not (tmp_path / "nothing").exists()
    assert run("tiers", "ls", "ftp://host")[0] == 2
