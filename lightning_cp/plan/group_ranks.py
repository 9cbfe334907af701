"""Which ranks the groups of one rank hold, and which they should: counted here, without any mesh."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch.distributed as dist

from lightning_cp.axes import FLATTENED, Axis, Flat
from lightning_cp.mesh import ContextParallelMesh

CONTROL: dict[Flat, tuple[Axis, ...]] = {
    Flat.CP: (*FLATTENED[Flat.CP], Axis.TP),
    Flat.LOSS: tuple(Axis),
}
"""The axes that control groups span: tensor-parallel ranks go along."""


@dataclass(frozen=True)
class GroupRanks:
    """One group of one rank."""

    name: str
    expected: tuple[int, ...]
    found: tuple[int, ...]

    @property
    def agrees(self) -> bool:
        """True if it holds the ranks that it should, in that order."""
        return self.expected == self.found


def group_ranks(
    mesh: ContextParallelMesh, sizes: Mapping[Axis, int], rank: int
) -> tuple[GroupRanks, ...]:
    """Every group of a rank's mesh, with the ranks that it should hold.

    Args:
        mesh: as that rank has made it.
        sizes: of the axes; 1 where one is left out.
        rank: whose groups they are.
    """
    groups = {str(axis): (mesh.group(axis), (axis,)) for axis in Axis}
    groups |= {str(flat): (mesh.group(flat), axes) for flat, axes in FLATTENED.items()}
    groups |= {f"control {flat}": (mesh.control_group(flat), CONTROL[flat]) for flat in CONTROL}
    return tuple(
        GroupRanks(
            name, ranks_beside(sizes, rank, axes), tuple(dist.get_process_group_ranks(group))
        )
        for name, (group, axes) in groups.items()
    )


def ranks_beside(sizes: Mapping[Axis, int], rank: int, axes: Iterable[Axis]) -> tuple[int, ...]:
    """The ranks that are placed as ``rank`` is, but for ``axes``; in order, ``rank`` among them."""
    elsewhere = [axis for axis in Axis if axis not in tuple(axes)]
    own, ranks = place(sizes, rank), math.prod(sizes.values())
    every = ((other, place(sizes, other)) for other in range(ranks))
    return tuple(r for r, there in every if all(there[axis] == own[axis] for axis in elsewhere))


def place(sizes: Mapping[Axis, int], rank: int) -> dict[Axis, int]:
    """Where a rank is on each axis: ranks count through the innermost axis first."""
    found: dict[Axis, int] = {}
    for axis in reversed(Axis):
        rank, found[axis] = divmod(rank, sizes.get(axis, 1))
    return found
