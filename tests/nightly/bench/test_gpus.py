"""Every line of ``lightning_cp.bench.gpus``, rehearsed on CPU: as torchrun starts it, and by itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpus import command
from tests.helpers.installed import ROOT
from tests.helpers.launch.start import environment, free_port

MODULE = ("-m", "lightning_cp.bench.gpus")


def rehearse(folder: Path, *arguments: str) -> list[dict[str, object]]:
    """Run the command; the lines of its report, all of which must have passed."""
    done = subprocess.run(
        [sys.executable, *arguments, "--rehearse", "--folder", str(folder)],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert {path.name for path in folder.iterdir()} >= {"gpus.md", "gpus.json"}
    return json.loads((folder / "gpus.json").read_text())["lines"]


@pytest.mark.parametrize("count", [2, 4])
def test_all_lines_pass(count: int, tmp_path: Path) -> None:
    found = rehearse(tmp_path, *MODULE, "--devices", str(count))
    assert [line["line"] for line in found] == [line.name for line in command.lines(count)]
    assert all(line["passed"] for line in found)


def test_torchrun_starts_it(tmp_path: Path) -> None:
    agent = ("-m", "torch.distributed.run", "--nproc-per-node=3", f"--master-port={free_port()}")
    found = rehearse(tmp_path, *agent, *MODULE, "--short")
    assert len(found) == sum(line.is_short for line in command.lines(3))
