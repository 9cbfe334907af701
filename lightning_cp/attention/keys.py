"""K and V in a kernel's shapes: ranges laid end to end, heads expanded, gradients folded back."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch

from lightning_cp.attention.ulysses import unpair
from lightning_cp.kernels.sums import GradientSum
from lightning_cp.layout.tiles import ALL_ROWS, Ranges

KeySums = tuple[GradientSum, GradientSum]
"""Of k and v [B, keys, K/V heads, D]."""

HeadIndex = tuple[int, ...] | None
"""K/V head of each query head, where plain grouping does not say it (``HeadBlock.kv_of_q``)."""


def take(kv_TBKD: torch.Tensor, ranges: Ranges) -> torch.Tensor:
    """The keys of some ranges (at least one), laid end to end; no copy for a single range."""
    if len(ranges) == 1:
        start, end = ranges[0]
        return kv_TBKD[start:end]
    return torch.cat([kv_TBKD[start:end] for start, end in ranges])


def kernel_keys(kv_TBKD: torch.Tensor, index: HeadIndex) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [B, keys, heads, D]; expanded to query heads where those straddle groups."""
    k, v = (x.transpose(0, 1) for x in unpair(kv_TBKD))
    if index is None:
        return k, v
    # By views: an index on the device would make the host wait for it at every hop.
    return _expanded(k, index), _expanded(v, index)


def _expanded(x_BTKD: torch.Tensor, index: tuple[int, ...]) -> torch.Tensor:
    return torch.stack([x_BTKD[:, :, head] for head in index], dim=2)


def _queries_of(index: tuple[int, ...]) -> Iterator[tuple[int, slice]]:
    """Each K/V head, with the query heads that use it: they lie side by side."""
    start = 0
    for head, group in groupby(index):
        end = start + len(list(group))
        yield head, slice(start, end)
        start = end


class KeyGradients:
    """K, V and sums of their gradients in the kernel's shapes; afterwards ``dk, dv`` of the K/V heads.

    Args:
        kv_TBKD: the pair of K and V.
        index: which K/V heads are expanded.
        dtype: of the sums.
        into: the pair that the gradients have to lie in; wherever they come to lie by default.
        empty: ``into`` holds nothing yet; otherwise it is added to.
    """

    def __init__(
        self,
        kv_TBKD: torch.Tensor,
        index: HeadIndex,
        dtype: torch.dtype,
        *,
        into: torch.Tensor | None = None,
        empty: bool = True,
    ) -> None:
        kv_BTKD = kv_TBKD.transpose(0, 1)
        places = (None, None) if into is None else unpair(into.transpose(0, 1))
        dk, dv = (
            GradientSum(x, dtype, into=place, empty=empty)
            for x, place in zip(unpair(kv_BTKD), places, strict=True)
        )
        self.sums: KeySums = (dk, dv)
        self._index = index
        self._keys = kernel_keys(kv_TBKD, index)
        self._expanded = self.sums
        if index is not None:
            dk, dv = (GradientSum(x, dtype) for x in self._keys)
            self._expanded = (dk, dv)

    def __enter__(self) -> tuple[torch.Tensor, torch.Tensor, GradientSum, GradientSum]:
        return *self._keys, *self._expanded

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            return
        if self._index is not None:
            for gradient, expanded in zip(self.sums, self._expanded, strict=True):
                gradient.add(ALL_ROWS, 0, _folded(expanded.total, self._index))
        for gradient in self.sums:
            gradient.settle()


def _folded(expanded_BTHD: torch.Tensor, index: tuple[int, ...]) -> torch.Tensor:
    """Summed over the query heads of each K/V head."""
    parts = [expanded_BTHD[:, :, queries].sum(2) for _, queries in _queries_of(index)]
    return torch.stack(parts, dim=2)
