"""What is on the disk when a save has ended, what is said where that failed, and what goes of leftovers."""

from __future__ import annotations

import errno
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_cp.checkpoint import atomic as durable
from lightning_cp.checkpoint.read import latest_checkpoint, open_checkpoint
from lightning_cp.checkpoint.save import BackgroundSave, finish_save, plan_save, save_checkpoint
from lightning_cp.errors import CheckpointError
from tests.helpers.checkpoint.states import same, state_of
from tests.helpers.pool import run_ranks

FORMS = ("full", "sharded")
own_fsync = os.fsync


def failing(number: int, *, folder: Path) -> Any:
    """``fsync`` of a folder, which fails; not of what is in it."""

    def fsync(opened: int) -> None:
        found = os.fstat(opened)
        if stat.S_ISDIR(found.st_mode) and os.path.samestat(found, folder.stat()):
            raise OSError(number, os.strerror(number))
        own_fsync(opened)

    return fsync


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
@pytest.mark.parametrize("form", FORMS)
def test_file_systems_that_cannot_sync_folders(
    form: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable.os, "fsync", failing(number, folder=tmp_path))
    for step in (1, 2):
        save_checkpoint(state_of(step), tmp_path / "a", form=form)
        assert same(open_checkpoint(tmp_path / "a").read(), state_of(step))


def saved(target: Path, form: str, *, background: bool) -> None:
    if not background:
        save_checkpoint(state_of(2), target, form=form)
        return
    running = BackgroundSave(plan_save(state_of(2), target, form=form)[0])
    running.wait()
    if (error := running.error) is not None:
        raise error


@pytest.mark.parametrize("background", [False, True], ids=["at once", "background"])
@pytest.mark.parametrize("form", FORMS)
def test_what_fails_after_the_rename_is_told_as_that(
    form: str, background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(state_of(1), tmp_path / "a", form=form)
    monkeypatch.setattr(durable.os, "fsync", failing(errno.EIO, folder=tmp_path))
    with pytest.raises(CheckpointError, match="a is complete and in its place, but ") as raised:
        saved(tmp_path / "a", form, background=background)
    said = str(raised.value)
    assert "cannot save" not in said
    assert "still there" not in said
    assert "/home" not in said
    assert "may not be after a power cut: Input/output error" in said
    monkeypatch.undo()
    assert same(open_checkpoint(tmp_path / "a").read(), state_of(2))
    assert [x.name for x in tmp_path.glob("[!.]*")] == ["a"]


def fails_on_the_first(rank: int, world: int) -> str:
    patch = pytest.MonkeyPatch()
    if rank == 0:
        patch.setattr(durable.os, "fsync", failing(errno.EIO, folder=Path()))
    try:
        with pytest.raises(CheckpointError) as raised:
            save_checkpoint(state_of(1), Path("a"))
    finally:
        patch.undo()
    return str(raised.value)


def test_other_ranks_are_told_the_same() -> None:
    for said in run_ranks(2, fails_on_the_first):
        assert "a is complete and in its place, but may not be after a power cut" in said
        assert "cannot save" not in said


@pytest.mark.parametrize("form", FORMS)
def test_new_folders_are_on_the_disk_too(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[Path] = set()
    own = durable.sync
    monkeypatch.setattr(durable, "sync", lambda path: (synced.add(path), own(path)))
    save_checkpoint(state_of(1), tmp_path / "x" / "y" / "a", form=form)
    assert synced >= {tmp_path, tmp_path / "x", tmp_path / "x" / "y"}


@pytest.mark.parametrize(
    "owner",
    [f"deadbeef-{os.getpid()}", f"{durable.machine_id()}-{os.getpid()}"],
    ids=["another machine", "a number used again"],
)
def test_leftovers_that_nobody_writes_go_after_a_day(
    owner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another machine, and of a number that a living process of this one has again."""
    staging, aside = tmp_path / f".a.saving-{owner}-00", tmp_path / f".b.before-{owner}-00"
    save_checkpoint(state_of(1), tmp_path / "b", form="sharded")
    (tmp_path / "b").rename(aside)
    staging.mkdir()
    (staging / "shard").write_bytes(b"x")
    os.utime(staging / "shard", (0, 0))  # what was copied is old from the start
    durable.sweep(tmp_path)
    assert staging.is_dir()
    assert aside.is_dir()
    later = time.time() + 100_000
    monkeypatch.setattr(durable.time, "time", lambda: later)
    (staging / "shard").unlink()
    durable.sweep(tmp_path)
    assert [x.name for x in tmp_path.iterdir()] == ["b"]
    assert same(open_checkpoint(tmp_path / "b").read(), state_of(1))
    assert latest_checkpoint(tmp_path) == tmp_path / "b"


def vanishing(folder: Path, _: str) -> Any:
    """What is found in a folder: a file that has another name by the time that it is looked at."""
    yield folder / "note"


def vanished(folder: Path, _: str) -> Any:
    """A folder in it that is gone by the time that it is looked into."""
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder / "part"))
    yield


@pytest.mark.parametrize("listing", [vanishing, vanished])
@pytest.mark.parametrize("machine", ["deadbeef", durable.machine_id()])
def test_what_changes_while_it_is_looked_at_is_alive(
    machine: str, listing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Notes of a save come and go in its folder."""
    staging = tmp_path / f".a.saving-{machine}-{os.getpid()}-00"
    staging.mkdir()
    (staging / "shard").write_bytes(b"x")
    monkeypatch.setattr(Path, "rglob", listing)
    durable.sweep(tmp_path)
    monkeypatch.undo()
    assert (staging / "shard").read_bytes() == b"x"


def refusing(number: int) -> Any:
    """A call of the system on a read-only mount, which it refuses for what is not there, too."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize("form", FORMS)
def test_what_cannot_be_tidied_up_hides_no_error(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, _ = plan_save(state_of(1), tmp_path / "a", form=form)
    for name in ("open", "unlink", "replace"):
        monkeypatch.setattr(Path, name, refusing(errno.EROFS))
    with pytest.raises(CheckpointError, match=r"cannot save .*a: Read-only file system"):
        finish_save(planned)


def test_a_small_file_that_cannot_be_written_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "open", refusing(errno.ENOSPC))
    monkeypatch.setattr(Path, "unlink", refusing(errno.EIO))
    with pytest.raises(OSError, match="No space left on device"):
        durable.write_durably(tmp_path / "note", b"a")
    monkeypatch.setattr(Path, "rename", refusing(errno.ENOSPC))
    monkeypatch.setattr(Path, "replace", refusing(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left on device"):
        durable.replace_link(tmp_path / "last", tmp_path / "a")
