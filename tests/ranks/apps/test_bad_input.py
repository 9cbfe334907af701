"""Every refusal of the comparison, by its message."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_cp.apps.compare.agreement import deviations
from lightning_cp.apps.compare.runs import find_runs, pair, read_run, read_runs
from lightning_cp.errors import ConfigError
from tests.helpers.apps.folders import COLUMNS, run_folder
from tests.ranks.apps.test_compare import command, compared


def test_missing_folders(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sweep=.*nothing is not a folder"):
        find_runs(str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match=r"has no run inside.*runs=\[folder,folder\]"):
        find_runs(str(tmp_path))
    with pytest.raises(ConfigError, match=r"there is no folder .*gone, which was given as a run"):
        read_run(tmp_path / "gone", "gone")


def test_folders_that_are_no_runs_or_failed_at_once(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match=r"other has no .hydra/config.yaml: it is not the folder"):
        read_run(tmp_path / "other", "other")
    folder = run_folder(tmp_path / "run")
    (folder / "metrics" / "metrics.csv").unlink()
    with pytest.raises(ConfigError, match=r"run has no metrics/metrics.csv: .*or the run failed"):
        read_run(folder, "run")


def test_missing_columns(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", columns=["step", "tokens", "val/loss"])
    match = r"has no column train/loss, train/tokens_per_second; it has step, tokens, val/loss"
    with pytest.raises(ConfigError, match=match):
        read_run(folder, "run")


def test_columns_without_values(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    (folder / "metrics" / "metrics.csv").write_text(",".join(COLUMNS) + "\n")
    with pytest.raises(ConfigError, match="has no value of train/loss: the run ended before any"):
        read_run(folder, "run")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_losses_that_are_not_finite(tmp_path: Path, value: float) -> None:
    folder = run_folder(tmp_path / "run", (5.0, value, 3.0))
    with pytest.raises(ConfigError, match=rf"train/loss of .*run is {value} at step 1"):
        read_run(folder, "run")


def test_other_lengths(tmp_path: Path) -> None:
    one = run_folder(tmp_path / "one")
    two = run_folder(tmp_path / "two", (5.0, 4.0), devices=2)
    match = "two and its baseline one have train/loss at different steps: 2 from 0 to 1, and 3 from 0 to 2"
    with pytest.raises(ConfigError, match=match):
        compared(one, two)


def test_other_settings(tmp_path: Path) -> None:
    one = run_folder(tmp_path / "one")
    two = run_folder(tmp_path / "two", devices=2, heads=9, extra={"more": True})
    match = r"different settings: extra.more is True, there None; model.heads is 9, there 8. Only strategy"
    with pytest.raises(ConfigError, match=match):
        compared(one, two)


def test_other_batches(tmp_path: Path) -> None:
    one = run_folder(tmp_path / "one")
    two = run_folder(tmp_path / "two", devices=4, tokens=2048)
    match = "two had trained on 2048 tokens at step 0, its baseline one on 512: their batches are different"
    with pytest.raises(ConfigError, match=match):
        compared(one, two)


def test_no_baseline_several_or_nothing_else(tmp_path: Path) -> None:
    two, four = (run_folder(tmp_path / str(size), devices=size) for size in (2, 4))
    with pytest.raises(ConfigError, match=r"no run is a baseline.*2 \(2 processes\), 4 \(4 proc"):
        pair(read_runs([two, four]))
    ones = [run_folder(tmp_path / name) for name in ("a", "b")]
    with pytest.raises(ConfigError, match="every run is a baseline"):
        pair(read_runs(ones))
    match = r"2 has several baselines of the same settings: a \(1 .*Choose one: baseline=a"
    with pytest.raises(ConfigError, match=match):
        pair(read_runs([*ones, two]))
    with pytest.raises(ConfigError, match=r"baseline=c is none of the runs: a \(1"):
        pair(read_runs(ones), ["c"])


def test_too_few_runs_and_one_given_twice(tmp_path: Path) -> None:
    one = run_folder(tmp_path / "one")
    with pytest.raises(ConfigError, match="nothing to compare: 1 run was given"):
        read_runs([one])
    with pytest.raises(ConfigError, match=r"runs names .*one more than once"):
        read_runs([one, one])


@pytest.mark.parametrize("tolerance", [0.06, -1e-9, True, "loose"])
def test_tolerances(tmp_path: Path, tolerance: float | str) -> None:
    pairs = pair(read_runs([run_folder(tmp_path / "a"), run_folder(tmp_path / "b", devices=2)]))
    with pytest.raises(ConfigError, match=r"tolerance=.* is not between 0 and 0.05. 5% is what is"):
        deviations(pairs, tolerance)
    assert deviations(pairs, 0)[0].passed


def test_no_tolerance_is_known_for_lower_precision(tmp_path: Path) -> None:
    folders = [
        run_folder(tmp_path / str(size), devices=size, precision="bf16-mixed") for size in (1, 2)
    ]
    with pytest.raises(ConfigError, match=r"2 was trained in bf16-mixed, and tolerance=auto knows"):
        compared(*folders)
    assert compared(*folders, tolerance=0.02)[0].passed


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        ((), "says what to compare; got none"),
        (("runs=[a,b]", "sweep=c"), "says what to compare; got runs and sweep"),
        (("train={overrides:[],runs:{a/b:[]}}",), "a run's folder is named like it; got ['a/b']"),
        (("train={overrides:[],runs:{}}",), "train.runs must map names to lists"),
    ],
    ids=["nothing", "two", "name", "no-runs"],
)
def test_what_to_compare_is_said_once(
    tmp_path: Path, overrides: tuple[str, ...], match: str
) -> None:
    done = command(tmp_path, *overrides)
    assert done.returncode == 1
    assert match in done.stderr
