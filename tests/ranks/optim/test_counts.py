"""What a step sends and computes, counted, against the closed form."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.op_counts import Counts
from lightning_cp.optim import Muon
from lightning_cp.optim.newton_schulz import newton_schulz_flops
from lightning_cp.utils.dtensor import forget_meshes
from tests.helpers.optim.shardings import SHARDINGS, TP, Model, give, gradients, sharded, whole
from tests.helpers.optim.step_counts import flops_of_ranks, sent_bytes_of_ranks
from tests.helpers.pool import run_ranks
from tests.ranks.optim.test_shardings import EVERY

STEPS = 5


class Found(NamedTuple):
    """Of one rank."""

    sent: int
    flops: int
    planned_bytes: dict[int, int]
    planned_flops: dict[int, int]


def counted(rank: int, world_size: int, name: str, ns_dtype: torch.dtype) -> Found:
    """The second step of a model: the first makes groups and tells ranks what each holds."""
    model = sharded(name, torch.float32)
    optimizer = Muon(model.named_parameters(), ns_dtype=ns_dtype, chunk_mib=1e-3)
    counts, flops = Counts(), FlopCounterMode(display=False)
    give(model, gradients(whole(torch.float32), 0))
    optimizer.step()
    with counts, flops:
        optimizer.step()
    rounds = optimizer._matrix_step.rounds
    return Found(
        counts.data,
        flops.get_total_flops(),
        sent_bytes_of_ranks(rounds, ns_dtype),
        flops_of_ranks(rounds),
    )


def matrices() -> list[tuple[str, torch.Size]]:
    named = Model().named_parameters()
    return [(n, p.shape) for n, p in named if p.ndim == 2 and n.startswith("layers")]


@pytest.mark.quick("fsdp+tp 2x2-*", "tp 2-*", "hsdp 2x2-*", "plain-*")
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.nightly), torch.bfloat16]
)
@pytest.mark.parametrize("name", EVERY)
def test_bytes_and_flops(name: str, dtype: torch.dtype) -> None:
    ranks = prod(SHARDINGS[name])
    every = run_ranks(ranks, counted, name, dtype)
    for rank, found in enumerate(every):
        assert found.sent == found.planned_bytes[rank]
        assert found.flops == found.planned_flops[rank]
    # Each matrix is computed once, by one rank; and once more for each mesh that does not know of the others.
    _, shards, tp = SHARDINGS[name]
    work = sum(
        newton_schulz_flops(shape[0], shape[1], STEPS)
        * (tp if shards > 1 and not any(x in n for x in TP) else 1)
        for n, shape in matrices()
    )
    assert sum(found.flops for found in every) == work


@pytest.mark.parametrize("name", ["ddp 4", "fsdp 4", "hsdp 2x2", "fsdp+tp 2x2"])
def test_closed_form_of_even_parts(name: str) -> None:
    """Of P entries in n parts and c copies: 2 P (1 - 1/n) go to owners and back, P (c - 1) to copies."""
    copies, shards, tp = SHARDINGS[name]
    parts = shards * tp
    entries = sum(prod(shape) for shape in EVEN)
    for found in run_ranks(copies * parts, even, name):
        total = 2 * entries * (parts - 1) // parts + entries * (copies - 1)
        assert sum(found.values()) == 4 * total


EVEN = [(16, 8), (8, 16), (8, 8), (24, 8)]


def even(rank: int, world_size: int, name: str) -> dict[int, int]:
    """Planned bytes of matrices that divide."""
    forget_meshes()
    copies, shards, tp = SHARDINGS[name]
    named = [(f"w{at}", torch.ones(shape)) for at, shape in enumerate(EVEN)]
    if shards * tp > 1:
        mesh = init_device_mesh("cpu", (copies, shards, tp))
        how = [Replicate(), Shard(0), Shard(1)]
        named = [(n, distribute_tensor(x, mesh, how, src_data_rank=None)) for n, x in named]
    parameters = [(n, torch.nn.Parameter(x)) for n, x in named]
    for _, p in parameters:
        p.grad = torch.ones_like(p)
    optimizer = Muon(parameters, ns_dtype="float32")
    optimizer.step()
    return sent_bytes_of_ranks(optimizer._matrix_step.rounds, torch.float32)
