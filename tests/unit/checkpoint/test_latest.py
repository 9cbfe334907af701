"""Which checkpoint of a folder is the newest: what is there says so, and no file beside it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from lightning_cp.checkpoint.atomic import BEFORE, temporary_path
from lightning_cp.checkpoint.read import latest_checkpoint, open_checkpoint, set_saved_at
from lightning_cp.checkpoint.save import save_checkpoint
from tests.helpers.checkpoint.states import same, state_of
from tests.unit.checkpoint.test_damage import flip

FORMS = ("full", "sharded")


def saved(folder: Path, *names: str, form: str = "full") -> None:
    """One second after the other, in this order."""
    for at, name in enumerate(names):
        save_checkpoint(state_of(at), folder / name, form=form)
        set_saved_at(folder / name, (at + 1) * 10**9)


@pytest.mark.parametrize("form", FORMS)
def test_what_was_completed_last_is_the_newest(form: str, tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "none") is None
    assert latest_checkpoint(tmp_path) is None
    saved(tmp_path, "b.ckpt", "c", "a.ckpt", form=form)
    (tmp_path / "last.ckpt").symlink_to("b.ckpt")
    torch.save({"w": torch.ones(1)}, tmp_path / "of another program.ckpt")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "metrics.csv").write_text("newer than all")
    assert latest_checkpoint(str(tmp_path)) == tmp_path / "a.ckpt"
    save_checkpoint(state_of(4), tmp_path / "c", form=form)  # replaces one
    assert latest_checkpoint(tmp_path) == tmp_path / "c"
    (tmp_path / "a.ckpt").touch()
    assert latest_checkpoint(tmp_path) == tmp_path / ("a.ckpt" if form == "full" else "c")


def test_one_that_is_damaged_is_still_the_newest(tmp_path: Path) -> None:
    """Reading it says what is wrong; the one before is not taken without a word."""
    saved(tmp_path, "one", "two")
    flip(tmp_path / "two", (tmp_path / "two").stat().st_size - 90)
    set_saved_at(tmp_path / "two", 2 * 10**9)
    assert latest_checkpoint(tmp_path) == tmp_path / "two"


def test_what_a_killed_save_has_set_aside_counts(tmp_path: Path) -> None:
    saved(tmp_path, "one", "two", form="sharded")
    aside = temporary_path(tmp_path / "two", BEFORE)
    (tmp_path / "two").rename(aside)
    assert latest_checkpoint(tmp_path) == aside
    assert same(open_checkpoint(aside).read(), state_of(1))
    saved(tmp_path, "two", form="sharded")  # older than what was set aside, which is over now
    assert latest_checkpoint(tmp_path) == tmp_path / "one"


def names(folder: Path, name: str, seconds: float) -> None:
    """An earlier release has done so."""
    (folder / "latest").write_text(f"{name}\n")
    os.utime(folder / "latest", (seconds, seconds))


def test_a_file_of_an_earlier_release_names_it(tmp_path: Path) -> None:
    saved(tmp_path, "one", "two")
    names(tmp_path, "one", 3)  # where times were lost by copying
    assert latest_checkpoint(tmp_path) == tmp_path / "one"
    set_saved_at(tmp_path / "two", 4 * 10**9)
    assert latest_checkpoint(tmp_path) == tmp_path / "two"


@pytest.mark.parametrize("name", ["", "missing", "../elsewhere", "\0\1", "years of work\nmore"])
def test_a_file_that_names_nothing_there_is_no_matter(name: str, tmp_path: Path) -> None:
    names(tmp_path, name, 9)
    assert latest_checkpoint(tmp_path) is None
    saved(tmp_path, "one", "latest 2")
    assert latest_checkpoint(tmp_path) == tmp_path / "latest 2"
    assert (tmp_path / "latest").read_text() == f"{name}\n"  # somebody's own
