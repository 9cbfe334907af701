"""``python -m lightning_cp.checkpoint``."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lightning_cp.apps.train.resume import newest_whole
from lightning_cp.checkpoint.__main__ import main
from lightning_cp.checkpoint.manifest import SaveInfo
from lightning_cp.checkpoint.read import latest_checkpoint, open_checkpoint
from lightning_cp.checkpoint.save import save_checkpoint
from tests.helpers.checkpoint.states import same, state_of


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_there_and_back(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, third = (tmp_path / name for name in "abc")
    about, ours = (
        SaveInfo(7, {"ring": 2}, "fsdp"),
        {"parameters": {"optimizer_states.0": ["weight"]}},
    )
    save_checkpoint(state_of(7), first, form=form, about=about, ours=ours)
    flags = [["--sharded"], []] if form == "full" else [[], ["--sharded"]]
    assert main([str(first), str(second), *flags[0]]) == 0
    assert main([str(second), str(third), *flags[1]]) == 0
    assert second.is_dir() != first.is_dir() == third.is_dir()
    for path in (second, third):
        opened = open_checkpoint(path)
        assert same(opened.read(), state_of(7))
        assert opened.manifest is not None
        assert opened.manifest.about == about
        assert opened.ours["parameters"] == ours["parameters"]
    assert "complete; " in capsys.readouterr().out


@pytest.mark.parametrize("flags", [[], ["--sharded"]], ids=["full", "sharded"])
def test_what_is_converted_is_as_old_as_it_was(flags: list[str], tmp_path: Path) -> None:
    old, new, converted = (tmp_path / f"{name}.ckpt" for name in ("old", "new", "converted"))
    save_checkpoint(state_of(1), old)
    save_checkpoint(state_of(2), new)
    for age, path in ((20, old), (10, new)):
        when = time.time() - age
        os.utime(path, (when, when))
    assert main([str(old), str(converted), *flags]) == 0
    assert latest_checkpoint(tmp_path) == new
    assert newest_whole(tmp_path) == new


def test_verifies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_checkpoint(
        state_of(7), tmp_path / "a", about=SaveInfo(7, {"ring": 2, "ulysses": 1}, "fsdp")
    )
    assert main([str(tmp_path / "a"), "--verify"]) == 0
    assert "complete; full, step 7, saved by fsdp on ring 2, " in capsys.readouterr().out
    torch.save({"w": torch.ones(2)}, tmp_path / "b")
    assert main([str(tmp_path / "b"), "--verify"]) == 0
    assert "could not be verified" in capsys.readouterr().out
    data = bytearray((tmp_path / "a").read_bytes())
    data[300] ^= 1
    (tmp_path / "a").write_bytes(bytes(data))
    assert main([str(tmp_path / "a"), "--verify"]) == 1
    assert "error: a is damaged" in capsys.readouterr().err


def test_refuses_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_checkpoint(state_of(7), tmp_path / "a")
    assert main([str(tmp_path / "a"), str(tmp_path / "a")]) == 1
    assert "a exists already. Remove it" in capsys.readouterr().err
    assert main([str(tmp_path / "no"), str(tmp_path / "b")]) == 1
    assert "Checkpoint file not found" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(tmp_path / "a")])
    assert "give a target to be written, or --verify" in capsys.readouterr().err


@pytest.mark.nightly
def test_as_a_program(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lightning_cp.checkpoint", str(tmp_path / "no"), "--verify"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("error: Checkpoint file not found")
    assert len(done.stderr.splitlines()) == 1
