"""``keys=`` and tied weights where every rank has a part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_cp import ContextParallelMesh
from lightning_cp.checkpoint import export_pretrained, load_pretrained
from lightning_cp.errors import CheckpointError
from lightning_cp.utils.dtensor import forget_meshes
from tests.helpers.checkpoint.cases import cases
from tests.helpers.checkpoint.pretrained.models import PARTS, WHOLE, Apart, Fused, whole
from tests.helpers.pool import run_ranks
from tests.ranks.checkpoint.pretrained.test_export import stored

WORLDS = {"fsdp": 3, "tp": 2, "fsdp_tp": 4}
"""Three ranks share 14 rows unevenly: parts begin and end within what is joined."""


def sharded(model: Any, kind: str, rows: list[str], columns: list[str]) -> None:
    """Shard a model; by tensor parallelism its rows or columns."""
    forget_meshes()
    sizes = {"tensor_parallel_size": 2} if "tp" in kind else {}
    rings = {"fsdp": 3, "tp": 1, "fsdp_tp": 2}[kind]
    mesh = ContextParallelMesh(device_type="cpu", ring_size=rings, **sizes)
    if "tp" in kind:
        plan: dict[str, Any] = {name: ColwiseParallel() for name in rows}
        plan |= {name: RowwiseParallel() for name in columns}
        parallelize_module(model, mesh.axis_mesh("tp"), plan)
    if "fsdp" in kind:
        fully_shard(model, mesh=mesh.axis_mesh("fsdp"))


def joins(rank: int, world: int, path: Path, kind: str) -> dict[str, torch.Tensor]:
    fused = Fused()
    sharded(fused, kind, ["layers.0.qkv"], ["layers.1.qkv"] if kind == "tp" else [])
    load_pretrained(fused, path / "apart", progress=False, keys={WHOLE: PARTS})
    return whole(fused)


def takes_apart(rank: int, world: int, path: Path, kind: str) -> dict[str, torch.Tensor]:
    apart = Apart()
    sharded(apart, kind, ["layers.0.q", "layers.1.v"], ["layers.0.k"] if kind == "tp" else [])
    load_pretrained(apart, path / "fused", progress=False, keys={PARTS: WHOLE})
    export_pretrained(apart, path / "again", keys={PARTS.replace(" + ", " +0 "): WHOLE})
    return whole(apart)


@pytest.mark.parametrize("kind", cases(zip(WORLDS), [("fsdp",), ("fsdp_tp",)]))
def test_fused_parameters_are_shared_out(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    apart: Any = Apart(device="cpu")
    fused = {
        f"layers.{at}.qkv.weight": torch.cat([layer[name].weight.detach() for name in "qkv"])
        for at, layer in enumerate(apart.layers)
    }
    for name, held in {"apart": apart.state_dict(), "fused": fused}.items():
        (tmp_path / name).mkdir()
        save_file(dict(held), tmp_path / name / "model.safetensors")
    for wanted, way in ((fused, joins), (apart.state_dict(), takes_apart)):
        for found in run_ranks(WORLDS[kind], way, tmp_path, kind):
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[name], x) for name, x in wanted.items())
    assert all(torch.equal(x, fused[name]) for name, x in stored(tmp_path / "again").items())


class Tied(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 8, bias=False)
        self.head = nn.Linear(3, 8, bias=False)
        self.head.weight = self.embed.weight


def tied(rank: int, world: int, path: Path, options: dict[str, Any]) -> Any:
    with torch.device("meta"):
        model = Tied()
    sharded(model, "fsdp", [], [])
    try:
        loaded = load_pretrained(model, path, progress=False, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    assert model.head.weight is model.embed.weight
    return loaded.unexpected, whole(model)["head.weight"]


def test_twins_that_differ_in_the_part_of_one_rank_are_refused_on_all(tmp_path: Path) -> None:
    weight = torch.arange(24.0).view(8, 3)
    other = weight.clone()
    other[7, 2] += 1
    save_file({"embed.weight": weight, "head.weight": other}, tmp_path / "model.safetensors")
    first, second, last = run_ranks(3, tied, tmp_path, {})
    assert last.startswith(CheckpointError.__name__)
    assert "'head.weight' has other values than 'embed.weight'" in last
    for said in (first, second):
        assert said.startswith("RankFailure")
        assert "rank 2 raised CheckpointError" in said
    for unexpected, found in run_ranks(3, tied, tmp_path, {"allow_unexpected": ["head.*"]}):
        assert unexpected == ("head.weight",)
        assert torch.equal(found, weight)


def test_twins_that_are_the_same_are_compared_by_parts(tmp_path: Path) -> None:
    weight = torch.arange(24.0).view(8, 3)
    held = {"embed.weight": weight, "head.weight": weight.clone()}
    save_file(held, tmp_path / "model.safetensors")
    for unexpected, found in run_ranks(3, tied, tmp_path, {}):
        assert unexpected == ()
        assert torch.equal(found, weight)
