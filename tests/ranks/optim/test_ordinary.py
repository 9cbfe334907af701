"""What any optimizer of PyTorch's can do: be copied, pickled, saved and loaded, and run within autocast."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from lightning_cp.errors import CheckpointError, ConfigError, NonFiniteError
from lightning_cp.optim import Muon, QKClip
from lightning_cp.optim.placement import Grids
from lightning_cp.optim.work_list import Piece, plan_rounds
from lightning_cp.utils.dtensor import forget_meshes
from tests.helpers.optim.shardings import Model, give, gradients, weights, whole
from tests.helpers.pool import expect_on_every_rank, run_ranks


def stepped() -> tuple[Model, Muon]:
    """After a step, with gradients for another."""
    model = whole(torch.float32)
    optimizer = Muon(model.named_parameters(), fused={"*.up_proj.weight": (12, 8)})
    give(model, gradients(model, 0))
    optimizer.step()
    give(model, gradients(model, 1))
    return model, optimizer


@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_go_on(how: Any) -> None:
    model, optimizer = stepped()
    other, of_other = how((model, optimizer))
    give(other, gradients(other, 1))
    for each in (optimizer, of_other):
        each.step()
    want = weights(model)
    assert all(torch.equal(x, want[name]) for name, x in weights(other).items())
    assert of_other.table() == optimizer.table()


def test_names_are_those_given_here() -> None:
    """A compiled model's have a prefix; a fused projection stays several matrices."""
    model, optimizer = stepped()
    other = copy.deepcopy(model)
    named = [(f"_orig_mod.{name}", p) for name, p in other.named_parameters()]
    fresh = Muon(named, fused={"*.up_proj.weight": (12, 8)})
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    give(other, gradients(other, 1))
    for each in (optimizer, fresh):
        each.step()
    want = weights(model)
    assert all(torch.equal(x, want[name]) for name, x in weights(other).items())


def test_the_state_of_another_optimizer_is_refused() -> None:
    _, optimizer = stepped()
    groups = [{"params": group["params"]} for group in optimizer.param_groups]
    theirs = torch.optim.AdamW(groups)
    theirs.step()
    with pytest.raises(
        CheckpointError, match="groups are muon and adamw, this one's are of no kind"
    ):
        optimizer.load_state_dict(theirs.state_dict())
    optimizer.step()


def test_autocast_does_not_reach_inside() -> None:
    model, optimizer = stepped()
    other, of_other = copy.deepcopy((model, optimizer))
    for each in (optimizer, of_other):
        each._settings = each._settings.__class__(ns_dtype="float32").checked()
        each._matrix_step = each._new_plan()
    give(other, gradients(other, 1))
    optimizer.step()
    with torch.autocast("cpu", torch.bfloat16):
        of_other.step()
    want = weights(model)
    assert all(torch.equal(x, want[name]) for name, x in weights(other).items())


def test_a_refused_step_leaves_no_scores() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.ModuleDict({n: nn.Linear(8, 8) for n in ("q_proj", "k_proj")})})
    optimizer = Muon(model.named_parameters(), qk_clip=QKClip(tau=1.0))
    clip = optimizer.qk_clip
    assert clip is not None
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.nan)
    clip.note("a", torch.tensor([9.0, 9.0]))
    with pytest.raises(NonFiniteError):
        optimizer.step()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    clip.note("a", torch.tensor([0.5, 0.5]))
    optimizer.step()
    assert clip.largest == {"a": 0.5}
    assert clip.clipped == {}


def test_frozen_projections_stay() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.ModuleDict({n: nn.Linear(8, 8) for n in ("q_proj", "k_proj")})})
    model.get_parameter("a.q_proj.weight").requires_grad_(False)
    clip = QKClip(tau=1.0)
    clip.bind(model.named_parameters())
    before = copy.deepcopy(model.state_dict())
    clip.note("a", torch.tensor([9.0, 9.0]))
    assert clip.apply() == {}
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    with pytest.raises(ConfigError, match="parameters of another optimizer"):
        clip.bind([("b.q_proj.weight", torch.ones(8, 8)), ("b.k_proj.weight", torch.ones(8, 8))])


def owners(rank: int, world_size: int) -> list[tuple[str, tuple[int, ...]]]:
    """Of matrices on either axis of a mesh, whose ranks know of some of them only."""
    forget_meshes()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    pieces: list[Piece] = []
    for axis, count in (("a", 2), ("b", 3)):
        for at in range(count):
            x = distribute_tensor(torch.ones(8, 8 + at), mesh[axis], [Shard(0)], src_data_rank=None)
            pieces.append(Piece(f"{axis}{at}", x))
    rounds = plan_rounds(pieces, Grids(), torch.float32, 5, 1 << 30)
    return [
        (x.piece.name, (each.grid.flat[owner],))
        for each in rounds
        for owner, some in each.owned.items()
        for x in some
    ]


def test_ranks_agree_on_owners_of_meshes_that_cross() -> None:
    every = run_ranks(4, owners)
    for at, found in enumerate(every):
        for name, (owner,) in found:
            assert (name, (owner,)) in every[owner], (at, name)


def summed_later(rank: int, world_size: int) -> None:
    """A gradient that would be sent before ranks have seen that one has none."""
    forget_meshes()
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)], src_data_rank=None)
    p = nn.Parameter(x)
    if not rank:
        p.grad = DTensor.from_local(torch.ones(4, 4), mesh, [Partial()], run_check=False)
    Muon([("w", p)]).step()


def sparse(rank: int, world_size: int) -> None:
    model = whole(torch.float32)
    optimizer = Muon(model.named_parameters())
    give(model, gradients(model, 0))
    if rank:
        p = model.get_parameter("layers.0.odd.weight")
        assert p.grad is not None
        p.grad = p.grad.to_sparse()
    optimizer.step()


def test_refusals_of_one_rank_are_told_to_all() -> None:
    expect_on_every_rank(
        2, summed_later, error=ConfigError, match="different parameters.*rank 0: w"
    )
    expect_on_every_rank(
        2, sparse, error=ConfigError, match="rank 1: layers.0.odd.weight has a sparse"
    )
