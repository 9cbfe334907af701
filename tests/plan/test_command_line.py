"""``python -m lightning_cp.plan`` as a user runs it: what is printed, written, and refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

TRAIN = "lightning_cp.train"
SMALL = ("model=llama_small", "devices=4", "seq_len=512")


def run(module: str, *arguments: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def test_a_plan_and_the_files_that_it_leaves(tmp_path: Path) -> None:
    done = run("lightning_cp.plan", *SMALL, f"hydra.run.dir={tmp_path}", "--verify")
    assert done.returncode == 0, done.stderr
    assert "What fits, fastest first" in done.stdout
    assert "Process groups: all " in done.stdout
    assert "as many as the planner counts" in done.stdout
    assert "\nas predicted, in " in done.stdout
    assert (tmp_path / "plan.png").stat().st_size > 10_000
    assert (tmp_path / "plan.txt").read_text() in done.stdout
    written = (tmp_path / "strategy" / "plan.yaml").read_text()
    given = yaml.safe_load(written)
    assert written.startswith("# @package _global_")
    assert given["trainer"]["devices"] == 4
    sizes = [given["strategy"][f"{axis}_size"] for axis in ("data_parallel", "ring", "ulysses")]
    assert sizes[0] == 1
    assert sizes[1] * sizes[2] == 4
    # The line that the planner prints to run it composes, with every key known.
    (line,) = (line for line in done.stdout.splitlines() if "--config-dir" in line)
    composed = run(TRAIN, *line.split("lightning_cp.train ")[1].split(), "--cfg", "job")
    assert composed.returncode == 0, composed.stderr
    train = yaml.safe_load(composed.stdout)
    assert train["strategy"]["ring_size"] == sizes[1]
    assert train["data"]["seq_len"] == 512


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["hardware=laptop"], "hardware must be one of h100, h200"),
        (["mesh.ring=3"], "no mesh of 4 devices has ring=3"),
    ],
)
def test_what_is_refused_is_told_in_a_line(tmp_path: Path, overrides: list[str], told: str) -> None:
    done = run("lightning_cp.plan", *SMALL, *overrides, f"hydra.run.dir={tmp_path}")
    assert done.returncode == 1
    assert done.stderr.startswith("ConfigError: ")
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_where_nothing_fits(tmp_path: Path) -> None:
    """Status 1, what comes closest, and no choice of strategy."""
    story = ["model=llama3_405b", "hardware=tpu_v4", "devices=128", "precision=fp32"]
    story += ["optimizer=none", "engine=hsdp", "mesh.dp_replicate=8", "mesh.dp_shard=16"]
    done = run("lightning_cp.plan", *story, f"hydra.run.dir={tmp_path}")
    assert done.returncode == 1, done.stderr
    assert "Nothing fits" in done.stdout
    assert "87.5% of the devices" in done.stdout
    assert "208.0 MiB wanted" in done.stdout
    assert not (tmp_path / "strategy").exists()
