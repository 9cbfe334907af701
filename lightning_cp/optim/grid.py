"""The ranks that hold a parameter: copies of it, each cut into parts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_cp.comm.groups import group_of
from lightning_cp.comm.objects import World
from lightning_cp.errors import ConfigError
from lightning_cp.optim.rows import sharded_dim


@dataclass(frozen=True)
class Grid:
    """Ranks by copy and part, and where this one is."""

    ranks: tuple[tuple[int, ...], ...]
    """Global ranks, [copies][parts]; part by part what they hold is the same in every copy."""
    copy: int
    part: int
    parts_group: dist.ProcessGroup | None
    """The ranks that hold this copy; ``None``: this one alone."""
    copies_group: dist.ProcessGroup | None
    """The ranks that hold this part; ``None``: this one alone."""

    @property
    def parts(self) -> int:
        """How many each copy is cut into."""
        return len(self.ranks[0])

    @property
    def copies(self) -> int:
        """How many there are."""
        return len(self.ranks)

    @cached_property
    def flat(self) -> tuple[int, ...]:
        """Global ranks, copy by copy."""
        return tuple(rank for of_copy in self.ranks for rank in of_copy)

    @cached_property
    def part_at(self) -> tuple[int, ...]:
        """The part of each place in ``parts_group``."""
        return _places(self.parts_group, self.ranks[self.copy])

    @cached_property
    def place_of_copy(self) -> tuple[int, ...]:
        """Each copy's place in ``copies_group``."""
        own = [of_copy[self.part] for of_copy in self.ranks]
        at = _places(self.copies_group, own)
        return tuple(at.index(copy) for copy in range(self.copies))


def _places(group: dist.ProcessGroup | None, ranks: Sequence[int]) -> tuple[int, ...]:
    """Where in ``ranks`` the members of a group are, in its order."""
    if group is None:
        return (0,)
    return tuple(ranks.index(rank) for rank in dist.get_process_group_ranks(group))


class Grids:
    """Those of all matrices of an optimizer: each is made once, by all ranks together."""

    def __init__(self) -> None:
        self._made: dict[object, Grid] = {}

    def of(self, x: torch.Tensor, name: str = "a matrix") -> Grid:
        """Of a matrix; one that is no DTensor is whole on every rank of the world.

        Raises:
            ConfigError: a placement that is unknown, or several axes of a mesh that leaves ranks out.
        """
        with _naming(name):
            key = (x.device_mesh, _axes(x)) if isinstance(x, DTensor) else None
            if key not in self._made:
                self._made[key] = _of_mesh(*key) if key else _whole()
            return self._made[key]


def is_shared(x: torch.Tensor) -> bool:
    """True if other ranks hold a copy or a part of a parameter."""
    return (x.device_mesh.size() if isinstance(x, DTensor) else World().size) > 1


def require_known_placements(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse parameters whose values no rank holds.

    Raises:
        ConfigError: naming the parameter and its placement.
    """
    for name, x in named:
        for placement in x.placements if isinstance(x, DTensor) else ():
            with _naming(name):
                sharded_dim(placement)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def _axes(x: DTensor) -> tuple[int, ...]:
    """Of its mesh, those that cut it."""
    dims = [sharded_dim(placement) for placement in x.placements]
    return tuple(at for at, d in enumerate(dims) if d is not None and x.device_mesh.size(at) > 1)


def _whole() -> Grid:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return Grid(((0,),), 0, 0, None, None)
    ranks = tuple((rank,) for rank in range(dist.get_world_size()))
    return Grid(ranks, dist.get_rank(), 0, None, dist.group.WORLD)


def _of_mesh(mesh: DeviceMesh, axes: Sequence[int]) -> Grid:
    others = [at for at in range(mesh.ndim) if at not in axes]
    parts, copies = (math.prod(mesh.size(at) for at in some) for some in (axes, others))
    table = mesh.mesh.cpu().permute(*others, *axes).reshape(copies, parts)
    copy, part = (table == dist.get_rank()).nonzero()[0].tolist()
    return Grid(
        tuple(tuple(of_copy) for of_copy in table.tolist()),
        copy,
        part,
        _group(mesh, axes, table),
        _group(mesh, others, table.T),
    )


def _group(mesh: DeviceMesh, axes: Sequence[int], table: torch.Tensor) -> dist.ProcessGroup | None:
    """This rank's of the groups that the rows of a table are; all ranks of the mesh come here."""
    several = [at for at in axes if mesh.size(at) > 1]
    if not several:
        return None
    if len(several) == 1:
        return mesh.get_group(several[0])
    if mesh.size() != dist.get_world_size():
        names = mesh.mesh_dim_names or several
        raise ConfigError(
            f"it is spread over several axes of a mesh of {mesh.size()} out of "
            f"{dist.get_world_size()} ranks ({names}). Muon gathers over one axis, or over a mesh "
            "of all ranks; adamw=[pattern] leaves it to AdamW."
        )
    return dist.group.WORLD if len(table) == 1 else group_of(table)
