"""The ranks that hold a parameter: copies of it, each cut into parts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor

from lightning_cp.comm.consensus import World
from lightning_cp.comm.groups import group_of
from lightning_cp.errors import ConfigError

# The entries of a parameter that a rank holds, for any sharding and without communication.
#
# When two axes shard one dimension, a rank's rows need not be adjacent (``_StridedShard``), and PyTorch's
# description of this has changed with its versions. The effect has not: so an index tensor is sharded as the
# parameter is, and read.


SHARDS = ("Shard", "_StridedShard")
"""Placements that give each rank whole rows or columns, by the names of their classes: since PyTorch 2.10 the
second is not a subclass of the first.
"""


def sharded_dim(placement: Placement) -> int | None:
    """The dimension that a placement shards; ``None`` for a copy on every rank.

    Raises:
        ConfigError: any other placement, with which no rank holds the values.
    """
    if isinstance(placement, Replicate):
        return None
    if type(placement).__name__ in SHARDS:
        return placement.dim  # pyright: ignore[reportAttributeAccessIssue]
    raise ConfigError(
        f"the placement {placement!r} is unknown, whose values no rank holds. Known: Replicate, "
        f"{', '.join(SHARDS)}, and several of them on one dimension."
    )


def held_indices(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The global indices of a dimension that this rank holds of ``x``, in local order: int64 [local size].

    Args:
        x: a DTensor, or a tensor that is whole.
        dim: the dimension.

    Raises:
        ConfigError: an unknown placement.
    """
    indices = torch.arange(x.shape[dim])
    if not isinstance(x, DTensor):
        return indices
    dims = [sharded_dim(placement) for placement in x.placements]
    placements = [
        _one_dimensional(placement) if sharded == dim % x.ndim else Replicate()
        for placement, sharded in zip(x.placements, dims, strict=True)
    ]
    held = distribute_tensor(indices, x.device_mesh, placements, src_data_rank=None)
    return held.to_local().cpu()


def _one_dimensional(placement: Placement) -> Placement:
    """The same placement for a tensor of one dimension."""
    kind: Any = type(placement)
    factor = getattr(placement, "split_factor", None)
    return kind(0) if factor is None else kind(0, split_factor=factor)


class ContiguousRun(NamedTuple):
    """Entries that are adjacent both on the rank and in the matrix."""

    local: int
    """Start on the rank."""
    whole: int
    """Start in the matrix."""
    length: int


