"""``python -m lightning_cp.plan`` as a user runs it: what is printed, written, and refused."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hydra.utils import instantiate

from tests.helpers.launch.start import Done, ranks
from tests.helpers.planner.configs import SMALL as SMALL_CONFIG
from tests.helpers.planner.measured import MEASURED

TRAIN = "lightning_cp.train"
SMALL = ("model=llama_small", "devices=4", "seq_len=512")


def run(cwd: Path, module: str, *arguments: str) -> Done:
    """In a process that need not import all again."""
    (done,) = ranks(cwd, [{}], "-m", module, *arguments, apart=True)
    return done


@pytest.mark.nightly
def test_a_plan_and_the_files_that_it_leaves(tmp_path: Path) -> None:
    done = run(tmp_path, "lightning_cp.plan", *SMALL, f"hydra.run.dir={tmp_path}", "--verify")
    assert done.status == 0, done.errors
    assert "What fits, fastest first" in done.output
    assert "Process groups: all " in done.output
    assert "as many as the planner counts" in done.output
    assert "\nas predicted, in " in done.output
    assert (tmp_path / "plan.png").stat().st_size > 10_000
    assert (tmp_path / "plan.txt").read_text() in done.output
    written = (tmp_path / "strategy" / "plan.yaml").read_text()
    given = yaml.safe_load(written)
    assert written.startswith("# @package _global_")
    assert given["trainer"]["devices"] == 4
    sizes = [given["strategy"][f"{axis}_size"] for axis in ("data_parallel", "ring", "ulysses")]
    assert sizes[0] == 1
    assert sizes[1] * sizes[2] == 4
    # The lines that the planner prints to run it compose, with every key known, to the same run.
    with_file, without = (composed(tmp_path, line) for line in printed(done.output))
    assert with_file == without
    assert with_file["strategy"]["ring_size"] == sizes[1]
    assert with_file["data"]["seq_len"] == 512


def printed(text: str) -> list[str]:
    """Commands that train."""
    lines = [
        line for line in text.splitlines() if line.startswith("  python -m lightning_cp.train ")
    ]
    assert len(lines) == 2
    return lines


def composed(cwd: Path, line: str) -> dict[str, Any]:
    """The config that a printed command gives, with its model's optimizer made."""
    done = run(cwd, TRAIN, *shlex.split(line)[3:], "--cfg", "job")
    assert done.status == 0, done.errors
    config = yaml.safe_load(done.output)
    instantiate(config["model"]["optimizer"])([torch.nn.Parameter(torch.zeros(1))])
    return config


@pytest.mark.nightly
@pytest.mark.parametrize("optimizer", ["momentum", "sgd"])
def test_the_run_has_the_model_and_the_optimizer_that_were_planned(
    tmp_path: Path, optimizer: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL_CONFIG))
    asked = ["model=config_json", f"model.network.config={tmp_path}", "devices=4", "seq_len=512"]
    asked += ["engine=fsdp", f"optimizer={optimizer}", f"hydra.run.dir={tmp_path / 'plan'}"]
    done = run(tmp_path, "lightning_cp.plan", *asked, "--verify")
    assert done.status == 0, done.errors
    for line in printed(done.output):
        config = composed(tmp_path, line)
        assert config["model"]["network"]["config"] == str(tmp_path)
        given = config["model"]["optimizer"]
        assert given["_target_"] == "torch.optim.SGD"
        assert given.get("momentum", 0) == (0.9 if optimizer == "momentum" else 0)


@pytest.mark.quick("overrides1-model must be one of the group model")
@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["hardware=laptop"], "hardware must be one of h100, h200"),
        (["model=null"], "model must be one of the group model"),
        (["mesh.ring=3"], "no mesh of 4 devices has ring=3"),
    ],
)
def test_what_is_refused_is_told_in_a_line(tmp_path: Path, overrides: list[str], told: str) -> None:
    command = [sys.executable, "-m", "lightning_cp.plan", *SMALL, *overrides]
    command += [f"hydra.run.dir={tmp_path}"]  # a real program: no frames but ours
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "ConfigError: " in done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.nightly
def test_where_nothing_fits(tmp_path: Path) -> None:
    """Status 1, what comes closest, and no choice of strategy."""
    story = ["model=llama3_405b", "hardware=tpu_v4", "devices=128", "precision=fp32"]
    story += ["optimizer=none", "engine=hsdp", "mesh.dp_replicate=8", "mesh.dp_shard=16"]
    done = run(tmp_path, "lightning_cp.plan", *story, f"hydra.run.dir={tmp_path}")
    assert done.status == 1, done.errors
    assert "Nothing fits" in done.output
    assert "87.5% of the devices" in done.output
    assert "208.0 MiB wanted" in done.output
    assert not (tmp_path / "strategy").exists()


@pytest.mark.nightly
def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    """As ``| head``: quiet, and the files are there."""
    command = [sys.executable, "-m", "lightning_cp.plan", *SMALL, f"hydra.run.dir={tmp_path}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        running.stdout.close()
        _, told = running.communicate(timeout=120)
    assert told == b""
    assert running.returncode in (0, 141)
    assert (tmp_path / "plan.txt").is_file()
    assert (tmp_path / "strategy" / "plan.yaml").is_file()


@pytest.mark.nightly
def test_where_nothing_fits_there_is_nothing_to_verify(tmp_path: Path) -> None:
    """Nor to run: the choice of an earlier run goes."""
    old = tmp_path / "strategy" / "plan.yaml"
    old.parent.mkdir()
    old.write_text("old")
    asked = ["model=llama3_8b", "devices=1", "seq_len=4096", f"hydra.run.dir={tmp_path}"]
    done = run(tmp_path, "lightning_cp.plan", *asked, "--verify")
    assert done.status == 1
    assert "Nothing fits" in done.output
    assert "Closest: 1 device, " in done.output
    assert "nothing to verify" in done.output
    assert not old.exists()


@pytest.mark.nightly
def test_what_was_planned_for_a_measured_machine_trains(tmp_path: Path) -> None:
    """Both of the printed commands, as they are, on this machine's processors."""
    hardware = tmp_path / "hardware.json"
    MEASURED.save(hardware)
    folder = tmp_path / "plan"
    asked = [*SMALL, f"hardware={hardware}", "precision=fp32", f"hydra.run.dir={folder}"]
    done = run(tmp_path, "lightning_cp.plan", *asked)
    assert done.status == 0, done.errors
    for at, line in enumerate(printed(done.output)):
        own = ["experiment=smoke", f"hydra.run.dir={tmp_path / str(at)}"]
        trained = run(tmp_path, TRAIN, *shlex.split(line)[3:], *own)
        assert trained.status == 0, trained.errors
        assert "trained               4 steps" in trained.output
