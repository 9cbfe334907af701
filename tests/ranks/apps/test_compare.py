"""Comparing runs: the figures, what is printed and written, and the exit status."""

from __future__ import annotations

import csv
import subprocess
from pathlib import Path

import pytest

from lightning_cp.apps.compare.agreement import COLUMNS, Deviation, deviations, verdict
from lightning_cp.apps.compare.runs import find_runs, pair, read_run, read_runs
from tests.helpers.apps.folders import LOSSES, run_folder
from tests.helpers.launch.programs import run


def compared(*folders: Path, tolerance: float | str = "auto") -> list[Deviation]:
    return deviations(pair(read_runs(folders)), tolerance)


def command(cwd: Path, *overrides: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return run(cwd, "-m", "lightning_cp.compare", "hydra.run.dir=out", *overrides, timeout=timeout)


def test_the_largest_relative_deviation_and_its_step(tmp_path: Path) -> None:
    one = run_folder(tmp_path / "one")
    two = run_folder(tmp_path / "two", (5.0, 4.0 * (1 + 3e-5), 3.0 * (1 - 2e-5)), devices=4)
    (found,) = compared(one, two)
    assert found.curves["train/loss"] == pytest.approx([0, 3e-5, 2e-5], rel=1e-6)
    assert (found.step, found.passed, found.tolerance) == (1, True, 1e-4)
    assert found.worst == found.largest("train/loss") == pytest.approx(3e-5, rel=1e-6)
    assert verdict([found]).startswith("pass: no loss is further than 0.0001 from its baseline")


def test_a_single_process_is_one_whatever_the_sweep_asks_of_others(tmp_path: Path) -> None:
    one = run_folder(tmp_path / "one", devices=4, strategy="auto")
    two = run_folder(tmp_path / "two", devices=4)
    assert [run.processes for run in read_runs([one, two])] == [1, 4]
    assert len(compared(one, two)) == 1


@pytest.mark.parametrize(("factor", "usual"), [(1.02, "but within"), (1.06, "and beyond even")])
def test_a_deviation_above_the_tolerance_fails_and_the_floor_is_named(
    tmp_path: Path, factor: float, usual: str
) -> None:
    one = run_folder(tmp_path / "one")
    two = run_folder(tmp_path / "two", (*LOSSES[:2], LOSSES[2] * factor), devices=4)
    found = compared(one, two)
    assert not found[0].passed
    told = "FAIL: 1 of 1 runs are further than 0.0001 from their baseline"
    assert verdict(found) == f"{told}, {usual} the usual limit of 5%: two."


def test_validation_losses_count_too(tmp_path: Path) -> None:
    one = run_folder(tmp_path / "one")
    two = run_folder(tmp_path / "two", devices=4, validation=4.6)
    (found,) = compared(one, two)
    assert found.largest("train/loss") == 0
    assert (found.passed, found.step) == (False, 2)


def test_speed_is_the_median_and_memory_the_last_known(tmp_path: Path) -> None:
    found = read_run(run_folder(tmp_path / "run", devices=[0, 1, 2]), "run")
    assert (found.tokens_per_second, found.memory, found.processes) == (1001, 321.4, 3)
    old = run_folder(tmp_path / "old", columns=["step", "tokens", *COLUMNS_OF_OLD])
    assert read_run(old, "old").memory is None


COLUMNS_OF_OLD = ["train/loss", "train/tokens_per_second", "val/loss"]


def test_each_run_is_held_against_the_baseline_with_its_settings(tmp_path: Path) -> None:
    folders = [
        run_folder(tmp_path / "eight"),
        run_folder(tmp_path / "ring", devices=4, threads_per_rank=2),
        run_folder(tmp_path / "nine", (6.0, 5.0, 4.0), heads=9),
        run_folder(tmp_path / "three", (6.0, 5.0, 4.0), heads=9, devices=3),
    ]
    found = compared(*folders)
    assert [(one.run.name, one.baseline.name) for one in found] == [
        ("ring", "eight"),
        ("three", "nine"),
    ]
    assert all(one.worst == 0 for one in found)


def test_a_baseline_is_chosen_by_name_or_folder(tmp_path: Path) -> None:
    folders = [
        run_folder(tmp_path / name, devices=size) for name, size in (("a", 1), ("b", 2), ("c", 4))
    ]
    runs = read_runs(folders)
    for named in ("b", str(tmp_path / "b")):
        assert [(r.name, b.name) for r, b in pair(runs, [named])] == [("a", "b"), ("c", "b")]


def test_the_runs_of_a_sweep_are_found_in_order(tmp_path: Path) -> None:
    folders = [run_folder(tmp_path / str(number)) for number in (10, 9, 0)]
    assert [path.name for path in find_runs(str(tmp_path))] == ["0", "9", "10"]
    assert [one.name for one in read_runs(folders)] == ["10", "9", "0"]


@pytest.mark.nightly
def test_what_is_printed_and_written(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    run_folder(sweep / "0")
    run_folder(sweep / "1", (5.0, 4.0, 3.0 * (1 + 1e-5)), devices=4)
    done = command(tmp_path, "sweep=sweep")
    assert done.returncode == 0, done.stderr
    head, base, four, _, said, *files = done.stdout.strip("\n").splitlines()
    assert head.split() == " ".join(COLUMNS).split()
    assert base.split() == ["0", "1", "1001", "321", "baseline"]
    assert four.split() == ["1", "4", "0", "1.00e-05", "0.00e+00", "2", "1001", "321", "pass"]
    assert said.startswith("pass: ")
    assert [Path(file.strip()).name for file in files] == [
        "comparison.csv",
        "losses.csv",
        "comparison.png",
    ]
    with (tmp_path / "out" / "comparison.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["result"] for row in rows] == ["baseline", "pass"]
    lines = (tmp_path / "out" / "losses.csv").read_text().splitlines()
    assert lines[:2] == ["loss,step,tokens,0,1", "train/loss,0,512,5.0,5.0"]
    assert lines[-1] == "val/loss,2,1536,4.5,4.5"
    assert (tmp_path / "out" / "comparison.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.nightly
def test_the_exit_status_tells_of_a_failure(tmp_path: Path) -> None:
    run_folder(tmp_path / "a")
    run_folder(tmp_path / "b", (5.0, 4.0, 3.003), devices=2)
    done = command(tmp_path, "runs=[a,b]")
    assert done.returncode == 1
    assert "FAIL: 1 of 1 runs" in done.stdout
    assert done.stderr == ""
    assert command(tmp_path, "runs=[a,b]", "tolerance=0.01", "baseline=a").returncode == 0


@pytest.mark.nightly
def test_an_error_is_one_message(tmp_path: Path) -> None:
    done = command(tmp_path, "runs=[a,b]")
    assert done.returncode == 1
    assert f"\nConfigError: there is no folder {tmp_path}/a" in done.stderr
    assert "Traceback" not in done.stderr
