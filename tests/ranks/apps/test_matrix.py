"""Runs that the comparison makes itself. The whole matrix: ``pytest -m nightly`` of this file (minutes)."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lightning_cp.apps.compare.__main__ import compare, repeat_for_seeds
from lightning_cp.errors import ConfigError
from tests.nightly.apps.test_train import SMALL
from tests.ranks.apps.test_compare import command


def runs_of(**runs: str) -> str:
    """The override that makes small runs: name -> overrides, joined by commas."""
    named = ",".join(f"{name}:[{quoted(*own.split(','))}]" for name, own in runs.items())
    return f"train={{overrides:[{quoted(*SMALL)}],runs:{{{named}}}}}"


def quoted(*overrides: str) -> str:
    return ",".join(f"'{override}'" for override in overrides)


def test_each_run_is_made_with_each_seed() -> None:
    assert repeat_for_seeds(["y=1"], {"a": ["x=1"], "b": []}, [0, 3]) == {
        "a_seed0": ["x=1", "seed=0"],
        "a_seed3": ["x=1", "seed=3"],
        "b_seed0": ["seed=0"],
        "b_seed3": ["seed=3"],
    }


@pytest.mark.parametrize("seeds", [[0.5], ["one"], [True], [], 1, "0,1"], ids=str)
def test_seeds_that_are_none(seeds: Any) -> None:
    with pytest.raises(ConfigError, match=r"train.seeds must be whole numbers, as \[0,1,2\]"):
        repeat_for_seeds([], {"a": []}, seeds)


def test_seeds_beside_seeds() -> None:
    with pytest.raises(ConfigError, match=r"train.seeds has one twice: \[1, 1\]"):
        repeat_for_seeds([], {"a": []}, [1, 1])
    with pytest.raises(ConfigError, match="goes over the seed that b has already"):
        repeat_for_seeds([], {"a": [], "b": ["seed=4"]}, [0, 1])
    with pytest.raises(ConfigError, match=r"goes over the seed that train\.overrides has already"):
        repeat_for_seeds(["seed=4"], {"a": []}, [0, 1])


@pytest.mark.parametrize("runs", [{}, {"runs": None}, {"runs": ["a"]}], ids=str)
def test_runs_that_are_none(runs: dict[str, Any], tmp_path: Path) -> None:
    config = OmegaConf.create({"runs": [], "sweep": None, "train": {"overrides": ["x=1"], **runs}})
    with pytest.raises(ConfigError, match=r"train\.runs must map names to lists of overrides"):
        compare(config, tmp_path)


def test_the_program_makes_each_run_with_each_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def note(overrides: list[str], runs: Any, folder: Path) -> tuple[list[Path], list[str]]:
        asked.update(runs)
        return [], list(runs)

    monkeypatch.setattr("lightning_cp.apps.compare.__main__.make_runs", note)
    config = OmegaConf.create(
        {"runs": [], "sweep": None, "train": {"runs": {"a": ["x=1"]}, "seeds": [0, 1]}}
    )
    with pytest.raises(ConfigError, match="a_seed0, a_seed1 failed"):
        compare(config, tmp_path)
    assert asked == {"a_seed0": ["x=1", "seed=0"], "a_seed1": ["x=1", "seed=1"]}


@pytest.mark.nightly
def test_runs_are_made_and_compared(tmp_path: Path) -> None:
    train = runs_of(alone="strategy=single", ring="strategy=ring,trainer.devices=2")
    done = command(tmp_path, train, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[1/2] alone" in done.stdout
    assert "Epoch" not in done.stdout  # the runs' own output goes to files
    assert "speed " in (tmp_path / "out" / "runs" / "ring" / "output.txt").read_text()
    alone, ring = table(tmp_path)
    assert (alone["result"], ring["result"]) == ("baseline", "pass")
    assert float(ring["train deviation"]) < 1e-5
    assert all(float(row["MiB/process"]) > 100 for row in (alone, ring))


@pytest.mark.nightly
def test_a_run_that_fails_stops_no_other_and_fails_the_comparison(tmp_path: Path) -> None:
    train = runs_of(broken="resume=nope.ckpt", alone="strategy=single", again="strategy=single")
    done = command(tmp_path, train, "baseline=alone", timeout=250)
    assert done.returncode == 1
    assert "exit status 1" in done.stdout
    assert "CheckpointError: resume=nope.ckpt is not a checkpoint" in done.stdout
    assert "(all of it: " in done.stdout
    assert "pass: no loss is further" in done.stdout
    assert "FAIL: 1 runs did not come to their end: broken." in done.stdout
    assert [row["run"] for row in table(tmp_path)] == ["alone", "again"]


@pytest.mark.nightly
def test_ctrl_c_ends_it_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lightning_cp.compare", f"hydra.run.dir={tmp_path / 'out'}"]
    process = subprocess.Popen(
        [*command, runs_of(alone="strategy=single", again="strategy=single")],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    began = process.stdout.read(len("[1/2]"))
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it
    _, errors = process.communicate(timeout=60)
    assert began == "[1/2]"
    assert process.returncode == 130
    assert errors.strip() == "Interrupted; the runs that were made so far are kept."


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_the_mode_matrix_agrees(tmp_path: Path) -> None:
    done = command(tmp_path, "experiment=mode_matrix", timeout=1100)
    assert done.returncode == 0, done.stdout + done.stderr
    results = {row["run"]: row for row in table(tmp_path)}
    assert [results.pop(name)["result"] for name in ("baseline", "baseline_9_heads")] == [
        "baseline"
    ] * 2
    assert set(results) == {
        *("3x1", "1x4", "3x2", "4x2", "2x4", "8x1", "1x8"),
        *("gather_1x4", "gather_2x2"),
    }
    assert {row["result"] for row in results.values()} == {"pass"}
    assert results["3x2"]["baseline"] == "baseline_9_heads"


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "out" / "comparison.csv").open(newline="") as file:
        return list(csv.DictReader(file))
