"""What no file holds: one process's values in every sharding, whatever else the module has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_cp import ContextParallelMesh
from lightning_cp.checkpoint import load_pretrained
from lightning_cp.errors import CheckpointError
from lightning_cp.utils.dtensor import forget_meshes
from tests.helpers.checkpoint.cases import cases
from tests.helpers.checkpoint.pretrained.models import (
    MESHES,
    Wrapped,
    load,
    make,
    refuse,
    save,
    shard,
    whole,
    without,
    world_of,
)
from tests.helpers.pool import run_ranks


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    without(tmp_path, "lm_head.weight", "model.norm.weight")
    refuse(
        make(), tmp_path, r"lacks 2 parameters of the model \(model.norm.weight, lm_head.weight\)"
    )
    refuse(make(), tmp_path, r"1 parameters of the model \(model.n", allow_missing=["lm_head.*"])
    model = make()
    kept = model.lm_head.weight.clone()
    loaded = load(model, tmp_path, allow_missing=["lm_head.*", "model.norm.*"])
    assert set(loaded.missing) == {"lm_head.weight", "model.norm.weight"}
    assert torch.equal(model.lm_head.weight, kept)


def test_what_is_missing_on_the_meta_device_is_initialised(tmp_path: Path) -> None:
    without(tmp_path, "lm_head.weight", "model.norm.weight")
    model = make(device="meta")
    load(model, tmp_path, strict=False)
    assert model.model.norm.weight.eq(1).all()  # as transformers' _init_weights says
    assert 0.01 < model.lm_head.weight.std() < 0.04


def test_what_is_beside_the_network_on_the_meta_device_gets_values_too(tmp_path: Path) -> None:
    save(tmp_path)
    with torch.device("meta"):
        model = Wrapped(make(device="meta"))
    load(model, tmp_path, allow_missing=["metric.*"])
    torch.manual_seed(0)
    for name, x in model.metric.named_parameters():  # within what nn.Linear draws, and not garbage
        assert 0 < x.abs().max() < 1, name
    with torch.device("meta"):
        model.metric = Bare()  # type: ignore[assignment]
    refuse(model, tmp_path, r"metric \(Bare\) has .* does not hold \(weight, rates\)", strict=False)


class Bare(nn.Module):
    """A parameter and a buffer that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("rates", torch.arange(3.0), persistent=False)


def missing(rank: int, world: int, path: Path, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank has then of a head that is in no file, and the random numbers that come next."""
    model = make(device="meta")
    mesh = shard(model, kind)
    torch.manual_seed(7 + rank)
    load_pretrained(model, path, mesh, progress=False, allow_missing=["lm_head.*"])
    return whole(model)["lm_head.weight"], torch.rand(1)


@pytest.mark.parametrize("kind", cases([(kind,) for kind in MESHES], [("fsdp",)]))
def test_what_no_file_holds_is_the_first_ranks_everywhere(kind: Any, tmp_path: Path) -> None:
    without(tmp_path, "lm_head.weight")
    torch.manual_seed(7)
    wanted = torch.empty(90, 24).normal_(0, 0.02)  # as transformers' _init_weights says
    for rank, (found, after) in enumerate(run_ranks(world_of(kind), missing, tmp_path, kind)):
        assert torch.equal(found, wanted)
        torch.manual_seed(7 + rank)
        torch.empty(90, 24).normal_(0, 0.02)
        assert torch.equal(after, torch.rand(1))  # however much of it the rank has


class Mixed(nn.Module):
    """A weight of the files, and beside it what no file holds, of every kind, drawn from random numbers."""

    mask: torch.Tensor
    eight: torch.Tensor
    turns: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(7, 2))
        self.bias = nn.Parameter(torch.ones(7))
        self.scale = nn.Parameter(torch.ones(()))
        self.own = nn.Parameter(torch.full((3,), 5.0, device="cpu"))
        self.register_buffer("mask", torch.ones(5, dtype=torch.bool), persistent=False)
        self.register_buffer("eight", torch.ones(5).to(torch.float8_e4m3fn), persistent=False)
        self.register_buffer("turns", torch.ones(5, dtype=torch.complex64), persistent=False)
        self.register_buffer("again", self.turns, persistent=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        nn.init.normal_(self.own)
        self.set_what_is_missing()

    def set_what_is_missing(self) -> None:
        nn.init.normal_(self.bias)
        nn.init.normal_(self.scale)
        self.mask.copy_(torch.rand(5) < 0.5)
        self.eight.copy_(torch.rand(5))
        self.turns.copy_(torch.view_as_complex(torch.rand(5, 2)))


NAMES = ("weight", "bias", "scale", "own", "mask", "eight", "turns", "again")


def mixed(rank: int, world: int, path: Path, sharded: bool) -> dict[str, Any]:
    with torch.device("meta"):
        model: Any = Mixed()
    if sharded:
        forget_meshes()
        mesh: Any = ContextParallelMesh(device_type="cpu", ring_size=world).axis_mesh("fsdp")
        fully_shard(model, mesh=mesh, ignored_params={model.scale, model.own})
    torch.manual_seed(7 + rank)
    load_pretrained(model, path, progress=False, strict=False)
    assert model.turns is model.again
    held = {name: getattr(model, name).detach() for name in NAMES}
    return {
        name: (x.full_tensor() if isinstance(x, DTensor) else x).to(torch.complex64)
        for name, x in held.items()
    }


@pytest.mark.parametrize("sharded", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_module_that_files_hold_in_part(sharded: bool, tmp_path: Path) -> None:
    save_file({"weight": torch.arange(14.0).view(7, 2)}, tmp_path / "model.safetensors")
    wanted = Mixed()
    torch.manual_seed(7)
    wanted.set_what_is_missing()  # nothing is drawn for what has values
    for found in run_ranks(2, mixed, tmp_path, sharded):
        assert torch.equal(found["weight"].real, torch.arange(14.0).view(7, 2))
        assert found["own"].tolist() == [5.0] * 3  # it had a value
        for name in ("bias", "scale", "mask", "eight", "turns", "again"):
            assert torch.equal(found[name], getattr(wanted, name).detach().to(torch.complex64)), (
                name
            )


def built_differently(rank: int, world: int, path: Path) -> str:
    model = make(device="cpu" if rank else "meta")
    with pytest.raises(CheckpointError) as raised:
        load_pretrained(model, path, progress=False)
    assert all(x.is_meta for x in model.parameters()) == (rank == 0)
    return str(raised.value)


@pytest.mark.nightly
def test_ranks_whose_models_lack_different_things_are_refused(tmp_path: Path) -> None:
    save(tmp_path)
    first, second = run_ranks(2, built_differently, tmp_path)
    assert first == second
    assert (
        "rotary_emb.inv_freq, which is on the meta device on one of the ranks 0 and 1 only" in first
    )
