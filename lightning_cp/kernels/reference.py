"""FlashAttention-2 in plain PyTorch: the readable reference kernel, which runs on every device.

Forward: for each block of queries, pass over the keys of all its tiles block by block with an
online softmax, and divide by the sum once at the end. Backward: recompute the weights of each block
from the *merged* log-sum-exp, ``p = exp(s - lse)``, and with ``delta = rowsum(dout * out)`` take
``dv = p' dout``, ``ds = p (dout v' - delta)``, ``dq = ds k``, ``dk = ds' q``
(Dao 2023, arXiv 2307.08691, algorithms 1 and 2); a cap multiplies ``ds`` by its own derivative,
``1 - (s / softcap)^2``. No tensor made here is larger than a block.

Within a block, the G query heads of a K/V head are concatenated, so that one matmul serves them and K
and V are not repeated: q [B, K, G*i, D], k and v [B, K, j, D], scores [B, K, G*i, j].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

import torch

from lightning_cp.kernels.merge import Accumulator, GradientSums, batch_rows
from lightning_cp.kernels.protocol import QKV, Capabilities, Output, Scores, accumulate_dtype
from lightning_cp.layout.mask import UNBOUNDED, Mask
from lightning_cp.layout.tiles import Tile


@dataclass(frozen=True)
class ReferenceKernel:
    """Block attention in plain PyTorch, on any device.

    Args:
        block_q: queries per block.
        block_k: keys per block.
    """

    block_q: int = 128
    block_k: int = 256

    @property
    def name(self) -> str:
        """Name by which users select the kernel."""
        return "reference"

    @property
    def capabilities(self) -> Capabilities:
        """Every device, mask and head dim; sums in float32, or float64 for float64 inputs."""
        return Capabilities(
            device_types=None,
            dtypes=frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16}),
            masks=frozenset({"full", "causal", "band"}),
            features=frozenset({"softcap", "alibi", "max_logits"}),
        )

    def forward(
        self, inputs: QKV, tiles: Sequence[Tile], scores: Scores, state: Accumulator
    ) -> None:
        """Attend within the tiles: one online softmax, and one merge, per block of queries."""
        q_BLHD, k_BLKD, v_BLKD = inputs
        kv_heads, dtype = k_BLKD.shape[2], accumulate_dtype(q_BLHD.dtype)
        for block in _query_blocks(tiles, self.block_q):
            rows, queries = batch_rows(block.row), slice(block.start, block.end)
            q = _group(q_BLHD[rows, queries], kv_heads, dtype) * scores.softmax_scale
            softmax = _OnlineSoftmax(q, v_BLKD.shape[-1])
            slopes = _slopes(scores, block.row, kv_heads, dtype)
            for part in _key_blocks(block, scores.mask, self.block_k, q.device):
                k, v = (x[rows, part.keys].transpose(1, 2).to(dtype) for x in (k_BLKD, v_BLKD))
                softmax.add(_apply_bias_and_mask(_cap(q @ k.mT, scores.softcap), part, slopes), v)
            out, lse, peak = softmax.result()
            length = block.end - block.start
            lse_BHL, peak_BHL = (x.unflatten(2, (-1, length)).flatten(1, 2) for x in (lse, peak))
            maxima = peak_BHL if scores.max_logits else None
            state.add(block.row, block.start, _ungroup(out, length), lse_BHL, maxima)

    def backward(
        self,
        merged: Output,
        inputs: QKV,
        tiles: Sequence[Tile],
        scores: Scores,
        gradients: GradientSums,
    ) -> None:
        """Add the gradients of each block of scores, recomputed from the merged ``lse``."""
        (dout_BLHD, out_BLHD, lse_BHL), (q_BLHD, k_BLKD, v_BLKD) = merged, inputs
        dq_BLHD, dk_BLKD, dv_BLKD = gradients.totals
        kv_heads, dtype = k_BLKD.shape[2], accumulate_dtype(q_BLHD.dtype)
        for block in _query_blocks(tiles, self.block_q):
            rows, queries = batch_rows(block.row), slice(block.start, block.end)
            q, dout, out = (
                _group(x[rows, queries], kv_heads, dtype) for x in (q_BLHD, dout_BLHD, out_BLHD)
            )
            q = q * scores.softmax_scale
            delta = (dout * out).sum(-1, keepdim=True)
            lse = lse_BHL[rows, :, queries].unflatten(1, (kv_heads, -1)).flatten(2)
            # A query without keys has weights exp(s - inf) = 0, where s - -inf would be NaN.
            lse = lse.to(dtype).masked_fill(lse == -torch.inf, torch.inf).unsqueeze(-1)
            dq, slopes = torch.zeros_like(q), _slopes(scores, block.row, kv_heads, dtype)
            for part in _key_blocks(block, scores.mask, self.block_k, q.device):
                k, v = (x[rows, part.keys].transpose(1, 2).to(dtype) for x in (k_BLKD, v_BLKD))
                capped = _cap(q @ k.mT, scores.softcap)
                weights = torch.exp(_apply_bias_and_mask(capped, part, slopes) - lse)
                dscores = weights * (dout @ v.mT - delta)
                if scores.softcap:
                    dscores *= _cap_derivative(capped, scores.softcap)
                dq += dscores @ k
                dk_BLKD[rows, part.keys] += (dscores.mT @ q).transpose(1, 2)
                dv_BLKD[rows, part.keys] += (weights.mT @ dout).transpose(1, 2)
            dq_BLHD[rows, queries] += _ungroup(dq, block.end - block.start) * scores.softmax_scale


class _OnlineSoftmax:
    """Softmax-weighted sum of values whose scores arrive block by block, normalised at the end.

    (Milakov and Gimelshein 2018, arXiv 1805.02867.)
    """

    def __init__(self, q: torch.Tensor, value_dim: int) -> None:
        self._peak = q.new_full(q.shape[:-1], -torch.inf)
        self._total = q.new_zeros(q.shape[:-1])
        self._weighted = q.new_zeros(*q.shape[:-1], value_dim)

    def add(self, scores: torch.Tensor, v: torch.Tensor) -> None:
        """Add more keys: their scores [B, K, G*i, j] and values [B, K, j, D]."""
        peak = torch.maximum(self._peak, scores.amax(-1))
        # A query without keys so far has peak -inf, and -inf - -inf would be NaN.
        finite = peak.masked_fill(peak == -torch.inf, 0.0)
        weights = torch.exp(scores - finite.unsqueeze(-1))
        decay = torch.exp(self._peak - finite)
        self._total = self._total * decay + weights.sum(-1)
        self._weighted = self._weighted * decay.unsqueeze(-1) + weights @ v
        self._peak = peak

    def result(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return out [B, K, G*i, D], log-sum-exp and maximum [B, K, G*i]; 0, -inf, -inf without keys."""
        divisor = self._total.masked_fill(self._total == 0, 1.0).unsqueeze(-1)
        return self._weighted / divisor, self._peak + self._total.log(), self._peak


