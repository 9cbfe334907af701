"""``python -m lightning_cp.doctor``, as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.launch.start import ranks


def doctor(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which starts the other ranks."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "lightning_cp.doctor", "experiment=smoke", *overrides]
    return subprocess.run(
        [*command, f"hydra.run.dir={folder}"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.nightly
def test_the_main_job_is_well(tmp_path: Path) -> None:
    """Whatever the main job's own setting is."""
    settings = ("strategy.parity_tokens=128", "strategy.parity_check=off")
    found = doctor(tmp_path, "strategy=ring", "trainer.devices=2", *settings)
    assert found.returncode == 0, found.stderr
    assert "parity: one process and context parallel agree on 128 tokens (float32" in found.stderr
    assert found.stderr.count("parity: comparing") == 1
    assert not list(tmp_path.glob("**/*.ckpt")), "nothing was trained"


@pytest.mark.nightly
def test_a_fault_is_shown_once(tmp_path: Path) -> None:
    """A network whose first block sees what is before a token."""
    network = "model.network._target_=tests.helpers.parity.networks.llama_that_mixes"
    found = doctor(tmp_path, "strategy=ring", "trainer.devices=2", network)
    assert found.returncode == 1, found.stderr
    assert found.stderr.count("Likely cause: a module that mixes the sequence.") == 1


@pytest.mark.quick("strategy=single-shares no sequence")
@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("strategy=single", "shares no sequence"),
        ("strategy.parity_tokens=0", "at least 1, got 0"),
        pytest.param(
            "strategy.parity_check=sometimes",
            "parity_check must be 'first_batch'",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_nothing_to_compare(override: str, told: str, tmp_path: Path) -> None:
    asked = ("experiment=smoke", override, f"hydra.run.dir={tmp_path}")
    (found,) = ranks(tmp_path, [{}], "-m", "lightning_cp.doctor", *asked, apart=True)
    assert found.status == 1
    assert told in found.errors