class LocalBlock(NamedTuple):
    """The entries that a rank holds of a matrix: all pairs of its rows and columns."""

    rows: tuple[ContiguousRun, ...]
    columns: tuple[ContiguousRun, ...]

    @property
    def numel(self) -> int:
        """Number of entries."""
        return sum(run.length for run in self.rows) * sum(run.length for run in self.columns)

    def views(self, x: torch.Tensor, *, whole: bool) -> Iterator[torch.Tensor]:
        """Views of its blocks in the rank's tensor [local rows, local columns], or in the whole matrix, in
        one order.
        """
        for row in self.rows:
            first = row.whole if whole else row.local
            rows = x[first : first + row.length]
            for column in self.columns:
                start = column.whole if whole else column.local
                yield rows[:, start : start + column.length]

    def pack(self, x: torch.Tensor, message: torch.Tensor, *, whole: bool) -> None:
        """Copy the part from ``x`` into a message [numel] of any dtype; arguments as of ``views``."""
        for block, entries in self._paired_blocks(x, message, whole=whole):
            entries.copy_(block)

    def unpack(self, message: torch.Tensor, x: torch.Tensor, *, whole: bool) -> None:
        """Copy a message [numel] to the places of its entries in ``x``."""
        for block, entries in self._paired_blocks(x, message, whole=whole):
            block.copy_(entries)

    def paired_blocks(
        self, x: torch.Tensor, message: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Blocks of the rank's tensor, each with its entries of a message."""
        return self._paired_blocks(x, message, whole=False)

    def _paired_blocks(
        self, x: torch.Tensor, message: torch.Tensor, *, whole: bool
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        at = 0
        for block in self.views(x, whole=whole):
            yield block, message[at : at + block.numel()].view(block.shape)
            at += block.numel()


def contiguous_runs(
    held: torch.Tensor, wanted: torch.Tensor | None = None
) -> tuple[ContiguousRun, ...]:
    """The runs of the wanted indices that a rank holds, in local order.

    Args:
        held: int64 [local size]: the indices that the rank holds.
        wanted: int64 [n]: the indices of a matrix, in its order; ``None``: all.
    """
    if wanted is None:
        local, whole = torch.arange(len(held)), held
    else:
        size = int(torch.cat([held, wanted]).amax()) + 1 if len(held) or len(wanted) else 0
        place = torch.full((size,), -1)
        place[wanted] = torch.arange(len(wanted))
        local = (place[held] >= 0).nonzero()[:, 0]
        whole = place[held][local]
    if not len(local):
        return ()
    breaks = ((local.diff() != 1) | (whole.diff() != 1)).nonzero()[:, 0] + 1
    bounds = [0, *breaks.tolist(), len(local)]
    return tuple(
        ContiguousRun(int(local[first]), int(whole[first]), last - first)
        for first, last in pairwise(bounds)
    )


@dataclass(frozen=True)
class Grid:
    """Ranks by copy and part, and the position of this rank."""

    ranks: tuple[tuple[int, ...], ...]
    """Global ranks, [copies][parts]; every copy is divided in the same way."""
    copy: int
    part: int
    parts_group: dist.ProcessGroup | None
    """The ranks that hold this copy; ``None`` for a single rank."""
    copies_group: dist.ProcessGroup | None
    """The ranks that hold this part; ``None`` for a single rank."""

    @property
    def parts(self) -> int:
        """Number of parts of each copy."""
        return len(self.ranks[0])

    @property
    def copies(self) -> int:
        """Number of copies."""
        return len(self.ranks)

    @cached_property
    def flat(self) -> tuple[int, ...]:
        """Global ranks, copy by copy."""
        return tuple(rank for of_copy in self.ranks for rank in of_copy)

    @cached_property
    def part_at(self) -> tuple[int, ...]:
        """The part of each member of ``parts_group``."""
        return _places(self.parts_group, self.ranks[self.copy])

    @cached_property
    def place_of_copy(self) -> tuple[int, ...]:
        """Each copy's index in ``copies_group``."""
        own = [of_copy[self.part] for of_copy in self.ranks]
        at = _places(self.copies_group, own)
        return tuple(at.index(copy) for copy in range(self.copies))


def _places(group: dist.ProcessGroup | None, ranks: Sequence[int]) -> tuple[int, ...]:
    """The indices in ``ranks`` of the members of a group, in the group's order."""
    if group is None:
        return (0,)
    return tuple(ranks.index(rank) for rank in dist.get_process_group_ranks(group))


class Grids:
    """The grids of all matrices of an optimizer; each is made once, collectively."""

    def __init__(self) -> None:
        self._made: dict[object, Grid] = {}

    def of(self, x: torch.Tensor, name: str = "a matrix") -> Grid:
        """The grid of a matrix; one that is not a DTensor is whole on every rank of the world.

        Raises:
            ConfigError: an unknown placement, or several axes of a mesh that leaves ranks out.
        """
        with _naming(name):
            key = (x.device_mesh, _axes(x)) if isinstance(x, DTensor) else None
            if key not in self._made:
                self._made[key] = _mesh_grid(*key) if key else _world_grid()
            return self._made[key]


def is_shared(x: torch.Tensor) -> bool:
    """True if other ranks hold a copy or a part of a parameter."""
    return (x.device_mesh.size() if isinstance(x, DTensor) else World().size) > 1


def check_placements(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Check that some rank holds the values of each parameter.

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
    """The mesh axes that shard it."""
    dims = [sharded_dim(placement) for placement in x.placements]
    return tuple(at for at, d in enumerate(dims) if d is not None and x.device_mesh.size(at) > 1)


def _world_grid() -> Grid:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return Grid(((0,),), 0, 0, None, None)
    ranks = tuple((rank,) for rank in range(dist.get_world_size()))
    return Grid(ranks, dist.get_rank(), 0, None, dist.group.WORLD)


def _mesh_grid(mesh: DeviceMesh, axes: Sequence[int]) -> Grid:
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
    """This rank's group among the rows of a table of ranks. Collective over the mesh."""
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
