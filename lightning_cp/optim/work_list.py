"""The matrices of a step: the ranks that hold their parts, their owners and their rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from lightning_cp.comm.consensus import World, gather_objects
from lightning_cp.optim.newton_schulz import newton_schulz_flops
from lightning_cp.optim.placement import Grid, Grids, LocalBlock, contiguous_runs, held_indices

# Owners and rounds of matrices as plain integers, the same on every rank.
#
# Each matrix has one owner. The costliest matrix is assigned first, each to the rank with the least work so
# far (longest processing time first; Graham 1969), so that ranks have about equal work for any shapes. The
# bytes that an owner holds at once are bounded, since matrices are processed in rounds.


class MatrixCost(NamedTuple):
    """Cost of a matrix."""

    flops: int
    nbytes: int


def assign_owners(
    sizes: Sequence[MatrixCost], ranks: Sequence[int], loads: MutableMapping[int, int]
) -> list[int]:
    """The owner of each matrix, as an index into ``ranks``.

    Args:
        sizes: costs of the matrices.
        ranks: possible owners.
        loads: FLOPs assigned to ranks so far; updated.
    """
    owners = [0] * len(sizes)
    for at in sorted(range(len(sizes)), key=lambda at: (-sizes[at].flops, at)):
        place = min(range(len(ranks)), key=lambda place: (loads.get(ranks[place], 0), place))
        owners[at] = place
        loads[ranks[place]] = loads.get(ranks[place], 0) + sizes[at].flops
    return owners


def split_into_rounds(
    sizes: Sequence[MatrixCost], owners: Sequence[int], chunk_bytes: int
) -> list[dict[int, list[int]]]:
    """Matrices of each round, by owner: at most ``chunk_bytes`` per owner, or one matrix.

    The costliest come first, so that all owners work about equally long in each round.
    """
    found: list[dict[int, list[int]]] = []
    of_owner: dict[int, list[int]] = {}
    for at in sorted(range(len(sizes)), key=lambda at: (-sizes[at].flops, at)):
        of_owner.setdefault(owners[at], []).append(at)
    for owner, matrices in of_owner.items():
        number, held = 0, 0
        for at in matrices:
            if held and held + sizes[at].nbytes > chunk_bytes:
                number, held = number + 1, 0
            held += sizes[at].nbytes
            if number == len(found):
                found.append({})
            found[number].setdefault(owner, []).append(at)
    return found


class Piece(NamedTuple):
    """A parameter, or one of the projections in it."""

    name: str
    of: torch.Tensor
    dim: int = 0
    """The dimension in which the projection is a slice."""
    start: int = 0
    size: int | None = None
    """Rows or columns; ``None`` for the whole parameter."""

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the matrix."""
        rows, columns = self.of.shape
        if self.size is None:
            return rows, columns
        return (rows, self.size) if self.dim else (self.size, columns)

    def local_block(self) -> LocalBlock:
        """This rank's part of it."""
        runs = [
            contiguous_runs(
                held_indices(self.of, dim),
                None
                if self.size is None or dim != self.dim
                else torch.arange(self.start, self.start + self.size),
            )
            for dim in (0, 1)
        ]
        return LocalBlock(*runs)


@dataclass(frozen=True, eq=False)
class Matrix:
    """A matrix that is orthogonalised by itself."""

    piece: Piece
    parts: tuple[LocalBlock, ...]
    """The entries of each part of a grid."""
    flops: int

    @property
    def numel(self) -> int:
        """Number of entries."""
        rows, columns = self.piece.shape
        return rows * columns


@dataclass(frozen=True)
class Round:
    """Matrices that are gathered, orthogonalised and sent back together."""

    grid: Grid
    message_dtype: torch.dtype
    """The dtype of gathering: the narrower of their dtype and that of computation."""
    device: torch.device
    """The device of messages and of computation; parameters may be offloaded."""
    owned: Mapping[int, Sequence[Matrix]] = field(default_factory=dict)
    """Matrices by owner, an index into ``grid.flat``."""

    def of(self, copy: int, part: int) -> Sequence[Matrix]:
        """The matrices of one owner."""
        return self.owned.get(copy * self.grid.parts + part, ())

    def of_copy(self, copy: int) -> list[Matrix]:
        """The matrices of all owners of a copy, in order."""
        return [x for part in range(self.grid.parts) for x in self.of(copy, part)]

    @property
    def owned_here(self) -> Sequence[Matrix]:
        """The matrices that this rank owns."""
        return self.of(self.grid.copy, self.grid.part)


def plan_rounds(
    pieces: Iterable[Piece], grids: Grids, dtype: torch.dtype, steps: int, chunk_bytes: int
) -> list[Round]:
    """The rounds of a step. Collective, with the same pieces on all ranks.

    Args:
        pieces: all matrices, in one order.
        grids: the ranks that hold them.
        dtype: in which they are orthogonalised.
        steps: number of Newton-Schulz steps.
        chunk_bytes: limit of whole matrices that an owner holds in a round.
    """
    classes: dict[tuple[Grid, torch.dtype, torch.device], list[Piece]] = {}
    for piece in pieces:
        message_dtype = min(dtype, piece.of.dtype, key=lambda one: one.itemsize)
        kind = grids.of(piece.of), message_dtype, message_device(piece.of)
        classes.setdefault(kind, []).append(piece)
    loads: dict[int, int] = {}
    world = World().size
    found: list[Round] = []
    # Ranks must agree on owners, but each knows only its own grids. So matrices on all ranks come first, and
    # the loads of one small grid do not affect another.
    for (grid, message_dtype, device), some in sorted(
        classes.items(), key=lambda item: -len(item[0][0].flat)
    ):
        matrices = _matrices(some, grid, steps)
        sizes = [MatrixCost(x.flops, x.numel * dtype.itemsize) for x in matrices]
        owners = assign_owners(sizes, grid.flat, loads if len(grid.flat) == world else dict(loads))
        for each in split_into_rounds(sizes, owners, chunk_bytes):
            owned = {owner: [matrices[at] for at in places] for owner, places in each.items()}
            found.append(Round(grid, message_dtype, device, owned))
    return found


def message_device(x: torch.Tensor) -> torch.device:
    """The device of messages with a parameter."""
    if not isinstance(x, DTensor) or x.device_mesh.device_type == x.device.type:
        return x.device
    return torch.device(x.device_mesh.device_type)


def _matrices(pieces: Sequence[Piece], grid: Grid, steps: int) -> list[Matrix]:
    """Matrices with the parts of all ranks that hold this copy, which the ranks exchange."""
    own = [piece.local_block() for piece in pieces]
    every = gather_objects(own, grid.parts_group)
    by_part = [every[grid.part_at.index(part)] for part in range(grid.parts)]
    return [
        Matrix(piece, tuple(of_part[at] for of_part in by_part), _flops(piece, steps))
        for at, piece in enumerate(pieces)
    ]


def _flops(piece: Piece, steps: int) -> int:
    return newton_schulz_flops(*piece.shape, steps)
