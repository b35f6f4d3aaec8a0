"""A sweep runs every point once, wherever it runs, and goes on where it was stopped."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headway import __version__
from headway.cli import main
from headway.errors import ConfigError, TraceError
from headway.replay import ReplayConfig, generate, replay_trace
from headway.replay.ask.folder import SweepFolder, release_mark
from headway.replay.ask.grid import Point, numbers, points_of, words
from headway.replay.ask.options import ClockChoice, ModelChoice
from headway.replay.ask.setting import Setting
from headway.replay.ask.sweep import finish_points, tell_counts
from headway.replay.ask.workers import Workload, run_points
from headway.tell import read_runs

TRACE = generate("mixed", 60, seed=6)
SETTING = Setting(ModelChoice("kimi-linear"))
NOWHERE = Console(quiet=True)


def points(**axes: Any) -> list[Point]:
    return points_of(SETTING, {"memory": ("1GB", "4GB")} | axes, TRACE)


def results(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Without what a run's clock says."""
    timed = ("seconds", "requests_per_second")
    return {key: {k: v for k, v in run["result"].items() if k not in timed} for key, run in found.items()}


def ran(work: Workload, which: list[Point], **how: Any) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {}
    run_points(work, which, lambda point, run: found.update({point.key: run}), **how)
    return results(found)


def test_every_combination_is_a_point_and_equal_ones_are_one() -> None:
    which = points(eviction=("value", "lru"), dcp=(1,), placement=("prompt_end", "prompt_end,junction"))
    assert len({point.key for point in which}) == len(which) == 8
    assert [point.config.memory for point in which[:4]] == [10**9] * 4
    assert len(points(memory=("1GB", "1000MB", "1000000000"))) == 1
    assert {point.key for point in points()} == {point.key for point in points()}
    other = points_of(SETTING, {"memory": ("1GB",)}, generate("mixed", 60, seed=7))
    assert other[0].key not in {point.key for point in points()}, "another trace is another run"


def test_what_cannot_work_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match=r"memory 1kB: memory of 1000 bytes is less than one block"):
        points(memory=("1GB", "1kB"))
    with pytest.raises(ConfigError, match=r"memory of 900000.00 TB is more than a cache can number: .* or 'endless'"):
        points(memory=("900000TB",))
    with pytest.raises(ConfigError, match="dcp 3: layout: tp=8 is not divisible"):
        points(tp=(8,), dcp=(1, 3))
    with pytest.raises(ConfigError, match="how much memory"):
        points(memory=(None,))
    for text in ("1,x", "0", "-1", ""):
        with pytest.raises(ConfigError, match="--dcp"):
            numbers("--dcp", text)
    assert words("--memory", "1GB, 2GB,") == ["1GB", "2GB"]


def test_a_point_gives_what_a_replay_gives() -> None:
    point = points()[0]
    found = ran(Workload.of(TRACE), [point])[point.key]
    alone = replay_trace(TRACE, ReplayConfig(point.model.groups, 10**9, cost=point.model.cost), clairvoyant=True)
    assert found["whole"] == alone.as_dict()["whole"]
    assert found["clairvoyant"] == alone.as_dict()["clairvoyant"]


def test_presets_of_other_engines_are_points_like_any_other() -> None:
    which = points(memory=("4GB",), preset=(None, "vllm", "sglang,memory_ratio=2.0"))
    found = ran(Workload.of(TRACE), which, jobs=1)
    assert [found[point.key]["preset"].partition(",")[0] for point in which] == ["", "vllm-0.33", "sglang-0.5"]


def test_processes_give_the_same() -> None:
    work = Workload.of(TRACE)
    assert ran(work, points(), jobs=2) == ran(work, points(), jobs=1)
    with pytest.raises(ConfigError, match="--jobs"):
        run_points(work, points(), lambda point, run: None, jobs=-1)


def test_a_ray_cluster_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ADDRESS", "local")  # not the cluster of another test, which ends with that
    work = Workload.of(TRACE)
    assert ran(work, points(), ray=True) == ran(work, points(), jobs=1)


