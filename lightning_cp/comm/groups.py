"""Process groups of mesh axes, and for messages between CPUs. All ranks of the world make them together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# Before there is a world: its functions have the world's group for a default, which they would keep alive
# until Python exits. PyTorch 2.14 imports it with the first part of a mesh.
import torch.distributed.nn
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh

from lightning_cp.errors import ConfigError

FAKE = "fake"
"""PyTorch's backend for one process that acts as a rank of a world that does not exist."""
_ALONE = "lightning_cp: one rank"
"""Description of the group that axes of size 1 share."""


def mesh_of_groups(
    device_type: str, sizes: tuple[int, ...], *, mesh_dim_names: tuple[str, ...]
) -> DeviceMesh:
    """Make a mesh in which all axes of size 1 share a group, and axes of all ranks take the world's.

    Each gloo group keeps threads that wake up a hundred times a second: with a group for each of five axes
    they took 5 to 9 ms of CPU a second, on every rank. Each NCCL group has a communicator, made at once.
    """
    world = _world()
    ranks = torch.arange(math.prod(sizes)).view(sizes)
    by_size = {world.size(): world}
    if 1 in sizes and world.size() > 1:
        by_size[1] = _group_of_one(ranks)
    groups = [
        by_size[size] if size in by_size else group_of(ranks.movedim(dim, -1).reshape(-1, size))
        for dim, size in enumerate(sizes)
    ]
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=mesh_dim_names)


def flatten(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Make one axis, with a name, of a mesh's axes; an axis of all ranks takes the world's group."""
    with _sharing_the_world_group(_world()):
        axis = mesh._flatten(name)  # PyTorch has no public name for it
    _inherit_timeout(axis.get_group())
    return axis


@contextmanager
def _sharing_the_world_group(world: dist.ProcessGroup) -> Iterator[None]:
    """A block in which a mesh's axis of all ranks takes the world's group also if that is gloo's.

    Where there are GPUs PyTorch makes another group for it, in 2.10 one whose messages between GPUs are
    NCCL's: those that were to be gloo's, such as of ranks that share a GPU, which NCCL refuses.
    """
    own: Any = getattr(device_mesh, "get_backend", None)  # PyTorch imports the function there
    if own is None or dist.get_backend(world) != "gloo":
        yield
        return
    device_mesh.get_backend = lambda *_: "undefined"
    try:
        yield
    finally:
        device_mesh.get_backend = own


def gloo_group(partition: torch.Tensor) -> dist.ProcessGroup:
    """Make groups for CPU messages and return this rank's; ``partition`` is ``[groups, ranks]``.

    Raises:
        ConfigError: ranks that are in no group, or in two.
    """
    _check_partition(partition)
    world = _world()
    backend = FAKE if is_fake() else "gloo"  # gloo would wait for the others to connect
    if len(partition) == 1 and dist.get_backend(world) == backend:
        return world
    if partition.shape[1] == 1 and _is_eager(world):
        return _group_of_one(partition, backend)
    return group_of(partition, backend)


def _group_of_one(ranks: torch.Tensor, backend: str | None = None) -> dist.ProcessGroup:
    """Return a group of this rank alone; ``backend`` is that of a real one, the world's if it is ``None``.

    One of the ``fake`` backend copies what a single rank would receive. It has no communicator, which NCCL
    makes for each group at once, and no threads. Where it would be wrong, all ranks make groups together.
    """
    if dist.get_backend() != "gloo":
        found = _fake_group()
        if found is not None:
            return found
    # Not with use_local_synchronization: it names groups by ranks and how many groups there are, which
    # is the name of a group that still exists once another one was destroyed.
    return group_of(ranks.reshape(-1, 1), backend)


def _fake_group() -> dist.ProcessGroup | None:
    """Return this rank's group of ``fake``; ``None`` if this PyTorch's has none, or leaves results empty.

    It outlives meshes: a later one could get the name of a group that still exists.
    """
    # The import registers the backend in versions of PyTorch that do not register it.
    from torch.testing._internal.distributed import fake_pg  # noqa: F401

    known = dist.distributed_c10d._world.pg_map  # PyTorch has no public list of groups
    found = next((group for group in known if group.group_desc == _ALONE), None)
    if found is None:
        options: Any = {"use_local_synchronization": True, "group_desc": _ALONE}
        with suppress(RuntimeError):  # of a backend that is to connect to a device
            found = dist.new_group([dist.get_rank()], backend=FAKE, **options)
    if not isinstance(found, dist.ProcessGroup):
        return None
    if _is_exact(found):
        return found
    dist.destroy_process_group(found)
    return None


def _is_exact(group: dist.ProcessGroup) -> bool:
    """True if this rank receives what it sends to itself."""
    sent, scattered, exchanged = torch.ones(1), torch.zeros(1), torch.zeros(1)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(scattered, sent, group=group)
    dist.all_to_all_single(exchanged, sent, group=group)
    return bool(scattered) and bool(exchanged)


def lasts(group: dist.ProcessGroup) -> bool:
    """True for the world's group, and for one that all meshes of this world share."""
    return group is dist.group.WORLD or group.group_desc == _ALONE


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def _is_eager(world: dist.ProcessGroup) -> bool:
    """True if the world's NCCL communicator exists: Lightning gives the device to ``init_process_group``."""
    return getattr(world, "bound_device_id", None) is not None


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
    """Make the groups of ``partition`` (``[groups, ranks]``) and return this rank's, in the order of ranks.

    Args:
        partition: each rank once.
        backend: that of the world if it is ``None``.

    Raises:
        ConfigError: ranks that are in no group, or in two.
    """
    _check_partition(partition)
    ranks = partition.sort(dim=1).values.tolist()
    if not _is_eager(_world()):
        own, _ = dist.new_subgroups_by_enumeration(ranks, backend=backend)
    elif backend is None:
        own = dist.split_group(split_ranks=ranks)  # one split for all, as PyTorch's meshes
    else:
        with _without_splits(_world()):
            own, _ = dist.new_subgroups_by_enumeration(ranks, backend=backend)
    assert isinstance(own, dist.ProcessGroup)
    _inherit_timeout(own)
    return own


def _inherit_timeout(group: dist.ProcessGroup) -> None:
    """Give a group the world's timeout; PyTorch gives new groups its default, 10 minutes with NCCL."""
    world = _world()
    if group is world or is_fake():
        return
    options: Any = getattr(world._get_backend(world._device_types[0]), "options", None)
    if hasattr(options, "_timeout"):  # backends of other packages may have none
        set_timeout(options._timeout, group)


def set_timeout(timeout: timedelta, group: dist.ProcessGroup) -> None:
    """Set a group's timeout, by the public name that torch 2.14 made, or by the private one before."""
    setter = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    setter(timeout, group)


@contextmanager
def _without_splits(world: dist.ProcessGroup) -> Iterator[None]:
    """A block in which groups of another backend are made as if the world's communicator did not exist.

    Otherwise every group that a rank is not in makes it call ``perform_nocolor_split``, for which NCCL waits
    until all ranks have called it as often.
    """
    device = world.bound_device_id
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device


def _check_partition(partition: torch.Tensor) -> None:
    """Check that each rank is in one group: NCCL splits the communicator of all ranks."""
    ranks = sorted(partition.flatten().tolist())
    if ranks != list(range(dist.get_world_size())):
        world_size = dist.get_world_size()
        raise ConfigError(
            f"process groups {str(partition.tolist())[:200]} do not hold each of {world_size} ranks once, "
            "so NCCL would wait forever for the others. Make groups for all ranks together, with "
            "torch.distributed.new_subgroups_by_enumeration."
        )
