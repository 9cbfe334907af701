"""Runs whose hosts wait for stand-ins of GPUs longer than ``step_timeout``."""

from __future__ import annotations

import os
import subprocess
import sys

from lightning_cp.watchdog.watch import SWITCH
from tests.helpers.installed import ROOT


def run(case: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.nightly.watchdog.slow_device", case]
    environment = {**os.environ, SWITCH: "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180, check=False
    )


def test_a_device_that_works_is_waited_for() -> None:
    done = run("works")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("FIT DONE 5") == 2


def test_a_device_that_stands_still_is_named() -> None:
    done = run("stands")
    assert done.returncode == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("no rank made progress for 8 s; first to stop: rank 1 "), done.stderr
    assert "whose device cuda:1 stands still at step 3, in backward (its host is at step 3" in last
    assert "FIT DONE" not in done.stdout
