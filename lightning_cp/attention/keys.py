"""K and V in a kernel's shapes: ranges laid end to end, heads expanded, gradients folded back."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch

from lightning_cp.attention.ulysses import unpair
from lightning_cp.kernels.sums import GradientSum
from lightning_cp.layout.tiles import Ranges

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
    """K, V and sums of their gradients in the kernel's shapes; folds expanded heads back into ``dkv``.

    Args:
        kv_TBKD: the pair of K and V.
        dkv_TBKD: the pair of their gradients.
        index: which K/V heads are expanded.
        empty: ``dkv`` is memory that holds nothing yet; all of it does afterwards.
    """

    def __init__(
        self,
        kv_TBKD: torch.Tensor,
        dkv_TBKD: torch.Tensor,
        index: HeadIndex,
        *,
        empty: bool = False,
    ) -> None:
        self._dkv = dkv_TBKD
        self._empty = empty
        self._index = index
        self._keys = kernel_keys(kv_TBKD, index)

    def __enter__(self) -> tuple[torch.Tensor, torch.Tensor, GradientSum, GradientSum]:
        k, v = self._keys
        if self._index is None:
            buffers = tuple(x.transpose(0, 1) for x in unpair(self._dkv))
            dk, dv = (GradientSum(x, empty=self._empty) for x in buffers)
        else:
            dk, dv = (
                GradientSum(torch.empty_like(x, dtype=self._dkv.dtype), empty=True) for x in (k, v)
            )
        self._sums = (dk, dv)
        return k, v, dk, dv

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            return
        dk, dv = (gradient.total for gradient in self._sums)
        if self._index is None:
            return
        if self._empty:
            self._dkv.zero_()
        for target_TBKD, expanded_BTHD in zip(unpair(self._dkv), (dk, dv), strict=True):
            for head, queries in _queries_of(self._index):
                target_TBKD[:, :, head] += expanded_BTHD[:, :, queries].sum(2).transpose(0, 1)
