"""Base of kernels that call one fused operator per tile.

The operator reads slices of the caller's tensors in place. Each backward call gets the *merged* out and
lse of its queries, which makes its gradients the exact share of its tile
(Dao 2023, arXiv 2307.08691, algorithm 2: only ``lse`` and ``rowsum(dout * out)`` enter).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch
from typing_extensions import override

from lightning_cp.kernels.merge import Accumulator, GradientSums
from lightning_cp.kernels.protocol import QKV, Capabilities, Output, Scores
from lightning_cp.layout.mask import Mask
from lightning_cp.layout.tiles import ALL_ROWS, Tile

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Gradients of q [B, i, H, D], k [B, j, K, D] and v [B, j, K, D]."""


class PerTileKernel(ABC):
    """Kernel that calls an operator on slices of the inputs, tile by tile, and merges or adds the results."""

    name: str
    capabilities: Capabilities

    def forward(
        self, inputs: QKV, tiles: Sequence[Tile], scores: Scores, state: Accumulator
    ) -> None:
        """Attend within each tile and merge the results into ``state``."""
        inputs = QKV(*with_unit_strides(*inputs))
        for tile in self.calls(tiles, scores.mask):
            out_BLHD, lse_BHL = self.attend(_slices(tile, inputs), tile, scores)
            state.add(tile.row, tile.q_start, out_BLHD, lse_BHL)

    def backward(
        self,
        merged: Output,
        inputs: QKV,
        tiles: Sequence[Tile],
        scores: Scores,
        gradients: GradientSums,
    ) -> None:
        """Add each tile's share, which the operator computes from its slice of ``merged``.

        A query without keys has lse +inf there, which gives it the weights exp(s - inf) = 0.
        """
        dout, out, *qkv = with_unit_strides(merged.dout, merged.out, *inputs)
        inputs = QKV(*qkv)
        merged = Output(dout, out, replace_infinities(merged.lse, torch.inf))
        for tile in self.calls(tiles, scores.mask):
            queries, slices = _queries(tile, merged), _slices(tile, inputs)
            _add_gradients(tile, self.differentiate(queries, slices, tile, scores), gradients)

    def calls(self, tiles: Sequence[Tile], mask: Mask) -> Iterable[Tile]:
        """Return the tiles for the operator, without empty ones, which crash some operators."""
        return [tile for tile in tiles if tile.q_len and tile.k_len]

    @abstractmethod
    def attend(self, inputs: QKV, tile: Tile, scores: Scores) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``out`` [B, i, H, D] and ``lse`` [B, H, i], -inf for queries without keys."""

    @abstractmethod
    def differentiate(self, merged: Output, inputs: QKV, tile: Tile, scores: Scores) -> Gradients:
        """Return the tile's share of the gradients of its slices."""


class TopLeftKernel(PerTileKernel):
    """Kernel whose operator aligns the diagonal of a causal tile at the top left."""

    @override
    def calls(self, tiles: Sequence[Tile], mask: Mask) -> list[Tile]:
        """Split the tiles that are not empty: the diagonal of a causal part begins at its top left."""
        parts: list[Tile] = []
        for tile in tiles:
            if not (tile.q_len and tile.k_len):
                continue
            ahead = tile.delta if tile.mask == "causal" else 0
            if ahead:
                parts.append(tile._replace(k_len=ahead, mask="full"))
                tile = tile._replace(k_start=tile.k_start + ahead, k_len=tile.q_len, delta=0)
            parts.append(tile)
        return parts


def is_causal(tile: Tile) -> bool:
    """Return the causal flag for operators that align the diagonal at the bottom right.

    The schedule makes only such causal tiles: their last query sees exactly up to the last key.
    """
    aligned = tile.delta == tile.k_len - tile.q_len >= 0
    assert tile.mask != "causal" or aligned, f"{tile} does not end on its diagonal"
    return tile.mask == "causal"


def replace_infinities(lse_BHL: torch.Tensor, value: float) -> torch.Tensor:
    """Return a copy with ``value`` for -inf and +inf, the two marks of a query without keys."""
    return lse_BHL.nan_to_num(nan=torch.nan, posinf=value, neginf=value)


def pad_to_widest(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Pad tensors, of which K and V are the last, with zeros to the widest head dim.

    Zeros in q and k add nothing to a score; zeros in V, out and dout add zero entries, which ``trim_width``
    removes.
    """
    key_dim, value_dim = tensors[-2].shape[-1], tensors[-1].shape[-1]
    if key_dim == value_dim:
        return tensors
    widest = max(key_dim, value_dim)
    return tuple([torch.nn.functional.pad(x, (0, widest - x.shape[-1])) for x in tensors])


def trim_width(x: torch.Tensor, width: int) -> torch.Tensor:
    """Return the first ``width`` entries, without the memory of the others."""
    return x if x.shape[-1] == width else x[..., :width].contiguous()


def trim_gradients(parts: Gradients, inputs: QKV) -> Gradients:
    """Trim gradients to the head dims of the inputs."""
    if inputs.k.shape[-1] == inputs.v.shape[-1]:
        return parts
    dq, dk, dv = [trim_width(part, x.shape[-1]) for part, x in zip(parts, inputs, strict=True)]
    return dq, dk, dv


def with_unit_strides(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Make the last stride 1, which some operators assume; they support any other strides."""
    for x in tensors:
        if x.stride(-1) != 1:
            return tuple([x if x.stride(-1) == 1 else x.contiguous() for x in tensors])
    return tensors


def _add_gradients(tile: Tile, parts: Gradients, gradients: GradientSums) -> None:
    """Add the share of one tile; ownership of its parts passes to the sums."""
    starts = (tile.q_start, tile.k_start, tile.k_start)
    for gradient, start, part in zip(gradients, starts, parts, strict=True):
        gradient.add(tile.row, start, part)


def _slices(tile: Tile, tensors: QKV) -> QKV:
    """Return the tile's queries, keys and values."""
    q, k, v = tensors if tile.row == ALL_ROWS else _rows(tile, *tensors)
    keys = (1, tile.k_start, tile.k_len)
    return QKV(q.narrow(1, tile.q_start, tile.q_len), k.narrow(*keys), v.narrow(*keys))


def _queries(tile: Tile, merged: Output) -> Output:
    """Return the merged results of the tile's queries."""
    dout, out, lse = merged if tile.row == ALL_ROWS else _rows(tile, *merged)
    queries = (tile.q_start, tile.q_len)
    return Output(dout.narrow(1, *queries), out.narrow(1, *queries), lse.narrow(2, *queries))


def _rows(tile: Tile, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the tile's rows of the batch."""
    return [x.narrow(0, tile.row, 1) for x in tensors]