class _QueryBlock(NamedTuple):
    """Queries ``start .. end`` of a batch row (or of all), each within every one of ``tiles``."""

    row: int
    start: int
    end: int
    tiles: tuple[Tile, ...]


def _query_blocks(tiles: Sequence[Tile], size: int) -> Iterator[_QueryBlock]:
    """Cut the queries where a tile starts or ends, then into blocks of at most ``size``."""
    for row, group in groupby(sorted(tiles), key=lambda tile: tile.row):
        of_row = list(group)
        cuts = sorted({at for t in of_row for at in (t.q_start, t.q_start + t.q_len)})
        for start, end in pairwise(cuts):
            here = tuple(t for t in of_row if t.q_start <= start and end <= t.q_start + t.q_len)
            if not here:
                continue
            for first in range(start, end, size):
                yield _QueryBlock(row, first, min(first + size, end), here)


class _KeyBlock(NamedTuple):
    """Keys of a tile for a block of queries; ``ahead`` is key minus query position [i, j]."""

    keys: slice
    ahead: torch.Tensor
    """In global positions."""
    hidden: torch.Tensor | None
    """Mask [i, j] of hidden pairs; ``None``: all are visible."""


def _key_blocks(
    block: _QueryBlock, mask: Mask, size: int, device: torch.device
) -> Iterator[_KeyBlock]:
    """Yield blocks of keys that some query of ``block`` sees.

    In tile coordinates query i sees the keys ``i + low .. i + high``.
    """
    for tile in block.tiles:
        first, last = block.start - tile.q_start, block.end - 1 - tile.q_start
        left, right = _reach(tile, mask)
        low, high = tile.delta - left, tile.delta + right
        seen = range(max(0, first + low), min(tile.k_len, last + high + 1))
        queries = torch.arange(first, last + 1, device=device).unsqueeze(-1) + tile.delta
        for start in seen[::size]:
            end = min(start + size, seen.stop)
            keys = slice(tile.k_start + start, tile.k_start + end)
            ahead = torch.arange(start, end, device=device) - queries
            all_seen = last + low <= start and end - 1 <= first + high
            yield _KeyBlock(keys, ahead, None if all_seen else (ahead < -left) | (ahead > right))


def _reach(tile: Tile, mask: Mask) -> tuple[int, int]:
    """Return the largest visible distances (back, ahead) of the tile's queries."""
    if tile.mask == "full":
        return UNBOUNDED, UNBOUNDED
    return (UNBOUNDED, 0) if tile.mask == "causal" else (mask.left, mask.right)


def _cap(scores: torch.Tensor, softcap: float) -> torch.Tensor:
    """Return ``softcap * tanh(scores / softcap)``; the scores themselves for softcap 0."""
    return torch.tanh(scores / softcap) * softcap if softcap else scores


def _cap_derivative(capped: torch.Tensor, softcap: float) -> torch.Tensor:
    """Return the derivative of :func:`_cap` from its result: ``1 - tanh^2``."""
    return 1 - (capped / softcap).square()


def _slopes(scores: Scores, row: int, kv_heads: int, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the slopes [B or 1, K, G, 1, 1] of a batch row (or of all)."""
    if scores.alibi_slopes is None:
        return None
    slopes = scores.alibi_slopes.to(dtype)
    of_rows = slopes[batch_rows(row)] if slopes.dim() == 2 else slopes.unsqueeze(0)
    return of_rows.unflatten(1, (kv_heads, -1))[..., None, None]


def _apply_bias_and_mask(
    scores: torch.Tensor, part: _KeyBlock, slopes: torch.Tensor | None
) -> torch.Tensor:
    """Subtract slopes times distance from scores [B, K, G*i, j]; hidden pairs become -inf."""
    grouped = scores.unflatten(2, (-1, part.ahead.shape[0]))
    if slopes is not None:
        grouped = grouped - slopes * part.ahead.abs()
    if part.hidden is not None:
        grouped = grouped.masked_fill(part.hidden, -torch.inf)
    return grouped.flatten(2, 3)


def _group(x_BLHD: torch.Tensor, kv_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """[B, i, H, D] -> [B, K, G*i, D]."""
    return x_BLHD.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3).to(dtype)


def _ungroup(x: torch.Tensor, length: int) -> torch.Tensor:
    """[B, K, G*i, D] -> [B, i, H, D]."""
    return x.unflatten(2, (-1, length)).permute(0, 3, 1, 2, 4).flatten(2, 3)
