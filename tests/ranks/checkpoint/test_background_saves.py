"""Saves in the background: whoever waited for one finds all of it, however slow the rank that writes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lightning_cp.checkpoint import manager as saver_module
from lightning_cp.checkpoint.manager import CheckpointManager
from lightning_cp.checkpoint.manifest import SaveInfo
from lightning_cp.checkpoint.save import BackgroundSave
from tests.helpers.pool import run_ranks

PATIENCE = 0.3


def until(there: Path) -> None:
    """Wait for another rank to have gone on, which it never does where all ranks wait."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and not there.exists():
        time.sleep(0.01)


def waits(rank: int, world_size: int, folder: Path) -> tuple[bool, bool]:
    """Whether checkpoint and link are there once ``finish`` returns; the first rank lets others go first."""
    gone_on = folder / "gone on"

    class Slow(BackgroundSave):
        def _run(self, planned: object, limit: float) -> None:
            if rank == 0:
                until(gone_on)
            super()._run(planned, limit)  # type: ignore[arg-type]

    class SlowSaver(CheckpointManager):
        def _link(self, target: Path, link: Path) -> bool:
            until(gone_on)
            return super()._link(target, link)

    before = saver_module.BackgroundSave
    saver_module.BackgroundSave = Slow  # type: ignore[misc]
    try:
        saver = SlowSaver("full", in_background=True)
        saver.save({"x": torch.ones(3)}, folder / "one.ckpt", SaveInfo(1, {}, "ddp"), {})
        saver.link(folder / "one.ckpt", folder / "last.ckpt")
        saver.finish()
        found = (folder / "one.ckpt").is_file(), (folder / "last.ckpt").is_symlink()
        if rank:
            gone_on.touch()
    finally:
        saver_module.BackgroundSave = before  # type: ignore[misc]
    return found


def test_all_ranks_wait_for_the_checkpoint_and_its_links(tmp_path: Path) -> None:
    assert run_ranks(2, waits, tmp_path) == [(True, True), (True, True)]


ENDS = """
import resource, sys
import torch
from lightning.fabric import Fabric
from lightning_cp.errors import CheckpointError
from lightning_cp.fabric import UlyssesRingStrategy

fabric = Fabric(accelerator="cpu", devices=1, strategy=UlyssesRingStrategy(async_save=True))
fabric.launch()
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
fabric.save("a", {"w": torch.ones(200, 200)})
if sys.argv[1] == "asks":
    try:
        fabric.strategy.wait_for_saves()
    except CheckpointError:
        pass
print("the script has ended")
"""


@pytest.mark.nightly
@pytest.mark.parametrize(("asks", "status"), [("asks", 0), ("does not", 120)])
def test_a_script_does_not_end_well_if_its_last_save_failed(
    asks: str, status: int, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS, asks],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == status, done.stderr
    assert done.stdout == "the script has ended\n"
    assert "cannot save a: File too large" in done.stderr
    assert ("CheckpointError: cannot save a" in done.stderr) == bool(status)
    assert list(tmp_path.iterdir()) == []


HANDLED = "called by nobody in Python\ntheir handler begins\ntheir handler ends\n"
ENDS_BADLY = ("falls off", "exit 143", "error", "caught", "put back", "closed", "no output")


@pytest.mark.nightly
def test_a_failed_save_ends_every_program_badly_and_all_else_of_the_end_is_done(
    tmp_path: Path,
) -> None:
    wanted = {f"{how}, {when}": 120 for how in ENDS_BADLY for when in ("quick", "slow")}
    wanted |= {"exit 0, asks": 0, "exit 143, asks": 143}
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.checkpoint.ends", *wanted],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stderr == ""
    assert dict(zip(wanted, map(int, done.stdout.split()), strict=True)) == wanted
    for way, status in wanted.items():
        said = Path(tmp_path, f"{way}<stderr>").read_text()
        assert said.count("No space left on device") == (2 if status == 120 else 1), said
        assert said.count("Exception ignored in") == (status == 120), said
        if not way.startswith(("closed", "no output")):
            assert Path(tmp_path, f"{way}<stdout>").read_text() == HANDLED, way
