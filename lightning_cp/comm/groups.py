"""Process groups of mesh axes, and for messages between CPUs. All ranks of the world make them together."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

# Before there is a world: its functions have the world's group for a default, which they would keep alive
# until Python exits. PyTorch 2.14 imports it with the first part of a mesh.
import torch.distributed.nn
from torch.distributed.device_mesh import DeviceMesh

FAKE = "fake"
"""PyTorch's backend for one process that acts as a rank of a world that does not exist."""


def gloo_mesh(
    device_type: str, sizes: tuple[int, ...], *, mesh_dim_names: tuple[str, ...]
) -> DeviceMesh:
    """Make a mesh in which all axes of size 1 share a group, and axes of all ranks take the world's.

    Each gloo group keeps threads that wake up a hundred times a second: with a group for each of five axes
    they took 5 to 9 ms of CPU a second, on every rank.
    """
    world = dist.group.WORLD
    assert world is not None
    ranks = torch.arange(math.prod(sizes)).view(sizes)
    alone = world
    if world.size() > 1 and 1 in sizes:
        # Not with use_local_synchronization: it names groups by ranks and how many groups there are, which
        # is the name of a group that still exists once another one was destroyed.
        alone = group_of(ranks.reshape(-1, 1))
    by_size = {1: alone, world.size(): world}
    groups = [
        by_size[size] if size in by_size else group_of(ranks.movedim(dim, -1).reshape(-1, size))
        for dim, size in enumerate(sizes)
    ]
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=mesh_dim_names)


def gloo_group(partition: torch.Tensor) -> dist.ProcessGroup:
    """Make groups for CPU messages and return this rank's; ``partition`` is ``[groups, ranks]``."""
    world = dist.group.WORLD
    assert world is not None
    backend = FAKE if is_fake() else "gloo"  # gloo would wait for the others to connect
    if len(partition) == 1 and dist.get_backend(world) == backend:
        return world
    return group_of(partition, backend)


def is_fake() -> bool:
    """True if the backend is ``FAKE``: nothing is sent, and there is no other process to connect to."""
    return dist.get_backend() == FAKE


def warm_up(ring: dist.ProcessGroup, device: torch.device) -> None:
    """Make the ring's communicator now, with all of its ranks.

    NCCL makes it at a group's first call. In a ring this may be a transfer of only some of the ranks (the
    others have nothing to send at that hop), which would then wait for the rest forever.
    """
    dist.all_reduce(torch.zeros(1, device=device), group=ring)


def group_of(partition: torch.Tensor, backend: str | None = None) -> dist.ProcessGroup:
    """Make the groups of ``partition`` (``[groups, ranks]``) and return this rank's.

    ``backend``: that of the world if it is ``None``.
    """
    own, _ = dist.new_subgroups_by_enumeration(partition.tolist(), backend=backend)
    assert isinstance(own, dist.ProcessGroup)
    return own
