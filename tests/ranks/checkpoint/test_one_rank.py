"""What goes wrong on one rank while a checkpoint is saved or read is an error on every rank, at once."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_cp.checkpoint import manager as saver_module
from lightning_cp.checkpoint import read, reshard
from lightning_cp.checkpoint.atomic import discard, temporary_path
from lightning_cp.checkpoint.full import FullSave
from lightning_cp.checkpoint.manager import CheckpointManager
from lightning_cp.checkpoint.manifest import SaveInfo
from lightning_cp.checkpoint.read import open_checkpoint
from lightning_cp.checkpoint.save import BackgroundSave, plan_save, save_checkpoint
from lightning_cp.checkpoint.shards import Block, ShardedSave
from lightning_cp.comm.consensus import World
from lightning_cp.errors import CheckpointError
from lightning_cp.resume.record import _distinct
from tests.helpers.checkpoint.meshes import mesh_of
from tests.helpers.checkpoint.states import same, state_of
from tests.helpers.pool import run_ranks

FORMS = ("full", "sharded")


def fails(*_: Any, **__: Any) -> Any:
    raise OSError(5, "Input/output error", "/home/somebody/a")


def has_no_memory(*_: Any, **__: Any) -> Any:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


def has_none_for_numbers(x: torch.Tensor, *, own: Any = torch.Tensor.cpu) -> torch.Tensor:
    """The messages of the ranks still fit."""
    return has_no_memory() if x.is_floating_point() else own(x)


def told_by(who: int, patches: list[tuple[Any, str, Any]], action: Callable[[], Any]) -> str:
    """What every rank is told where one has these faults."""
    patch = pytest.MonkeyPatch()
    try:
        for place, name, fault in patches if dist.get_rank() == who else ():
            patch.setattr(place, name, fault)
        with pytest.raises(CheckpointError) as raised:
            action()
    finally:
        patch.undo()
    said = str(raised.value)
    assert "/home" not in said
    assert (f"rank {who}: " in said) == (dist.get_rank() != who)
    return said


def reads_badly(rank: int, world: int, form: str) -> list[str]:
    path = Path("a")
    save_checkpoint(state_of(1), path, form=form)
    faults: list[list[tuple[Any, str, Any]]] = [
        [(read, "locate", fails)],
        [(read, "load_file", fails), (read, "decode", fails)],
        [(reshard.StoredTensor, "whole", fails)],
    ]
    said = [told_by(1, each, lambda: read.open_checkpoint(path, World()).read()) for each in faults]
    assert same(read.open_checkpoint(path, World()).read(), state_of(1))
    return said


@pytest.mark.parametrize("form", FORMS)
def test_a_file_that_one_rank_cannot_read(form: str) -> None:
    first, second = run_ranks(2, reads_badly, form)
    assert all("refused by another rank" in said for said in first)
    assert all("a cannot be read (Input/output error (a))" in said for said in second)


def reads_a_copy(rank: int, world: int, form: str) -> list[str]:
    """Each rank is a machine with a disk of its own; on the second one a byte of each file is changed."""
    save_checkpoint({"w": torch.ones(300)}, Path("a"), form=form)
    dist.barrier()
    copy = Path(f"disk-{rank}", "a")
    copy.parent.mkdir()
    files = (
        ["."]
        if form == "full"
        else ["index.json", "shard-00000-of-00002.safetensors", "state.json"]
    )
    patch = pytest.MonkeyPatch()
    patch.setattr(read, "machine_id", lambda: f"machine {rank}")
    said = []
    try:
        for name in files:
            shutil.copytree("a", copy) if form == "sharded" else shutil.copy("a", copy)
            changed = copy / name
            data = bytearray(changed.read_bytes())
            data[len(data) // 2] ^= rank
            changed.write_bytes(data)
            with pytest.raises(CheckpointError) as raised:
                read.open_checkpoint(copy, World())
            said.append(str(raised.value))
            discard(copy)
    finally:
        patch.undo()
    return said


@pytest.mark.parametrize("form", FORMS)
def test_every_machine_verifies_its_copy(form: str) -> None:
    first, second = run_ranks(2, reads_a_copy, form)
    assert all("rank 1: CheckpointError: a" in said for said in first)
    assert all("is damaged: its sha256 is not" in said for said in second)


def saves_badly(rank: int, world: int) -> list[str]:
    mesh = mesh_of(world)
    state = {"w": distribute_tensor(torch.arange(8.0), mesh, [Shard(0)]), "own": torch.ones(2)}
    said = [
        told_by(
            0, [(torch.Tensor, "cpu", has_none_for_numbers)], lambda: plan_save(state, Path("a"))
        ),
        told_by(
            0,
            [(FullSave, "copy", has_no_memory)],
            lambda: BackgroundSave(plan_save(state, Path("a"))[0]),
        ),
        told_by(
            1,
            [(ShardedSave, "copy", has_no_memory)],
            lambda: BackgroundSave(plan_save(state, Path("a"), form="sharded")[0]),
        ),
        told_by(1, [], lambda: _distinct(has_no_state if rank else bytes)),
    ]
    dist.barrier()
    assert list(Path().iterdir()) == []
    return said


def has_no_state() -> bytes:
    raise CheckpointError("the state of this loader is gone")


def test_a_rank_that_cannot_take_its_values() -> None:
    for said in run_ranks(2, saves_badly):
        assert all("can't allocate memory" in each for each in said[:3])
        assert "the state of this loader is gone" in said[3]


def links_badly(rank: int, world: int, background: bool) -> list[str]:
    saver = CheckpointManager("full", in_background=background)
    saver.save(state_of(1), Path("a").absolute(), SaveInfo(1), {})
    faults = [(saver_module, "replace_link", fails)]

    def link() -> None:
        saver.link(Path("a"), Path("last"))
        saver.finish()

    said = [told_by(0, faults, link)]
    saver.finish()  # it is not tried again
    link()
    assert Path("last").resolve().name == "a"
    return said


@pytest.mark.parametrize("background", [False, True], ids=["at once", "background"])
def test_a_link_that_cannot_be_made(background: bool) -> None:
    for (said,) in run_ranks(2, links_badly, background):
        assert "Input/output error" in said


def test_what_cannot_be_removed_is_said_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = CheckpointManager("full", in_background=False)
    save_checkpoint(state_of(1), tmp_path / "a")
    monkeypatch.setattr(saver_module, "remove", fails)
    with pytest.warns(UserWarning, match=r"a cannot be removed: Input/output error \(a\)"):
        saver.remove(tmp_path / "a")
    monkeypatch.undo()
    saver.remove(tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_save_that_may_last_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tree, saver = (
        {"state_dict": {"a": torch.zeros(2, 10**8, device="meta")}},
        CheckpointManager("full", in_background=False),
    )
    monkeypatch.setattr(saver_module, "plan_save", lambda *_, **__: (None, []))
    monkeypatch.setattr(saver_module, "finish_save", lambda _: None)
    monkeypatch.setattr(saver_module, "rank_zero_info", logging.getLogger("said").warning)
    saver.save(tree, tmp_path / "small", SaveInfo(1), {})
    assert not caplog.text
    tree["state_dict"]["b"] = torch.zeros(10**9, device="meta")
    for step in (2, 3):
        saver.save(tree, tmp_path / f"step-{step}", SaveInfo(step), {})
    assert re.findall("saving .*", caplog.text) == [
        f"saving .../{tmp_path.name}/step-2, weights of 4.8 GB: this may take minutes"
    ]


@pytest.mark.parametrize("form", FORMS)
def test_tensors_without_values_to_write_are_named(form: str, tmp_path: Path) -> None:
    for tensor, says in (
        (torch.eye(3).to_sparse(), r"a\.0 is a tensor with layout torch\.sparse_coo"),
        (torch.ones(3, device="meta"), r"a\.0 is on the meta device"),
    ):
        with pytest.raises(CheckpointError, match=says):
            save_checkpoint({"a": [tensor]}, tmp_path / "a", form=form)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("form", FORMS)
def test_the_key_of_our_own_notes_is_refused(form: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="a key 'lightning_cp', under which"):
        save_checkpoint({"lightning_cp": {"mine": 1}}, tmp_path / "a", form=form)
    assert list(tmp_path.iterdir()) == []


def test_a_note_may_come_when_the_folder_has_its_name_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank commits as soon as it sees the last note, whatever that rank is doing."""
    target, staging = tmp_path / "a", temporary_path(tmp_path / "a", "saving")
    staging.mkdir()
    world = World()
    world.size, world.rank = 2, 1
    block = Block("w", (3,), (0,), torch.ones(3))
    save = ShardedSave(target, staging, "x", SaveInfo(), world, [block], None)
    own = Path.replace

    def replace(note: Path, to: Path) -> Path:
        moved = own(note, to)
        staging.rename(target)
        return moved

    monkeypatch.setattr(Path, "replace", replace)
    save.finish_locally(1.0)
    assert sorted(x.name for x in target.iterdir()) == [
        "done-00001.json",
        "shard-00001-of-00002.safetensors",
    ]


def opened_by_one(rank: int, world: int) -> str:
    """Another rank is at what comes next."""
    save_checkpoint({"x": 1}, Path("a"))
    if rank:
        World().gather(5)
        return ""
    with pytest.raises(CheckpointError) as raised:
        open_checkpoint(Path("a"), World())
    return str(raised.value)


def test_a_checkpoint_that_one_rank_alone_loads() -> None:
    first, _ = run_ranks(2, opened_by_one)
    assert "rank 0 loads a, and rank 1 loads nothing" in first
    assert "same ckpt_path" in first


def opened_apart(rank: int, world: int) -> str:
    for name in "ab":
        save_checkpoint({"x": name}, Path(name))
    with pytest.raises(CheckpointError) as raised:
        open_checkpoint(Path("ab"[rank]), World())
    return str(raised.value)


def test_other_checkpoints_are_named() -> None:
    first, second = run_ranks(2, opened_apart)
    assert first == second
    assert "different checkpoints at a on rank 0, b on rank 1" in first