def test_a_stopped_sweep_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, which = Workload.of(TRACE, clairvoyant=False), points(memory=("1GB", "2GB", "4GB"))
    done: list[str] = []

    def stop_after_two(self: Workload, point: Point) -> dict[str, Any]:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(point.key)
        return original(self, point)

    original = Workload.run
    monkeypatch.setattr(Workload, "run", stop_after_two)
    with pytest.raises(SystemExit) as ended:
        finish_points(work, which, SweepFolder(tmp_path), NOWHERE, jobs=1)
    assert ended.value.code == 130
    done.clear()
    runs = finish_points(work, which, SweepFolder(tmp_path), NOWHERE, jobs=1)
    assert done == [which[2].key], "only what was missing is run"
    assert [run.memory for run in runs] == [10**9, 2 * 10**9, 4 * 10**9]
    done.clear()
    finish_points(Workload.of(TRACE), which[:1], SweepFolder(tmp_path), NOWHERE, jobs=1)
    assert done == [which[0].key], "a run without the clairvoyant is done again where it is wanted"


def test_a_folder_gives_back_what_was_added(tmp_path: Path) -> None:
    work = Workload.of(TRACE)
    which = points(memory=("1GB", "endless"), preset=(None, "vllm", "sglang"))
    runs = finish_points(work, which, SweepFolder(tmp_path), NOWHERE, jobs=1)
    again = SweepFolder(tmp_path)
    assert [again.finished[point.key] for point in which] == runs
    assert read_runs(tmp_path / "runs.jsonl") == runs
    assert [run.policy["preset"] for run in runs[:3]] == [None, "vllm-0.33", "sglang-0.5"]


def test_a_line_cut_off_by_a_kill_is_done_again(tmp_path: Path) -> None:
    work, which = Workload.of(TRACE, clairvoyant=False), points()
    whole = finish_points(work, which, SweepFolder(tmp_path), NOWHERE, jobs=1)
    file = tmp_path / "runs.jsonl"
    text = file.read_text()
    file.write_text(text[:-100])
    folder = SweepFolder(tmp_path)
    assert list(folder.finished) == [which[0].key]
    again = finish_points(work, which, folder, NOWHERE, jobs=1)
    assert [run.result.whole for run in again] == [run.result.whole for run in whole]
    assert len(file.read_text().splitlines()) == 2
    file.write_text('{"key": 1}\n')
    with pytest.raises(TraceError, match=r"runs.jsonl, line 1: not a run"):
        SweepFolder(tmp_path)
    with pytest.raises(ConfigError, match="cannot use"):
        SweepFolder(file)


def test_runs_of_another_release_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, which = Workload.of(TRACE, clairvoyant=False), points()
    finish_points(work, which, SweepFolder(tmp_path), NOWHERE, jobs=1)
    again = SweepFolder(tmp_path)
    finish_points(work, points(), again, NOWHERE, jobs=1)
    assert (again.reused, again.made, again.stale) == (2, 0, 0)
    for module in ("grid", "folder"):
        monkeypatch.setattr(f"headway.replay.ask.{module}.release_mark", lambda: "0.2.0+0")
    assert not {point.key for point in points()} & {point.key for point in which}
    file = tmp_path / "runs.jsonl"
    line = json.dumps({"key": "k", "release": "0.0.1", "run": {"of": "another shape"}})
    file.write_text(file.read_text() + line + "\n")
    later, told = SweepFolder(tmp_path), Console(record=True, quiet=False, file=io.StringIO())
    finish_points(work, points(), later, NOWHERE, jobs=1)
    assert (later.reused, later.made, later.stale) == (0, 2, 3)
    tell_counts(later, told)
    said = " ".join(told.export_text().split())
    assert "2 runs: 2 new, 0 reused from" in said
    assert "3 more there were made by another release of Headway" in said


def test_a_release_is_its_version_and_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.replay.ask.folder.files", lambda _: tmp_path)
    for name in ("cache", "engine", "formats", "replay"):
        (tmp_path / name / "inner").mkdir(parents=True)
    (tmp_path / "tell").mkdir()
    (tmp_path / "tell" / "run.py").write_text("")
    marks = []
    for text in ("x = 1", "x = 2", "x = 1"):
        (tmp_path / "cache" / "inner" / "policy.py").write_text(text)
        marks.append(release_mark.__wrapped__())
    assert marks[0] == marks[2] != marks[1]
    assert all(mark.startswith(f"{__version__}+") for mark in marks)


