"""What `latest` names where a save that has ended could not be had on the disk, and what is said of it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from lightning_cp.checkpoint import durable
from lightning_cp.checkpoint.latest import latest_checkpoint
from lightning_cp.checkpoint.read import open_checkpoint
from lightning_cp.checkpoint.save import save_checkpoint
from lightning_cp.errors import CheckpointError
from tests.checkpoint.states import same, state_of
from tests.checkpoint.test_durable import FORMS, failing, saved


@pytest.mark.parametrize("background", [False, True], ids=["at once", "background"])
@pytest.mark.parametrize("form", FORMS)
def test_a_name_that_a_power_cut_may_take_is_not_the_latest(
    form: str, background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`latest` stays with what is on the disk, and the error says so."""
    save_checkpoint(state_of(1), tmp_path / "one", form=form)
    monkeypatch.setattr(durable.os, "fsync", failing(errno.EIO, folder=tmp_path))
    with pytest.raises(CheckpointError, match="two is complete and in its place, but ") as raised:
        saved(tmp_path / "two", form, background=background)
    said = str(raised.value)
    assert "may not be after a power cut: Input/output error. latest beside it" in said
    assert said.endswith("was not written and may name the one before.")
    monkeypatch.undo()
    assert same(open_checkpoint(tmp_path / "two").read(), state_of(2))
    assert latest_checkpoint(tmp_path) == tmp_path / "one"


def test_nothing_is_said_of_latest_where_nobody_wanted_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable.os, "fsync", failing(errno.EIO, folder=tmp_path))
    with pytest.raises(CheckpointError, match=r"after a power cut: .*Input/output error\.$"):
        save_checkpoint(state_of(1), tmp_path / "converted", newest=False)
