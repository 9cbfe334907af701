"""Kernels that call one fused operator per tile: what they share.

The operator reads slices of the caller's tensors where they lie. Each backward call is given the
*merged* out and lse of its queries, which makes its gradients the exact share of its tile
(Dao 2023, arXiv 2307.08691, algorithm 2: only ``lse`` and ``rowsum(dout * out)`` enter).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch

from lightning_cp.kernels.merge import Accumulator
from lightning_cp.kernels.protocol import QKV, Capabilities, Merged, Scores
from lightning_cp.kernels.sums import GradientSums
from lightning_cp.layout.tiles import ALL_ROWS, Mask, Tile

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Of q [B, i, H, D], k [B, j, K, D] and v [B, j, K, D]."""


class CallPerTile(ABC):
    """Give slices of the inputs to an operator, tile by tile; merge or add what it returns."""

    name: str
    capabilities: Capabilities

    def forward(
        self, inputs: QKV, tiles: Sequence[Tile], scores: Scores, state: Accumulator
    ) -> None:
        """Attend within each tile and merge the results into ``state``."""
        inputs = QKV(*unit_strides(*inputs))
        for tile in self.calls(tiles, scores.mask):
            out_BLHD, lse_BHL = self.attend(_slices(tile, inputs), tile, scores)
            state.add(tile.row, tile.q_start, out_BLHD, lse_BHL)

    def backward(
        self,
        merged: Merged,
        inputs: QKV,
        tiles: Sequence[Tile],
        scores: Scores,
        gradients: GradientSums,
    ) -> None:
        """Add each tile's share, which the operator computes from its slice of ``merged``.

        A query without a key has lse +inf there: the operators then weigh it by exp(s - inf) = 0.
        """
        inputs = QKV(*unit_strides(*inputs))
        dout, out = unit_strides(merged.dout, merged.out)
        merged = Merged(dout, out, replace_infinities(merged.lse, torch.inf))
        for tile in self.calls(tiles, scores.mask):
            queries, slices = _queries(tile, merged), _slices(tile, inputs)
            _add(tile, self.differentiate(queries, slices, tile, scores), gradients)

    def calls(self, tiles: Sequence[Tile], mask: Mask) -> Iterable[Tile]:
        """The tiles to call the operator with; never an empty one, which crashes some of them."""
        return (tile for tile in tiles if tile.q_len and tile.k_len)

    @abstractmethod
    def attend(self, inputs: QKV, tile: Tile, scores: Scores) -> tuple[torch.Tensor, torch.Tensor]:
        """``out`` [B, i, H, D] and ``lse`` [B, H, i], which is -inf where a query has no key."""

    @abstractmethod
    def differentiate(self, merged: Merged, inputs: QKV, tile: Tile, scores: Scores) -> Gradients:
        """The share of this tile in the gradients of its slices."""


def is_causal(tile: Tile) -> bool:
    """The operator's flag, of operators that align the diagonal at the bottom right.

    The schedule makes no other causal tiles: the last query of one sees its last key, and no tile that
    reaches farther is causal.
    """
    aligned = tile.delta == tile.k_len - tile.q_len >= 0
    assert tile.mask != "causal" or aligned, f"{tile} does not end on its diagonal"
    return tile.mask == "causal"


def square_causal(tile: Tile) -> Iterable[Tile]:
    """The tile, in parts whose diagonal is at the top left too: a full one, and a square causal one."""
    if tile.mask != "causal" or not tile.delta:
        return (tile,)
    ahead = tile.delta
    full = tile._replace(k_len=ahead, mask="full")
    return (full, tile._replace(k_start=tile.k_start + ahead, k_len=tile.q_len, delta=0))


def replace_infinities(lse_BHL: torch.Tensor, value: float) -> torch.Tensor:
    """A copy with ``value`` for -inf and +inf, the two ways to say that a query has no key."""
    return lse_BHL.nan_to_num(nan=torch.nan, posinf=value, neginf=value)


def one_width(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors with zeros after the entries of those that are not the widest.

    Zeros in q and k add nothing to a score; zeros in V, out and dout add entries that are 0, which ``cut``
    takes away.
    """
    width = max(x.shape[-1] for x in tensors)
    return tuple(
        x if x.shape[-1] == width else torch.nn.functional.pad(x, (0, width - x.shape[-1]))
        for x in tensors
    )


def cut(x: torch.Tensor, width: int) -> torch.Tensor:
    """The first entries, without the memory of the others."""
    return x if x.shape[-1] == width else x[..., :width].contiguous()


def cut_gradients(parts: Gradients, inputs: QKV) -> Gradients:
    """Gradients as wide as what they are of."""
    dq, dk, dv = (cut(part, x.shape[-1]) for part, x in zip(parts, inputs, strict=True))
    return dq, dk, dv


def unit_strides(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Operators take any strides but the last one, which some read as 1 whatever it is."""
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)


def _add(tile: Tile, parts: Gradients, gradients: GradientSums) -> None:
    """Add the share of one tile, of which no part is referred to once this returns."""
    starts = (tile.q_start, tile.k_start, tile.k_start)
    for gradient, start, part in zip(gradients, starts, parts, strict=True):
        gradient.add(tile.row, start, part)


def _slices(tile: Tile, tensors: QKV) -> QKV:
    """The tile's queries, keys and values."""
    return QKV(
        _tokens(tensors.q, tile.row, 1, tile.q_start, tile.q_len),
        _tokens(tensors.k, tile.row, 1, tile.k_start, tile.k_len),
        _tokens(tensors.v, tile.row, 1, tile.k_start, tile.k_len),
    )


def _queries(tile: Tile, merged: Merged) -> Merged:
    """What is known of the tile's queries."""
    return Merged(
        _tokens(merged.dout, tile.row, 1, tile.q_start, tile.q_len),
        _tokens(merged.out, tile.row, 1, tile.q_start, tile.q_len),
        _tokens(merged.lse, tile.row, 2, tile.q_start, tile.q_len),
    )


def _tokens(x: torch.Tensor, row: int, dim: int, start: int, length: int) -> torch.Tensor:
    rows = x if row == ALL_ROWS else x.narrow(0, row, 1)
    return rows.narrow(dim, start, length)
