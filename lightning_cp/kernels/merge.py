"""Merging partial attention results: ``(out, lse)`` over disjoint sets of keys.

With ``lse = logaddexp(lse_a, lse_b)`` the merged output is
``out_a exp(lse_a - lse) + out_b exp(lse_b - lse)`` (Dao 2023, arXiv 2307.08691, section 3.1;
Milakov and Gimelshein 2018, arXiv 1805.02867). A side that saw no key has ``lse = -inf`` and is the
identity.
"""

from __future__ import annotations

import torch

from lightning_cp.layout.tiles import ALL_ROWS
from lightning_cp.named_ranges import named


def merge(
    out_BLHD: torch.Tensor,
    lse_BHL: torch.Tensor,
    new_out_BLHD: torch.Tensor,
    new_lse_BHL: torch.Tensor,
) -> None:
    """Merge ``new`` into ``out, lse`` in place; both sides may be -inf.

    ``new_out`` may have a lower precision than ``out``; on CUDA it is widened entry by entry.
    """
    torch.logaddexp(lse_BHL, new_lse_BHL, out=lse_BHL)
    # Where both sides are -inf, -inf - -inf would be NaN: those rows get weight 0 and keep out 0.
    merged = lse_BHL.clamp(min=torch.finfo(lse_BHL.dtype).min)
    weight = torch.exp(new_lse_BHL - merged).transpose(1, 2).unsqueeze(-1)
    if new_out_BLHD.dtype == out_BLHD.dtype:
        out_BLHD.lerp_(new_out_BLHD, weight)
    else:  # lerp takes one dtype only, and on CUDA a wide copy of ``new`` would be as large as ``out``
        out_BLHD.mul_(1 - weight).addcmul_(new_out_BLHD, weight)


def batch_rows(row: int) -> slice:
    """The batch rows that a ``Tile.row`` stands for."""
    return slice(None) if row == ALL_ROWS else slice(row, row + 1)


class Accumulator:
    """Running ``(out, lse)`` of one rank's queries over the tiles seen so far.

    The first result that covers every query becomes the accumulator itself, and keeps its dtype until there
    is another: a single call per rank (Ulysses, or one hop) costs neither a merge nor a wide copy.

    Args:
        q_BLHD: the queries.
        dtype: to merge in.
        value_dim: entries per head of the values, and so of ``out``; as many as a query's by default.
    """

    def __init__(
        self, q_BLHD: torch.Tensor, dtype: torch.dtype, value_dim: int | None = None
    ) -> None:
        self._q = q_BLHD
        self._shape = (*q_BLHD.shape[:3], q_BLHD.shape[3] if value_dim is None else value_dim)
        self.dtype = dtype
        self._out: torch.Tensor | None = None
        self._lse: torch.Tensor | None = None
        self._max: torch.Tensor | None = None

    def add(
        self,
        row: int,
        q_start: int,
        out_BLHD: torch.Tensor,
        lse_BHL: torch.Tensor,
        max_BHL: torch.Tensor | None = None,
    ) -> None:
        """Merge the result of queries ``q_start ..`` of one batch row (or of ``ALL_ROWS``).

        Args:
            row: the batch row.
            q_start: the first query.
            out_BLHD: partial output.
            lse_BHL: its log-sum-exp, -inf where a query saw no key.
            max_BHL: the largest score of each query, -inf without keys; if ``Scores.max_logits``.
        """
        rows, queries = batch_rows(row), slice(q_start, q_start + out_BLHD.shape[1])
        if max_BHL is not None:
            peak = self.max_logits[rows, :, queries]
            torch.maximum(peak, max_BHL.to(peak.dtype), out=peak)
        if self._out is None and out_BLHD.shape == self._shape:
            self._out, self._lse = out_BLHD, lse_BHL.to(self.dtype)
            return
        out, lse = self._buffers()
        with named("merge"):
            merge(out[rows, queries], lse[rows, :, queries], out_BLHD, lse_BHL)

    def add_at(
        self,
        rows: torch.Tensor,
        positions: torch.Tensor,
        out_THD: torch.Tensor,
        lse_HT: torch.Tensor,
    ) -> None:
        """Merge the results of scattered queries: int64 [T] rows and positions, no query twice."""
        out, lse = self._buffers()
        with named("merge"):
            own_out, own_lse = out[rows, positions], lse[rows, :, positions].T
            new_out, new_lse = out_THD.unsqueeze(0), lse_HT.unsqueeze(0)
            merge(own_out.unsqueeze(0), own_lse.unsqueeze(0), new_out, new_lse)
            out[rows, positions], lse[rows, :, positions] = own_out, own_lse.T

    def widen(self) -> None:
        """Make the wide sum now if there is a first result: before memory is taken for another one."""
        if self._out is not None:
            self._buffers()

    def result(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """``out`` [B, L, H, D] in ``dtype`` and ``lse`` [B, H, L] in the accumulation dtype."""
        if self._out is None or self._lse is None:
            self._buffers()
        assert self._out is not None
        assert self._lse is not None
        return self._out.to(dtype), self._lse

    @property
    def max_logits(self) -> torch.Tensor:
        """The largest score of each query, float32 [B, H, L]; -inf where none was given."""
        if self._max is None:
            batch, queries, heads, _ = self._shape
            shape = (batch, heads, queries)
            self._max = self._q.new_full(shape, -torch.inf, dtype=torch.float32)
        return self._max

    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._out is None or self._lse is None:
            batch, queries, heads, _ = self._shape
            out = self._zeros()
            self._out, self._lse = out, out.new_full((batch, heads, queries), -torch.inf)
        self._out = self._out.to(self.dtype)
        return self._out, self._lse

    def _zeros(self) -> torch.Tensor:
        """``out`` of no keys; its tokens and batch rows lie in memory in the order of the queries'."""
        order = sorted(range(3), key=lambda dim: -self._q.stride(dim))
        how = {"dtype": self.dtype, "device": self._q.device}
        return torch.empty_permuted(self._shape, (*order, 3), **how).zero_()
