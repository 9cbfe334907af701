"""One process that plays a rank of a world of any size: its groups are real, and nothing is sent."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist

from lightning_cp.axes import Axis
from lightning_cp.comm.groups import FAKE
from lightning_cp.errors import ConfigError
from lightning_cp.mesh import ContextParallelMesh


@contextmanager
def fake_world(sizes: Mapping[Axis, int], rank: int) -> Iterator[ContextParallelMesh]:
    """A block in which this process is ``rank`` of as many ranks as the sizes multiply to; its mesh.

    Collectives return at once and leave what they were given, so nothing that has values is computed here.

    Args:
        sizes: of the axes; 1 where one is left out.
        rank: which rank to be.

    Raises:
        ConfigError: this process is in a process group already, or there is no such rank.
    """
    if dist.is_initialized():
        raise ConfigError(
            f"a fake world needs a process of its own, but this one is rank {dist.get_rank()} of a process "
            f"group of {dist.get_world_size()} ({dist.get_backend()}). Start another process for it, or "
            "call torch.distributed.destroy_process_group() first."
        )
    ranks = math.prod(sizes.values())
    if not 0 <= rank < ranks:
        raise ConfigError(
            f"rank must be from 0 to {ranks - 1}, as there are {ranks}, got {rank}. "
            "Name one of these ranks."
        )
    # Imported where it is needed, as it registers its backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(FAKE, store=FakeStore(), world_size=ranks, rank=rank)
    try:
        mesh = _mesh(sizes)
        try:
            yield mesh
        finally:
            mesh.destroy()
    finally:
        dist.destroy_process_group()


def _mesh(sizes: Mapping[Axis, int]) -> ContextParallelMesh:
    return ContextParallelMesh(
        ring_size=sizes.get(Axis.RING, 1),
        ulysses_size=sizes.get(Axis.ULYSSES, 1),
        data_parallel_replicate_size=sizes.get(Axis.DP_REPLICATE, 1),
        data_parallel_shard_size=sizes.get(Axis.DP_SHARD, 1),
        tensor_parallel_size=sizes.get(Axis.TP, 1),
    )
