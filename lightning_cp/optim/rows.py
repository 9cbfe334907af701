"""Which entries of a parameter a rank holds: of any sharding, and without communication.

When two axes shard one dimension, a rank's rows need not lie side by side (``_StridedShard``), and how
PyTorch says so has changed with its versions. What it does has not: so positions are sharded as the parameter
is, and read.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor

from lightning_cp.errors import ConfigError

SHARDS = ("Shard", "_StridedShard")
"""Placements that give each rank whole rows or columns, by the names of their classes: since PyTorch 2.10 the
second is none of the first."""


def sharded_dim(placement: Placement) -> int | None:
    """The dimension that a placement shards; ``None`` for a copy on every rank.

    Raises:
        ConfigError: it is neither, so that nobody holds the values.
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
        dim: which of its dimensions.

    Raises:
        ConfigError: a placement that is unknown.
    """
    indices = torch.arange(x.shape[dim])
    if not isinstance(x, DTensor):
        return indices
    dims = [sharded_dim(placement) for placement in x.placements]
    placements = [
        _along_first(placement) if sharded == dim % x.ndim else Replicate()
        for placement, sharded in zip(x.placements, dims, strict=True)
    ]
    held = distribute_tensor(indices, x.device_mesh, placements, src_data_rank=None)
    return held.to_local().cpu()


def _along_first(placement: Placement) -> Placement:
    """What shards a tensor of one dimension in the same way."""
    kind: Any = type(placement)
    factor = getattr(placement, "split_factor", None)
    return kind(0) if factor is None else kind(0, split_factor=factor)


class Run(NamedTuple):
    """Entries side by side both on the rank and in the matrix."""

    local: int
    """Where they begin on the rank."""
    whole: int
    """Where they begin in the matrix."""
    length: int


class Part(NamedTuple):
    """What a rank holds of a matrix: every pair of a row and a column."""

    rows: tuple[Run, ...]
    columns: tuple[Run, ...]

    @property
    def numel(self) -> int:
        """Entries."""
        return sum(run.length for run in self.rows) * sum(run.length for run in self.columns)

    def views(self, x: torch.Tensor, *, whole: bool) -> Iterator[torch.Tensor]:
        """Its blocks in what the rank holds [local rows, local columns], or in the matrix, in one order."""
        for row in self.rows:
            first = row.whole if whole else row.local
            rows = x[first : first + row.length]
            for column in self.columns:
                start = column.whole if whole else column.local
                yield rows[:, start : start + column.length]

    def pack(self, x: torch.Tensor, message: torch.Tensor, *, whole: bool) -> None:
        """Copy the part into a message [numel] of any dtype, from what ``views`` are of."""
        for block, entries in self._beside(x, message, whole=whole):
            entries.copy_(block)

    def unpack(self, message: torch.Tensor, x: torch.Tensor, *, whole: bool) -> None:
        """Copy a message [numel] to where its entries belong."""
        for block, entries in self._beside(x, message, whole=whole):
            block.copy_(entries)

    def beside(
        self, x: torch.Tensor, message: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Blocks of what the rank holds, each with its entries of a message."""
        return self._beside(x, message, whole=False)

    def _beside(
        self, x: torch.Tensor, message: torch.Tensor, *, whole: bool
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        at = 0
        for block in self.views(x, whole=whole):
            yield block, message[at : at + block.numel()].view(block.shape)
            at += block.numel()


def runs_of(held: torch.Tensor, wanted: torch.Tensor | None = None) -> tuple[Run, ...]:
    """What a rank has of some indices, in local order.

    Args:
        held: int64 [local size]: the indices that the rank holds.
        wanted: int64 [n]: those that make up a matrix, in its order; ``None``: all.
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
        Run(int(local[first]), int(whole[first]), last - first) for first, last in pairwise(bounds)
    )
