"""The main job, all of whose ranks were started by somebody else: one folder, one table, the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_cp.utils.run_folder import rank_of_cluster
from tests.helpers.launch.start import (
    all_succeeded,
    finish,
    free_port,
    program,
    ranks,
    torchrun_variables,
)
from tests.nightly.apps.test_train import SMALL

JOB = ("-m", "lightning_cp.train", *SMALL, "strategy=ring", "trainer.devices=2")


def test_one_folder_and_one_table(tmp_path: Path) -> None:
    """Each rank would choose its folder by itself, as at different seconds of the day."""
    done = ranks(tmp_path, torchrun_variables(2), *JOB, "hydra.run.dir=run${oc.env:RANK}")
    first, second = all_succeeded(done)
    assert "byte-unigram entropy  " in first.output
    assert "byte-unigram entropy  " not in second.output
    assert {path.name for path in tmp_path.iterdir()} == {"run0", "output0.txt", "output1.txt"}
    left = {path.name for path in (tmp_path / "run0").iterdir()}
    assert left == {".hydra", "metrics", "loss.png", "checkpoints"}


def test_the_weights_of_torchrun_are_those_of_lightning_s_own_launcher(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port", free_port())
    with program(tmp_path, *JOB, "hydra.run.dir=own") as started:
        finish(started)
    with program(tmp_path, *torchrun, *JOB, "hydra.run.dir=torchrun") as started:
        finish(started)
    own, other = (
        torch.load(tmp_path / run / "checkpoints" / "last.ckpt", weights_only=False)["state_dict"]
        for run in ("own", "torchrun")
    )
    assert own.keys() == other.keys()
    assert all(torch.equal(own[name], other[name]) for name in own)


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, 0),
        ({"RANK": "3", "LOCAL_RANK": "3"}, 0),  # Lightning starts the ranks, and names the folder
        ({"TORCHELASTIC_RUN_ID": "none", "RANK": "3"}, 3),
        ({"TORCHELASTIC_RUN_ID": "none"}, 0),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "2"}, 2),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "two"}, 0),
    ],
)
def test_who_was_started_by_a_cluster(environment: dict[str, str], rank: int) -> None:
    assert rank_of_cluster(environment) == rank
