"""Memory that is not there: what was going to take it is named, and counted before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_cp.checkpoint import load_pretrained
from lightning_cp.checkpoint.pretrained import load as load_module
from lightning_cp.checkpoint.pretrained import memory
from lightning_cp.errors import CheckpointError
from lightning_cp.utils.dtensor import forget_meshes, local_part
from tests.helpers.checkpoint.pretrained.models import load
from tests.helpers.pool import run_ranks

ROWS, COLUMNS = 512, 64
WHOLE = ROWS * COLUMNS * 4


def none_beyond(limit: int) -> pytest.MonkeyPatch:
    """PyTorch has no memory for larger tensors."""
    patch = pytest.MonkeyPatch()
    for name in ("empty", "empty_like"):
        own = getattr(torch, name)

        def limited(*given: Any, own: Any = own, **options: Any) -> torch.Tensor:
            made: torch.Tensor = own(*given, **options)
            if not made.is_meta and local_part(made).nbytes > limit:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            return made

        patch.setattr(torch, name, limited)
    return patch


class Outer(nn.Module):
    """PyTorch gives memory to what is within first, and names it last."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.ones(3, device="cpu"), persistent=False)
        self.within = nn.Linear(COLUMNS, ROWS, bias=False)


def test_the_tensor_that_had_no_memory_is_named(tmp_path: Path) -> None:
    held = {"own": torch.ones(3), "within.weight": torch.ones(ROWS, COLUMNS)}
    save_file(held, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Outer()
    patch = none_beyond(WHOLE)
    try:
        with pytest.raises(CheckpointError) as raised:
            load(model, tmp_path, dtype="float64")
    finally:
        patch.undo()
    said = str(raised.value)
    assert "no memory for within.weight of shape [512, 64] (torch.float64)" in said
    assert f"{2 * WHOLE:,} bytes wanted" in said


class Net(nn.Module):
    """A head that no file holds beside what one does."""

    turns: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(COLUMNS, ROWS, bias=False)
        self.head = nn.Linear(COLUMNS, ROWS, bias=False)
        self.register_buffer("turns", torch.zeros(ROWS, dtype=torch.int64), persistent=False)

    def reset_buffers(self) -> None:
        self.turns.zero_()


def tried(rank: int, world: int, path: Path, free: int, limit: int) -> tuple[str, bool]:
    """What is said, and whether nothing was allocated before."""
    forget_meshes()
    with torch.device("meta"):
        model = Net()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    patch = none_beyond(limit) if limit else pytest.MonkeyPatch()
    patch.setattr(memory, "_available", lambda: free)
    patch.setattr(memory, "_below_cgroup_limit", lambda: None)
    if limit:
        patch.setattr(load_module, "_bytes_needed", lambda *_: 0)
    try:
        load_pretrained(model, path, progress=False, allow_missing=["head.*"])
    except Exception as error:
        return str(error), all(x.is_meta for x in model.parameters())
    finally:
        patch.undo()
    return "nothing was raised", False


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_file({"body.weight": torch.ones(ROWS, COLUMNS)}, tmp_path / "model.safetensors")
    return tmp_path


SHARDS = WHOLE + ROWS * 8
"""Of a rank."""


def test_what_is_made_whole_is_counted_before(checkpoint: Path) -> None:
    # the head and this rank's part of it, and in the same group the turns, which are set twice
    wanted = SHARDS + WHOLE + WHOLE // 2 + ROWS * 8
    for said, untouched in run_ranks(2, tried, checkpoint, wanted - 1, 0):
        assert f"takes {wanted:,} bytes on cpu, and {wanted - 1:,} are free" in said
        assert f"{wanted - SHARDS:,} of them while head.weight and 1 more are set" in said
        assert untouched
    for said, untouched in run_ranks(2, tried, checkpoint, 2 * wanted - 1, 0):
        assert f"take {2 * wanted:,} bytes together" in said
        assert untouched
    for said, _ in run_ranks(2, tried, checkpoint, 2 * wanted, 0):
        assert said == "nothing was raised"


def test_what_is_made_whole_without_room_is_named(checkpoint: Path) -> None:
    for said, _ in run_ranks(2, tried, checkpoint, 2**40, WHOLE - 1):
        assert "no memory for head.weight of shape [512, 64] (torch.float32)" in said
        assert f"{WHOLE:,} bytes wanted on cpu, {2**40:,} free" in said
        assert "set whole on every rank" in said
        assert "dtype='bfloat16'" in said
