"""Sums of gradients, part by part; memory is made or filled only where no single part covers it all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from lightning_cp.kernels.merge import batch_rows


class GradientSum:
    """A gradient [B, L, H, D] that tiles add to, in the accumulation dtype.

    A part that covers everything and comes first is the sum: it is kept as it came, and widened when another
    comes; or copied, where the sum has to lie in memory that is given. Otherwise the sum begins with zeros.

    Args:
        like: a tensor of the gradient's shape and device; not kept once there is a part.
        dtype: to sum in.
        into: where the sum has to lie, of that shape and dtype.
        empty: ``into`` holds nothing yet; otherwise it is added to.
        later: makes the memory for :meth:`place`, where zeros that are needed before lie too.
    """

    def __init__(
        self,
        like: torch.Tensor,
        dtype: torch.dtype,
        *,
        into: torch.Tensor | None = None,
        empty: bool = True,
        later: Callable[[], torch.Tensor] | None = None,
    ) -> None:
        self._like = like
        self.dtype = dtype
        self._into = into
        self._later = later
        self._sum = None if empty else into

    @property
    def total(self) -> torch.Tensor:
        """The sum in its dtype, to be added to."""
        self._sum = self._like = self.result.to(self.dtype)
        return self._sum

    @property
    def result(self) -> torch.Tensor:
        """The sum, in the dtype of the only part where there was but one."""
        self.settle()
        assert self._sum is not None
        return self._sum

    def widen(self) -> None:
        """Make the wide sum now if there is a part: before memory is taken for another one."""
        if self._sum is not None:
            self._sum = self._like = self._sum.to(self.dtype)

    def settle(self) -> None:
        """Zeros where there was no part at all."""
        if self._sum is None:
            self._sum = self._like = self._memory().zero_()

    def place(self) -> None:
        """Let the sum lie in the memory that is made later: copied there, if it does not yet."""
        assert self._later is not None
        memory = self._later()
        if self._sum is None:
            memory.zero_()
        elif self._into is None:
            memory.copy_(self._sum)
        self._sum = self._like = self._into = memory

    def _memory(self) -> torch.Tensor:
        """Where the sum lies that is not kept as it came."""
        if self._into is None and self._later is not None:
            self._into = self._later()
        if self._into is None:
            return torch.empty_like(self._like, dtype=self.dtype)
        return self._into

    def add(self, row: int, start: int, part: torch.Tensor) -> None:
        """Add ``part`` [rows, l, H, D] to the tokens ``start ..`` of one batch row (or of ``ALL_ROWS``).

        The part must be the caller's to give away: it may become the sum.
        """
        if self._sum is None and part.shape == self._like.shape:
            self._sum = self._like = part if self._into is None else self._into.copy_(part)
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
