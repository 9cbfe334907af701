"""SLURM, as far as a program sees it: the variables that srun sets, and scontrol."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers.launch.expected import came_to_the_same
from tests.helpers.launch.start import SCRIPTS, all_succeeded, free_port, ranks
from tests.ranks.launch.test_signals import AT, left, uninterrupted


def srun(tasks: int, nodes: int = 1, **more: str) -> list[dict[str, str]]:
    """The variables of each task, in rank order; tasks are spread evenly over nodes."""
    here = tasks // nodes
    shared = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "long-context",
        "SLURM_NODELIST": "127.0.0.1",
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_NTASKS": str(tasks),
        "SLURM_NTASKS_PER_NODE": str(here),
        "SLURM_NNODES": str(nodes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    own = [
        {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank % here),
            "SLURM_NODEID": str(rank // here),
        }
        for rank in range(tasks)
    ]
    return [{**shared, **one, **more} for one in own]


@pytest.mark.quick("fabric.py")
@pytest.mark.parametrize("script", ["trainer.py", "fabric.py"])
def test_one_node(script: str, tmp_path: Path) -> None:
    all_succeeded(ranks(tmp_path, srun(2), SCRIPTS / script, tmp_path, 2, 1, "ulysses_ring"))
    came_to_the_same(tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("devices", [1, 2])
def test_two_nodes(devices: int, tmp_path: Path) -> None:
    script = SCRIPTS / "trainer.py"
    tasks = srun(2 * devices, 2)
    all_succeeded(ranks(tmp_path, tasks, script, tmp_path, devices, 2, "ulysses_ring"))
    came_to_the_same(tmp_path, 2 * devices, "ring" if devices == 1 else "two nodes")


@pytest.mark.nightly
def test_a_job_is_queued_again_and_goes_on(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """SIGUSR1 reaches one task only, as with ``--signal=B:USR1``; the job begins anew by itself."""
    asked = tmp_path / "asked"
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {asked}\n')
    program.chmod(0o755)
    path = os.pathsep.join([str(program.parent), os.environ["PATH"]])
    script, folder = SCRIPTS / "stopped.py", tmp_path / "run"
    folder.mkdir()
    first = ranks(folder, srun(2, PATH=path), script, folder, 2, "SIGUSR1", 1, AT, "none")
    assert [one.status for one in first] == [143, 143], first[0].output[-3000:]
    assert asked.read_text() == "requeue 4711\n"
    assert [path.name for path in folder.glob("*.ckpt")] == ["hpc_ckpt_1.ckpt"]
    assert not list(folder.glob(".*"))
    again = ranks(folder, srun(2, PATH=path), script, folder, 2, "none", 0, 0, "none")
    all_succeeded(again)
    assert "hpc_ckpt_1.ckpt" in again[0].output
    assert left(folder) == uninterrupted(tmp_path_factory.getbasetemp() / "uninterrupted")
