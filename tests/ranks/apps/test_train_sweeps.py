"""Sweeps of the main job: other numbers of processes from job to job, other strategies, a job that fails.

The long ones: ``pytest -m nightly tests/ranks/apps``.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.helpers.launch.programs import run
from tests.nightly.apps.test_train import SMALL


def losses(job: Path) -> list[float]:
    """Of every step; raises if the job did not come to its end."""
    assert (job / "checkpoints" / "last.ckpt").is_file()
    with (job / "metrics" / "metrics.csv").open(newline="") as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]


def sweep(cwd: Path, *overrides: str, status: int = 0) -> tuple[list[Path], str]:
    """The folders of a sweep's jobs and what was printed."""
    command = ("-m", "lightning_cp.train", "-m", *SMALL, "hydra.sweep.dir=tree", *overrides)
    done = run(cwd, *command, timeout=290)
    assert done.returncode == status, done.stderr[-4000:]
    assert [path.name for path in cwd.iterdir()] == ["tree"]  # one output tree
    printed = done.stdout + done.stderr
    assert "Warning" not in printed
    return sorted(path for path in (cwd / "tree").iterdir() if path.is_dir()), printed


@pytest.mark.nightly
def test_jobs_of_other_sizes_follow_each_other(tmp_path: Path) -> None:
    jobs, printed = sweep(tmp_path, "strategy=ulysses", "trainer.devices=2,1")
    assert [losses(job) for job in jobs] == [pytest.approx(losses(jobs[1]), rel=1e-5)] * 2
    assert "processes             2" in printed
    assert "processes             1" in printed


@pytest.mark.nightly
def test_modes_and_sizes(tmp_path: Path) -> None:
    jobs, printed = sweep(tmp_path, "strategy.mode=ulysses,ring", "trainer.devices=2,4")
    assert [losses(job) for job in jobs] == [pytest.approx(losses(jobs[0]), rel=1e-5)] * 4
    for split in (
        "ulysses 2 x ring 1",
        "ulysses 4 x ring 1",
        "ulysses 1 x ring 2",
        "ulysses 1 x ring 4",
    ):
        assert printed.count(split) == 1


@pytest.mark.nightly
def test_hybrid_on_four_and_eight(tmp_path: Path) -> None:
    jobs, printed = sweep(tmp_path, "strategy=hybrid", "trainer.devices=4,8")
    assert losses(jobs[1]) == pytest.approx(losses(jobs[0]), rel=1e-5)
    assert "ulysses 2 x ring 2" in printed
    assert "ulysses 4 x ring 2" in printed


@pytest.mark.nightly
def test_stock_strategies_in_between_and_a_job_that_fails(tmp_path: Path) -> None:
    jobs, printed = sweep(
        tmp_path, "strategy=ring,ddp,ulysses,single", "trainer.devices=3,1", status=1
    )
    assert len(jobs) == 8
    assert "1 of 8 jobs failed" in printed  # 3 does not divide 8 heads
    assert printed.count("ConfigError: ulysses_size=3 does not divide the model's 8") == 1
    assert "Job #4" in printed
    rings, plain = losses(jobs[0]), losses(jobs[2])
    assert rings == pytest.approx(losses(jobs[7]), rel=1e-5)
    assert plain[1:] != pytest.approx(rings[1:], rel=1e-5)  # three batches a step
