"""A disk that is full, or may not be written: what was there before still is, and every rank says so."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_cp.checkpoint import full, sharded
from lightning_cp.checkpoint.read import open_checkpoint
from lightning_cp.checkpoint.save import BackgroundSave, plan_save, save_checkpoint
from lightning_cp.errors import CheckpointError
from tests.helpers.checkpoint.meshes import mesh_of
from tests.helpers.checkpoint.states import same, state_of
from tests.helpers.pool import expect_on_every_rank

FORMS = ("full", "sharded")


def fails_once(name: str, number: int) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(number, os.strerror(number), name)

    return fail


def save_in(background: bool, target: Path, form: str) -> None:
    if not background:
        save_checkpoint(state_of(2), target, form=form)
        return
    running = BackgroundSave(plan_save(state_of(2), target, form=form)[0])
    running.wait()
    assert running.error is not None
    raise running.error


@pytest.mark.parametrize("background", [False, True], ids=["at once", "background"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_full_disk_leaves_the_old_checkpoint(
    form: str, background: bool, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "a.ckpt"
    save_checkpoint(state_of(1), target, form=form)
    before = sorted(tmp_path.rglob("*"))
    with monkeypatch.context() as full_disk:
        fail = fails_once("/home/somebody/a.ckpt", number)
        full_disk.setattr("lightning_cp.checkpoint.atomic.os.fsync", fail)
        with pytest.raises(CheckpointError, match=os.strerror(number)) as raised:
            save_in(background, target, form)
    assert "a.ckpt" in str(raised.value)
    assert "What was saved there before is still there" in str(raised.value)
    assert "/home" not in str(raised.value)
    assert sorted(tmp_path.rglob("*")) == before
    assert same(open_checkpoint(target).read(), state_of(1))


def test_a_file_that_may_not_grow_is_a_full_disk(tmp_path: Path) -> None:
    """The system's own refusal, in the middle of PyTorch's writing."""
    import resource

    target = tmp_path / "a.ckpt"
    save_checkpoint(state_of(1), target)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    large = {"state_dict": {"w": torch.zeros(200_000)}}
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        for form in FORMS:
            with pytest.raises(CheckpointError, match=r"cannot save .*a.ckpt: File too large"):
                save_checkpoint(large, target, form=form)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert same(open_checkpoint(target).read(), state_of(1))
    assert sorted(x.name for x in tmp_path.iterdir()) == ["a.ckpt"]


def fails_in_ranks(rank: int, world_size: int, form: str, who: int) -> None:
    mesh = mesh_of(world_size)
    weight = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    save_checkpoint({"w": weight}, Path("a"), form=form)
    patch = pytest.MonkeyPatch()
    if rank == who:
        fail = fails_once("/home/somebody/x", errno.ENOSPC)
        patch.setattr(sharded, "write_shard", fail)
        patch.setattr(full, "put_in_place", fail)
    try:
        save_checkpoint({"w": weight * 2}, Path("a"), form=form)
    finally:
        patch.undo()
        dist.barrier()
        assert torch.equal(open_checkpoint(Path("a")).read()["w"], torch.arange(8.0))
        assert sorted(x.name for x in Path().iterdir()) == ["a"]


@pytest.mark.parametrize(("form", "who"), [("full", 0), ("sharded", 0), ("sharded", 1)])
def test_a_full_disk_of_one_rank_is_an_error_on_all(form: str, who: int) -> None:
    errors = expect_on_every_rank(
        2, fails_in_ranks, form, who, error=CheckpointError, match=r"cannot save a: .*No space left"
    )
    assert "/home" not in "".join(map(str, errors))
