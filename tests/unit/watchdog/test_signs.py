"""Work that takes long, and knows of no run, counts as progress of the runs that are watched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_cp.checkpoint import manifest
from lightning_cp.checkpoint.pretrained import files as write
from lightning_cp.checkpoint.pretrained import reader
from lightning_cp.checkpoint.pretrained.export import export_pretrained
from lightning_cp.checkpoint.pretrained.load import load_pretrained
from lightning_cp.checkpoint.read import open_checkpoint
from lightning_cp.checkpoint.save import save_checkpoint
from lightning_cp.watchdog import phase as signs
from lightning_cp.watchdog.phase import Position

PIECE, SIZE = 2**12, 2**16
PIECES = SIZE // PIECE


@pytest.fixture
def position(monkeypatch: pytest.MonkeyPatch) -> Iterator[Position]:
    """Of a run that is watched, where pieces are small."""
    for module, name in (
        (signs, "PIECE"),
        (write, "PIECE"),
        (manifest, "_CHUNK"),
        (reader, "DIRECT_BYTES"),
    ):
        monkeypatch.setattr(module, name, PIECE)
    made = Position()
    signs.count(made)
    yield made
    signs.ignore(made)


def signs_of(position: Position, work: Callable[[], object]) -> int:
    """Given while it is done."""
    before = position.count
    work()
    return position.count - before


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_saving_verifying_and_reading(form: str, position: Position, tmp_path: Path) -> None:
    state = {"weights": torch.zeros(SIZE // 4), "more": torch.ones(3)}
    path = tmp_path / "x.ckpt"
    assert signs_of(position, lambda: save_checkpoint(state, path, form=form)) >= PIECES
    assert signs_of(position, lambda: open_checkpoint(path)) >= PIECES
    opened = open_checkpoint(path)
    assert signs_of(position, opened.read) >= len(state)


def test_pretrained_weights(position: Position, tmp_path: Path) -> None:
    model = nn.Linear(SIZE // 4, 1, bias=False)
    assert signs_of(position, lambda: export_pretrained(model, tmp_path / "x")) >= PIECES
    assert signs_of(position, lambda: load_pretrained(model, tmp_path / "x")) >= PIECES


def test_a_run_that_has_ended_hears_nothing(position: Position) -> None:
    signs.count(position)  # twice is once
    assert signs_of(position, signs.sign_of_life) == 1
    signs.ignore(position)
    assert signs_of(position, signs.sign_of_life) == 0
