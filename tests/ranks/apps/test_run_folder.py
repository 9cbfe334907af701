"""The folder that a command line asks for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_cp.errors import ConfigError
from lightning_cp.utils.run_folder import check_folder

OPTIONS = ["hydra.run.dir", "hydra.sweep.dir"]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("path", ["file", "file/run"])
def test_a_folder_that_cannot_be_made(option: str, path: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=rf"{option}=.* cannot be made: .*file is a file"):
        check_folder(["train", "seed=1", f"{option}={tmp_path / path}"])


def test_others_can(tmp_path: Path) -> None:
    check_folder(["train", f"hydra.run.dir={tmp_path / 'new' / 'run'}", "hydra.run.dir=new"])


@pytest.mark.nightly
@pytest.mark.parametrize("program", ["train", "bench"])
def test_no_traceback(program: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command = [sys.executable, "-m", f"lightning_cp.{program}", f"hydra.run.dir={tmp_path}/file"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("ConfigError: hydra.run.dir=")


@pytest.mark.parametrize("arguments", [["train"], ["train", "hydra.run.dir=new"]])
def test_a_folder_where_nothing_may_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.access", lambda path, mode: False)  # as on a read-only disk
    with pytest.raises(ConfigError, match=r"nothing may be written in .*hydra\.run\.dir=<folder>"):
        check_folder(arguments)
    check_folder([*arguments, "--cfg", "job"])  # makes no folder
