"""What no file holds is set module by module, and exchanged for many small ones at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_cp.checkpoint import load_pretrained
from lightning_cp.checkpoint.pretrained import meta_init
from lightning_cp.checkpoint.pretrained.meta_init import UnsetTensors, WholeValues
from lightning_cp.utils.dtensor import forget_meshes
from tests.helpers.checkpoint.pretrained.models import load
from tests.helpers.pool import run_ranks

SIZE = 6


class Block(nn.Module):
    """A weight of the files, a parameter and a buffer that they do not hold, and one by the block before."""

    rates: torch.Tensor

    def __init__(self, before: Block | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(SIZE, SIZE))
        self.adapter = nn.Parameter(torch.empty(SIZE, 2))
        self.register_buffer("rates", torch.empty(SIZE), persistent=False)
        self._before = [before]

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        nn.init.normal_(self.adapter)
        (before,) = self._before
        self.rates.copy_(torch.arange(float(SIZE)) if before is None else before.rates + 1)


def stack(count: int) -> nn.ModuleList:
    blocks = nn.ModuleList()
    for at in range(count):
        before: Any = blocks[at - 1] if at else None
        blocks.append(Block(before))
    return blocks


def loaded(rank: int, world: int, path: Path, count: int, at_once: int) -> tuple[Any, int]:
    """Every value of the model, whole, and the messages of setting what files lack."""
    forget_meshes()
    torch.manual_seed(rank)
    with torch.device("meta"):
        model = stack(count)
    mesh = init_device_mesh("cpu", (world,))
    for block in model:
        fully_shard(block, mesh=mesh)
    calls: list[int] = []
    with (
        mock.patch.object(meta_init, "_TOGETHER", at_once),
        mock.patch.object(UnsetTensors, "set", counting(UnsetTensors.set, calls)),
    ):
        load_pretrained(model, path, allow_missing=["*.adapter"], progress=False)
    states = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    whole = {k: x.full_tensor() if isinstance(x, DTensor) else x for k, x in states.items()}
    return {name: x.detach().clone() for name, x in whole.items()}, calls[0]


def counting(method: Any, calls: list[int]) -> Any:
    """Puts the messages of a call into ``calls``."""

    def counted(*args: Any) -> None:
        with (
            mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as shared,
            mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as sent,
        ):
            method(*args)
        calls.append(shared.call_count + sent.call_count)

    return counted


def saved(path: Path, count: int) -> None:
    save_file({f"{at}.weight": torch.full((SIZE, SIZE), float(at)) for at in range(count)}, path)


def expected(count: int) -> dict[str, torch.Tensor]:
    """As one process sets them, module by module."""
    torch.manual_seed(0)
    model = stack(count)
    for at, block in enumerate(model):
        own: Any = block
        own.reset_parameters()
        nn.init.constant_(own.weight, float(at))
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def test_as_many_messages_for_many_modules_as_for_one(tmp_path: Path) -> None:
    saved(tmp_path / "model.safetensors", 9)
    states, messages = zip(*run_ranks(2, loaded, tmp_path, 9, 2**20), strict=True)
    assert messages == (3, 3)
    for name, x in expected(9).items():
        if "adapter" not in name:  # whose random numbers are compared below
            assert torch.equal(states[0][name], x), name
        assert torch.equal(states[0][name], states[1][name]), name


def test_the_values_are_those_of_one_module_at_a_time(tmp_path: Path) -> None:
    saved(tmp_path / "model.safetensors", 5)
    together, _ = run_ranks(2, loaded, tmp_path, 5, 2**20)[0]
    some, few = run_ranks(2, loaded, tmp_path, 5, 2 * (2 * SIZE + SIZE))[0]
    alone, many = run_ranks(2, loaded, tmp_path, 5, 0)[0]
    assert (few, many) == (3 * 3, 5 * 3)  # two at a time, one at a time
    for name, x in alone.items():
        assert x.isfinite().all()
        assert torch.equal(x, together[name]), name
        assert torch.equal(x, some[name]), name
    assert alone["0.adapter"].std() > 0.1
    assert not torch.equal(alone["0.adapter"], alone["1.adapter"])


def test_many_modules_are_looked_at_once_each(tmp_path: Path) -> None:
    count = 40
    saved(tmp_path / "model.safetensors", count)
    with torch.device("meta"):
        model = stack(count)
    with mock.patch.object(
        WholeValues, "numel", autospec=True, side_effect=WholeValues.numel
    ) as looked:
        load(model, tmp_path, allow_missing=["*.adapter"])
    assert looked.call_count == 2 * count  # to see whether there is room, and to set them
