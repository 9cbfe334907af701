"""What is saved is what is read, in both forms, and the full one without this package too."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_cp.checkpoint.manifest import SaveInfo
from lightning_cp.checkpoint.read import latest_checkpoint, open_checkpoint
from lightning_cp.checkpoint.reshard import whole
from lightning_cp.checkpoint.save import BackgroundSave, plan_save, save_checkpoint
from lightning_cp.errors import CheckpointError
from tests.helpers.checkpoint.meshes import mesh_of
from tests.helpers.checkpoint.states import same, state_of
from tests.helpers.pool import run_ranks

FORMS = ("full", "sharded")


@pytest.mark.parametrize("form", FORMS)
def test_what_is_saved_is_read(form: str, tmp_path: Path) -> None:
    for step in (1, 2):  # the second one replaces the first
        save_checkpoint(
            state_of(step),
            tmp_path / "last.ckpt",
            form=form,
            about=SaveInfo(step, {"ring": 2}, "ddp"),
        )
        opened = open_checkpoint(tmp_path / "last.ckpt")
        assert same(opened.read(), state_of(step))
        assert opened.manifest is not None
        assert opened.manifest.about == SaveInfo(step, {"ring": 2}, "ddp")
    assert sorted(x.name for x in tmp_path.iterdir()) == ["last.ckpt"]
    assert latest_checkpoint(tmp_path) == tmp_path / "last.ckpt"
    assert latest_checkpoint(str(tmp_path)) == tmp_path / "last.ckpt"


def test_the_full_form_is_plain_pytorch(tmp_path: Path) -> None:
    save_checkpoint(state_of(3), tmp_path / "a.ckpt")
    (tmp_path / "elsewhere").mkdir()
    moved = (tmp_path / "a.ckpt").rename(tmp_path / "elsewhere" / "b.pt")
    loaded = torch.load(moved, weights_only=True)
    assert "lightning_cp" in loaded
    del loaded["lightning_cp"]
    assert same(loaded, state_of(3))
    assert open_checkpoint(moved).manifest is not None  # it went along


@pytest.mark.parametrize("form", FORMS)
def test_nothing_but_tensors_and_plain_containers_is_written(form: str, tmp_path: Path) -> None:
    from omegaconf import DictConfig, OmegaConf

    config = OmegaConf.create({"size": 3, "twice": "${size}", "list": [1, 2]})
    state: dict[str, Any] = {
        "config": config,
        "kind": DictConfig,
        "path": PurePosixPath("a/b"),
        "number": np.float64(2.5),
        "array": np.arange(3),
        "hparams": {"good": 1, "bad": lambda: 3},
    }
    left_out = save_checkpoint(state, tmp_path / "a", form=form, may_lack=("hparams",))
    assert left_out == ["hparams.bad"]
    got = open_checkpoint(tmp_path / "a").read()
    assert isinstance(got["config"], DictConfig)
    assert got["config"].twice == 3
    assert got["config"] == config
    assert got["kind"] is DictConfig
    assert (got["path"], got["number"], got["hparams"]) == ("a/b", 2.5, {"good": 1})
    assert isinstance(got["array"], np.ndarray)
    assert got["array"].tolist() == [0, 1, 2]
    with pytest.raises(CheckpointError, match=r"a\.0\.b is a builtins\.builtin_function_or_method"):
        save_checkpoint({"a": [{"b": print}]}, tmp_path / "b", form=form)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("form", FORMS)
def test_a_save_in_the_background_is_of_the_values_it_began_with(form: str, tmp_path: Path) -> None:
    state = state_of(1)
    planned, _ = plan_save(state, tmp_path / "a", form=form)
    planned.copy()
    for tensor in state["state_dict"].values():
        tensor.zero_()
    running = BackgroundSave(planned)
    assert running.wait(30)
    assert running.error is None
    assert same(open_checkpoint(tmp_path / "a").read(), state_of(1))


def spread(mesh: DeviceMesh, placements: list[Any], step: int) -> dict[str, Any]:
    """A state whose weight and optimizer state are spread over ranks; the rest is not."""
    state = state_of(step)
    for holder, key in (
        (state["state_dict"], "weight"),
        (state["optimizer_states"][0]["state"][0], "exp"),
    ):
        holder[key] = distribute_tensor(holder[key], mesh, placements)
    return state


def saves_and_reads(rank: int, world_size: int, form: str, background: bool) -> None:
    mesh = mesh_of(2, world_size // 2)
    layouts = [
        [Shard(0), Shard(1)],
        [Replicate(), Shard(0)],
        [Shard(1), Replicate()],
        [Shard(0)] * 2,
    ]
    for step, placements in enumerate(layouts):
        path = Path(f"step-{step}")
        state = spread(mesh, placements, step)
        if background:
            running = BackgroundSave(plan_save(state, path, form=form)[0], limit=30)
            state["state_dict"]["weight"].zero_()
            assert running.wait(30)
            assert running.error is None, running.error
        else:
            save_checkpoint(state, path, form=form)
        dist.barrier()
        assert same(open_checkpoint(path).read(), state_of(step))
        for other in layouts:  # any other spread reads it too
            want = spread(mesh, other, step)["state_dict"]["weight"]
            like = {("state_dict", "weight"): want}
            got = open_checkpoint(path).read(like.get)["state_dict"]["weight"]
            assert isinstance(got, DTensor)
            assert torch.equal(got.to_local(), want.to_local())
    if form == "sharded" and rank == 0:
        shards = list(Path("step-3").glob("shard-*"))
        assert len(shards) == world_size
        assert max(x.stat().st_size for x in shards) < 8_000  # nobody has all


@pytest.mark.quick("sharded-at once", "full-background", "sharded-background")
@pytest.mark.parametrize("background", [False, True], ids=["at once", "background"])
@pytest.mark.parametrize("form", FORMS)
def test_spread_tensors_are_read_in_any_other_spread(form: str, background: bool) -> None:
    run_ranks(4, saves_and_reads, form, background)


def test_a_shard_is_a_safetensors_file(tmp_path: Path) -> None:
    """Opened by that library; of what the format has no name for, the bytes are there."""
    odd = torch.arange(3).to(torch.complex128)
    tensors = {"weight": torch.randn(3, 5), "half": torch.ones(7).bfloat16(), "odd": odd}
    save_checkpoint(tensors, tmp_path / "a", form="sharded", about=SaveInfo(7))
    assert same(open_checkpoint(tmp_path / "a").read(), tensors)
    with safe_open(tmp_path / "a" / "shard-00000-of-00001.safetensors", "pt") as shard:
        assert shard.metadata()["step"] == "7"
        assert torch.equal(shard.get_tensor("weight"), tensors["weight"])
        assert torch.equal(shard.get_tensor("half"), tensors["half"])
        assert torch.equal(shard.get_tensor("odd").view(torch.complex128), odd)


def assembles(rank: int, world_size: int) -> None:
    mesh = mesh_of(world_size)
    value = torch.arange(10.0)
    got = whole(distribute_tensor(value, mesh, [Shard(0)]), keep=rank == 1)
    assert (got is None) == (rank != 1)
    assert got is None or torch.equal(got, value)
    assert whole(value) is not None


def test_whole_assembles_for_who_wants_it() -> None:
    run_ranks(2, assembles)


def fails_on_one(rank: int, world_size: int, form: str) -> str:
    state: dict[str, Any] = {"weight": torch.ones(3), "odd": print if rank == 1 else 1}
    with pytest.raises(CheckpointError) as raised:
        save_checkpoint(state, Path("a"), form=form)
    assert list(Path().iterdir()) == []
    return str(raised.value)


@pytest.mark.parametrize("form", FORMS)
def test_what_fails_on_one_rank_is_an_error_on_all(form: str) -> None:
    first, second = run_ranks(2, fails_on_one, form)
    assert "cannot save" in first
    assert "rank 1: CheckpointError: odd is a builtins" in first
    assert second.startswith("odd is a builtins")
