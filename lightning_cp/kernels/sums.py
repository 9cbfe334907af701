"""Sums of gradients, part by part, in memory that is written once where one part covers it all."""

from __future__ import annotations

from typing import NamedTuple

import torch

from lightning_cp.kernels.merge import batch_rows


class GradientSum:
    """A gradient [B, L, H, D] that tiles add to.

    Args:
        buffer: where it is summed, in the accumulation dtype.
        empty: the buffer holds nothing yet. Then it is filled with zeros only if the first part does not
            cover it: the usual one is copied instead.
    """

    def __init__(self, buffer: torch.Tensor, *, empty: bool = False) -> None:
        self._buffer = buffer
        self._empty = empty

    @property
    def total(self) -> torch.Tensor:
        """The buffer, to be added to or read."""
        if self._empty:
            self._buffer.zero_()
            self._empty = False
        return self._buffer

    def add(self, row: int, start: int, part: torch.Tensor) -> None:
        """Add ``part`` [rows, l, H, D] to the tokens ``start ..`` of one batch row (or of ``ALL_ROWS``)."""
        if self._empty and part.shape == self._buffer.shape:
            self._buffer.copy_(part)
            self._empty = False
            return
        self.total[batch_rows(row), start : start + part.shape[1]] += part


class GradientSums(NamedTuple):
    """Of q, k and v."""

    q: GradientSum
    k: GradientSum
    v: GradientSum

    @classmethod
    def of(cls, *buffers: torch.Tensor) -> GradientSums:
        """Of buffers that hold a sum already, zeros at first."""
        q, k, v = (GradientSum(buffer) for buffer in buffers)
        return cls(q, k, v)

    @property
    def totals(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The three buffers, to be added to or read."""
        return self.q.total, self.k.total, self.v.total
