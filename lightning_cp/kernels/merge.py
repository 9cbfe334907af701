"""Merging partial attention results: ``(out, lse)`` over disjoint sets of keys.

With ``lse = logaddexp(lse_a, lse_b)`` the merged output is
``out_a exp(lse_a - lse) + out_b exp(lse_b - lse)`` (Dao 2023, arXiv 2307.08691, section 3.1;
Milakov and Gimelshein 2018, arXiv 1805.02867). A side that saw no key has ``lse = -inf`` and is the
identity.
"""

from __future__ import annotations

import torch

from lightning_cp.layout.tiles import ALL_ROWS


def merge(
    out_BLHD: torch.Tensor,
    lse_BHL: torch.Tensor,
    new_out_BLHD: torch.Tensor,
    new_lse_BHL: torch.Tensor,
) -> None:
    """Merge ``new`` into ``out, lse`` in place; both sides may be -inf.

    ``new_out`` may have a lower precision than ``out``; it is widened as it is read.
    """
    torch.logaddexp(lse_BHL, new_lse_BHL, out=lse_BHL)
    # Where both sides are -inf, -inf - -inf would be NaN: those rows get weight 0 and keep out 0.
    merged = lse_BHL.clamp(min=torch.finfo(lse_BHL.dtype).min)
    weight = torch.exp(new_lse_BHL - merged)
    out_BLHD.lerp_(new_out_BLHD.to(out_BLHD.dtype), weight.transpose(1, 2).unsqueeze(-1))


def batch_rows(row: int) -> slice:
    """The batch rows that a ``Tile.row`` stands for."""
    return slice(None) if row == ALL_ROWS else slice(row, row + 1)


class Accumulator:
    """Running ``(out, lse)`` of one rank's queries over the tiles seen so far.

    The first result that covers every query becomes the accumulator itself, so that a single call
    per rank (Ulysses, or one hop) costs no merge.
    """

    def __init__(self, q_BLHD: torch.Tensor, dtype: torch.dtype) -> None:
        self._q = q_BLHD
        self._dtype = dtype
        self._out: torch.Tensor | None = None
        self._lse: torch.Tensor | None = None

    def add(self, row: int, q_start: int, out_BLHD: torch.Tensor, lse_BHL: torch.Tensor) -> None:
        """Merge the result of queries ``q_start ..`` of one batch row (or of ``ALL_ROWS``)."""
        if self._out is None and out_BLHD.shape == self._q.shape:
            self._out, self._lse = out_BLHD.to(self._dtype), lse_BHL.to(self._dtype)
            return
        out, lse = self._buffers()
        rows = batch_rows(row)
        queries = slice(q_start, q_start + out_BLHD.shape[1])
        merge(out[rows, queries], lse[rows, :, queries], out_BLHD, lse_BHL)

    def result(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """``out`` [B, L, H, D] in ``dtype`` and ``lse`` [B, H, L] in the accumulation dtype."""
        out, lse = self._buffers()
        return out.to(dtype), lse

    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._out is None or self._lse is None:
            batch, queries, heads, _ = self._q.shape
            out = torch.zeros_like(self._q, dtype=self._dtype)
            self._out, self._lse = out, out.new_full((batch, heads, queries), -torch.inf)
        return self._out, self._lse
