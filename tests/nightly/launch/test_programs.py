"""Real programs, started as a user starts them: each rank imports everything itself.

A rank takes seconds to start, so there is one for each way; the others are in the files beside this one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.helpers.installed import installed_path
from tests.helpers.launch.expected import came_to_the_same
from tests.helpers.launch.start import SCRIPTS, all_succeeded, finish, free_port, program, ranks

RUN = "torch.distributed.run"


def test_one_word_and_no_import(tmp_path: Path) -> None:
    """``python script.py``: torch calls the entry point, Lightning starts the second process.

    It keeps the RANK that a platform has set for the one process that it knows of.
    """
    variables = {"PYTHONPATH": installed_path(tmp_path), "RANK": "0", "WORLD_SIZE": "1"}
    script = SCRIPTS / "trainer.py"
    with program(tmp_path, script, tmp_path, "2", "1", "ulysses_ring", **variables) as started:
        printed = finish(started)
    assert printed.count("context parallel: ulysses 2 x ring 1") == 1
    came_to_the_same(tmp_path)


def test_torchrun(tmp_path: Path) -> None:
    path = {"PYTHONPATH": installed_path(tmp_path)}
    torchrun = ("-m", RUN, "--nproc-per-node=2", f"--master-port={free_port()}")
    script = SCRIPTS / "trainer.py"
    all_succeeded(ranks(tmp_path, [path], *torchrun, script, tmp_path, 2, 1, "ulysses_ring"))
    came_to_the_same(tmp_path)


def test_fabric_run(tmp_path: Path) -> None:
    path = {"PYTHONPATH": installed_path(tmp_path)}
    fabric = Path(sys.executable).with_name("fabric")
    options = ("--strategy=ulysses_ring", "--devices=2", "--accelerator=cpu")
    run = (fabric, "run", *options, f"--main-port={free_port()}")
    all_succeeded(ranks(tmp_path, [path], *run, SCRIPTS / "fabric.py", tmp_path))
    came_to_the_same(tmp_path)


@pytest.mark.parametrize("script", ["trainer.py", "fabric.py"])
@pytest.mark.parametrize("devices", [1, 2])
def test_torchrun_on_two_nodes(script: str, devices: int, tmp_path: Path) -> None:
    """Two agents on one machine, which know of each other only an address and a port."""
    path = {"PYTHONPATH": installed_path(tmp_path)}
    port = free_port()
    common = [f"--nproc-per-node={devices}", "--nnodes=2", "--master-addr=127.0.0.1"]
    common += [f"--master-port={port}"]
    arguments = [SCRIPTS / script, tmp_path, str(devices), "2", "ulysses_ring"]
    first = ["-m", RUN, *common, "--node-rank=0", *arguments]
    second = ["-m", RUN, *common, "--node-rank=1", *arguments]
    with program(tmp_path, *first, **path) as one, program(tmp_path, *second, **path) as other:
        finish(one)
        finish(other)
    came_to_the_same(tmp_path, 2 * devices, "ring" if devices == 1 else "two nodes")
