"""Sums of gradients, part by part; memory is made or filled only where no single part covers it all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from lightning_cp.kernels.merge import batch_rows


class GradientSum:
    """A gradient [B, L, H, D] that tiles add to, in the accumulation dtype.

    A part that covers everything and comes first is the sum: it is kept as it came, and widened when another
    comes; or copied, where the sum has to lie in memory that is given. Otherwise the sum begins with zeros.

    Args:
        like: a tensor of the gradient's shape and device.
        dtype: to sum in.
        into: where the sum has to lie, of that shape and dtype.
        empty: ``into`` holds nothing yet; otherwise it is added to.
    """

    def __init__(
        self,
        like: torch.Tensor,
        dtype: torch.dtype,
        *,
        into: torch.Tensor | None = None,
        empty: bool = True,
    ) -> None:
        self._like = like
        self.dtype = dtype
        self._into = into
        self._sum = None if empty else into

    @property
    def total(self) -> torch.Tensor:
        """The sum in its dtype, to be added to."""
        self._sum = self.result.to(self.dtype)
        return self._sum

    @property
    def result(self) -> torch.Tensor:
        """The sum, in the dtype of the only part where there was but one."""
        self.settle()
        assert self._sum is not None
        return self._sum

    def settle(self) -> None:
        """Zeros where there was no part at all."""
        if self._sum is None:
            into = self._into
            made = torch.empty_like(self._like, dtype=self.dtype) if into is None else into
            self._sum = made.zero_()

    def add(self, row: int, start: int, part: torch.Tensor) -> None:
        """Add ``part`` [rows, l, H, D] to the tokens ``start ..`` of one batch row (or of ``ALL_ROWS``).

        The part must be the caller's to give away: it may become the sum.
        """
        if self._sum is None and part.shape == self._like.shape:
            self._sum = part if self._into is None else self._into.copy_(part)
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
        q, k, v = (GradientSum(x, x.dtype, into=x, empty=False) for x in buffers)
        return cls(q, k, v)

    @classmethod
    def like(cls, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> GradientSums:
        """Of q, k and v, wherever they come to lie."""
        q, k, v = (GradientSum(x, dtype) for x in tensors)
        return cls(q, k, v)

    @property
    def totals(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The three sums, to be added to."""
        return self.q.total, self.k.total, self.v.total
