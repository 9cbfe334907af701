"""What is written for others to read holds no secret and nobody's home directory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_cp.bench.suites import BenchReport
from lightning_cp.checkpoint import load_pretrained
from lightning_cp.checkpoint.manifest import SaveInfo
from lightning_cp.checkpoint.read import open_checkpoint
from lightning_cp.checkpoint.save import save_checkpoint
from lightning_cp.comm.consensus import error_summary
from lightning_cp.errors import CheckpointError, without_home
from lightning_cp.watchdog.messages import Note
from lightning_cp.watchdog.phase import PhasePosition, Position
from lightning_cp.watchdog.thread import Watcher
from tests.helpers.bench.configured import TINY, settings_of
from tests.unit.bench.test_report import LINKS, MACHINE, MODES

SECRET = "hf_verysecret"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Somebody's, with a token in the environment."""
    made = tmp_path / "home" / "somebody"
    made.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("HOME", str(made))
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.chdir(tmp_path / "elsewhere")
    return made


def require_clean(text: str) -> None:
    assert text
    assert "somebody" not in text
    assert SECRET not in text


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_checkpoints(form: str, home: Path) -> None:
    target = home / "runs" / "step-1.ckpt"
    state = {"w": torch.ones(2), "step": 1}
    save_checkpoint(state, target, form=form, about=SaveInfo(1, {"ring": 2}, "ddp"))
    for path in (home / "runs").rglob("*"):
        if path.is_file():
            require_clean(path.read_bytes().decode(errors="replace"))


@pytest.mark.parametrize("place", ["a.ckpt", "runs/a.ckpt"])
def test_a_checkpoint_that_cannot_be_written_or_read(
    place: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device", str(home / place))

    monkeypatch.setattr("lightning_cp.checkpoint.full.write_file", fails)
    with pytest.raises(CheckpointError, match="No space left") as raised:
        save_checkpoint({"w": torch.ones(2)}, home / place)
    require_clean(str(raised.value))
    for read in (open_checkpoint, load_weights):
        with pytest.raises(
            CheckpointError, match=r"(not found: |no checkpoint at ).*a\.ckpt"
        ) as raised:
            read(home / place)
        require_clean(str(raised.value))


def load_weights(path: Path) -> None:
    load_pretrained(nn.Linear(1, 1), path, progress=False)


def test_bench(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    report = BenchReport(MACHINE, settings_of(*TINY), home)
    report.take("links", LINKS)
    report.take("modes", MODES)
    files = sorted(home.iterdir())
    assert [file.name for file in files] == ["bench.json", "hardware.json"]
    for file in files:
        require_clean(file.read_text())


def failing(home: Path) -> BaseException:
    """What a loader of the user's may raise."""
    try:
        (home / "data" / "train.bin").read_bytes()
    except OSError as error:
        return error
    raise AssertionError("it is there")


def test_what_other_ranks_say_of_an_error(home: Path) -> None:
    note = Note.of_error(failing(home), PhasePosition())
    assert note.error.endswith("~/data/train.bin'")
    assert "Traceback" in note.traceback
    require_clean(note.error + note.traceback)
    odd = RuntimeError(f"PytorchStreamReader failed reading {home / 'a'}")
    assert error_summary(odd) == "RuntimeError: PytorchStreamReader failed reading ~/a"
    require_clean(error_summary(failing(home)))


def test_where_a_rank_stands(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stack(frame: object) -> list[str]:
        return [f'  File "{home / "code" / "train.py"}", line 3, in step\n']

    monkeypatch.setattr("lightning_cp.watchdog.thread.traceback.format_stack", stack)
    watcher = Watcher(0, [], Position(), {}, lambda *_: None, "")
    try:
        assert "~/code/train.py" in watcher._stack()
        require_clean(watcher._stack())
    finally:
        watcher._close()


def test_a_home_that_is_the_root_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/")
    assert without_home("a / b in /data/x") == "a / b in /data/x"