def test_a_clock_counts_at_every_point() -> None:
    clock, sizes = ClockChoice("trace", speed=20.0), {"memory": ("1GB", "4GB")}
    timed = SETTING.changed(clock=clock, gpu="h200", gpu_share=0.8)
    which = points_of(timed, sizes, TRACE)
    assert [point.config.memory for point in which] == [10**9, 4 * 10**9], "beside the GPU, which says how fast it is"
    found = ran(Workload.of(TRACE, clairvoyant=False), which[:1], jobs=1)[which[0].key]
    assert found["latency"]["requests"] == len(TRACE)
    assert not {point.key for point in which} & {point.key for point in points()}
    twice = points_of(timed.changed(clock=ClockChoice("trace")), {"memory": ("1GB",)}, TRACE)
    assert twice[0].key not in {point.key for point in which}, "another speed is another run"
    with pytest.raises(ConfigError, match="preset vllm: preset 'vllm' has no clock"):
        points_of(timed, {"memory": ("1GB",), "preset": (None, "vllm")}, TRACE)


def test_the_command_with_a_clock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    arguments = ["sweep", "--limit", "15", "--memory", "1GB,4GB", "--clock", "trace", "--gpu", "h200", "--speed", "20"]
    arguments += ["--model", "kimi-linear", "--out", str(tmp_path), "--no-clairvoyant", "--jobs", "1"]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, err = capsys.readouterr()
    assert ended.value.code == 0, err
    for said in ("first token: half", "answer tokens per second", "times are estimates"):
        assert said in " ".join(out.split())
    assert "2 runs: 2 new, 0 reused" in " ".join(err.split())
    assert "How long requests wait (estimates)" in (tmp_path / "report.html").read_text()
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--gpu-share", "0.5"])
    assert ended.value.code == 2
    assert "--gpu-share: go with --gpu" in capsys.readouterr().err


def test_a_run_that_refuses_everything_has_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["sweep", "--limit", "10", "--memory", "3MB", "--jobs", "1", "--out", str(tmp_path)])
    assert ended.value.code == 0
    assert "10 of 10" in capsys.readouterr().out
    assert "10 of 10 requests need more than the whole memory" in (tmp_path / "report.html").read_text()


def test_lower_tiers_are_axes_and_what_they_bring_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--memory", "300MB", "--host-memory", "0,8GB", "--limit", "150", "--model", "kimi-linear", "--jobs", "1")
    with pytest.raises(SystemExit) as ended:
        main(["sweep", *sizes, "--out", str(tmp_path)])
    assert ended.value.code in (0, None)
    text = " ".join(capsys.readouterr().out.split())
    assert "no host" in text
    assert "8 GB of host memory per rank: " in text


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["sweep", "--limit", "40", "--eviction", "value,lru", "--memory", "1GB,4GB", "--jobs", "1"]
    arguments += ["--model", "kimi-linear", "--out", str(tmp_path / "s")]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, err = capsys.readouterr()
    assert ended.value.code == 0, err
    assert "value, 1 GB" in out
    assert "lru, 4 GB" in out
    page = (tmp_path / "s" / "report.html").read_text()
    assert "Hit rate over memory" in page
    assert "What other sizes of memory reuse" not in page, "several were run"
    with pytest.raises(SystemExit) as ended:
        main(["sweep", "--limit", "10", "--memory", "1GB", "--jobs", "1", "--out", str(tmp_path / "one")])
    assert ended.value.code == 0
    assert "What other sizes of memory reuse" in (tmp_path / "one" / "report.html").read_text()
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main([*arguments, "--json"])
    out, err = capsys.readouterr()
    assert "4 of 4 runs are in" in " ".join(err.split())
    assert len(json.loads(out)) == 4
    for wrong, word in ((["--preset", "nobody"], "unknown preset"), (["--gpus", "2"], "go with --gpu")):
        with pytest.raises(SystemExit) as ended:
            main([*arguments, *wrong])
        assert ended.value.code == 2
        assert word in capsys.readouterr().err
