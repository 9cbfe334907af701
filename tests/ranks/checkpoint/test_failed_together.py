"""A save in the background that fails: every rank names the first cause, and a full disk is cleared."""

from __future__ import annotations

import errno
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_cp.checkpoint import atomic as durable
from lightning_cp.checkpoint import sharded
from lightning_cp.checkpoint import sharded as notes
from lightning_cp.checkpoint.atomic import discard, discard_shared, sweep, temporary_path
from lightning_cp.checkpoint.manager import CheckpointManager
from lightning_cp.checkpoint.manifest import SaveInfo
from lightning_cp.errors import CheckpointError
from tests.helpers.checkpoint.meshes import mesh_of
from tests.helpers.pool import run_ranks


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/home/somebody/x")


def slowly(path: Path, *_: Any) -> Any:
    """Writes on while the first rank gives up, and then comes to the end of the disk, or of the folder."""
    for at in range(200):
        path.with_name(f"{path.name}-{at}").write_bytes(b"x" * 1000)
        time.sleep(0.002)
    full()


def told_and_left(world: int, patch: pytest.MonkeyPatch) -> tuple[str, list[str]]:
    """What a save in the background that fails says on this rank, and the names in its folder."""
    spread = distribute_tensor(torch.arange(8.0), mesh_of(world), [Shard(0)])
    saver = CheckpointManager("sharded", in_background=True)
    try:
        saver.save({"w": spread}, "a", SaveInfo(1), {})
        with pytest.raises(CheckpointError) as raised:
            saver.finish()
    finally:
        patch.undo()
    dist.barrier()
    return str(raised.value), sorted(x.name for x in Path().iterdir())


def saved_on_a_full_disk(rank: int, world: int) -> tuple[str, list[str]]:
    patch = pytest.MonkeyPatch()
    patch.setattr(sharded, "write_shard", slowly if rank else full)
    return told_and_left(world, patch)


def test_the_first_cause_is_named_and_the_folder_goes() -> None:
    (one, left), (other, _) = run_ranks(2, saved_on_a_full_disk)
    assert left == []
    assert one.startswith("cannot save a: No space left on device (x). What was saved there before")
    assert other.startswith(
        "cannot save a: rank 0: No space left on device (x). What was saved there"
    )
    assert other.count("is still there") == 1


def fails_on_the_second(rank: int, world: int) -> tuple[str, list[str]]:
    patch = pytest.MonkeyPatch()
    if rank:
        patch.setattr(sharded, "write_shard", full)
        patch.setattr(notes, "write_note", full)  # not even that has room
    return told_and_left(world, patch)


def test_a_rank_without_room_for_a_note_is_not_waited_for() -> None:
    (one, left), (other, _) = run_ranks(2, fails_on_the_second)
    assert left == []
    assert "rank 1: its part could not be written" in one
    assert "No space left on device" in other


def test_a_first_rank_that_reads_a_note_at_once_has_waited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It removes the folder before the rank that failed goes on."""
    note = tmp_path / "a" / "done"
    note.parent.mkdir()
    note.touch()
    monkeypatch.setattr(notes, "write_note", full)
    monkeypatch.setattr(Path, "touch", lambda note: shutil.rmtree(note.parent))
    assert notes.report_failure(note, "no room", tmp_path / "a" / "part")
    assert not notes.report_failure(note, "no room", tmp_path / "a" / "part")


def test_what_could_not_be_deleted_goes_with_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged, running = (
        temporary_path(tmp_path / "a", "saving"),
        temporary_path(tmp_path / "b", "saving"),
    )
    for folder in (staged, running):
        folder.mkdir()
    with monkeypatch.context() as busy:
        busy.setattr(durable.shutil, "rmtree", lambda *_, **__: None)
        discard(staged)
    assert staged.is_dir()
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == [running]


def test_who_still_writes_keeps_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "shard").touch()

    def late(path: Any, *args: Any, own: Any = os.rmdir, **kwargs: Any) -> None:
        """Another process opens a file when all that was there has been deleted."""
        with suppress(FileNotFoundError):
            (folder / "late").touch()
        own(path, *args, **kwargs)

    monkeypatch.setattr(os, "rmdir", late)
    discard_shared(folder)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
