"""Keys and values, and sums of their gradients: as messages, and in a kernel's shapes.

In a message K and V are one tensor, the *pair* [tokens, B, K/V heads, D of K + D of V]: K of head 0, V of
head 0, K of head 1, ..., each in its own width, so that a range of K/V heads is one slice. For a kernel,
ranges of keys are concatenated and heads expanded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby

import torch

from lightning_cp.kernels.merge import GradientSum
from lightning_cp.layout.tiles import ALL_ROWS, Ranges

HeadIndex = tuple[int, ...] | None
"""K/V head of each query head, or ``None`` for plain grouping (``HeadBlock.kv_of_q``)."""


def split_pair(kv: torch.Tensor, key_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of K [..., key dim] and V in their pair."""
    return kv[..., :key_dim], kv[..., key_dim:]


@dataclass(frozen=True)
class Keys:
    """Keys and values of some tokens, token-first: two tensors, as the caller gave them, or a pair."""

    tensors: tuple[torch.Tensor, ...]
    """``(k, v)`` [T, B, K/V heads, D], or a tuple of their pair."""
    key_dim: int
    """D of K."""

    @cached_property
    def k_and_v(self) -> tuple[torch.Tensor, ...]:
        """K and V [T, B, K/V heads, D]."""
        is_pair = len(self.tensors) == 1
        return split_pair(self.tensors[0], self.key_dim) if is_pair else self.tensors

    @property
    def value_dim(self) -> int:
        """D of V."""
        return self.pair_shape[3] - self.key_dim

    def of_heads(self, first: int, last: int) -> tuple[torch.Tensor, ...]:
        """Return views of some heads of K and V."""
        return tuple(x[:, :, first:last] for x in self.k_and_v)

    @cached_property
    def pair_shape(self) -> tuple[int, int, int, int]:
        """Shape of the pair."""
        tokens, batch, heads, features = self.tensors[0].shape
        for value in self.tensors[1:]:
            features += value.shape[3]
        return tokens, batch, heads, features

    def message(self, ranges: Ranges) -> torch.Tensor:
        """Return the pair of some ranges (at least one), concatenated in contiguous memory."""
        if len(self.tensors) == 1:
            return take_ranges(self.tensors[0], ranges).contiguous()
        sizes = [end - start for start, end in ranges]
        made = self.tensors[0].new_empty(sum(sizes), *self.pair_shape[1:])
        for x, into in zip(self.tensors, split_pair(made, self.key_dim), strict=True):
            for (start, end), part in zip(ranges, into.split_with_sizes(sizes), strict=True):
                part.copy_(x[start:end])
        return made


def take_ranges(kv_TBKD: torch.Tensor, ranges: Ranges) -> torch.Tensor:
    """Concatenate the keys of some ranges (at least one); no copy for a single range."""
    if len(ranges) == 1:
        start, end = ranges[0]
        return kv_TBKD[start:end]
    return torch.cat([kv_TBKD[start:end] for start, end in ranges])


def kernel_keys(keys: Keys, index: HeadIndex) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V [B, keys, heads, D]; expanded to query heads where those straddle groups."""
    k, v = keys.k_and_v
    k, v = k.transpose(0, 1), v.transpose(0, 1)
    if index is None:
        return k, v
    # With views: an index on the device would make the host wait at every hop.
    return _expand(k, index), _expand(v, index)


def _expand(x_BTKD: torch.Tensor, index: tuple[int, ...]) -> torch.Tensor:
    return torch.stack([x_BTKD[:, :, head] for head in index], dim=2)


def _queries_of(index: tuple[int, ...]) -> Iterator[tuple[int, slice]]:
    """Yield each K/V head with the slice of query heads that use it."""
    start = 0
    for head, group in groupby(index):
        end = start + len(list(group))
        yield head, slice(start, end)
        start = end


class _LazyPair:
    """A pair that is allocated at its first use."""

    def __init__(self, keys: Keys, dtype: torch.dtype) -> None:
        self.shape, self.key_dim = keys.pair_shape, keys.key_dim
        self.dtype, self.device = dtype, keys.tensors[0].device

    @cached_property
    def pair(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def half(self, at: int) -> torch.Tensor:
        """Return the view [B, keys, K/V heads, D] for the gradient of K (0) or V (1)."""
        return split_pair(self.pair.transpose(0, 1), self.key_dim)[at]


class KeyGradientSums:
    """Sums of the gradients of K and V [B, keys, K/V heads, D].

    Args:
        keys: K and V; released once there are gradients.
        dtype: of the sums.
        into: a pair of earlier sums to add to; by default memory is allocated on demand.
        leave: the sums will become a message.
    """

    def __init__(
        self,
        keys: Keys,
        dtype: torch.dtype,
        *,
        into: torch.Tensor | None = None,
        leave: bool = False,
    ) -> None:
        self._new = new = _LazyPair(keys, dtype)
        later_k, later_v = (partial(new.half, 0), partial(new.half, 1)) if leave else (None, None)
        of_k, of_v = (
            (None, None) if into is None else split_pair(into.transpose(0, 1), keys.key_dim)
        )
        k, v = keys.k_and_v
        self.both = (
            GradientSum(k.transpose(0, 1), dtype, into=of_k, empty=False, later=later_k),
            GradientSum(v.transpose(0, 1), dtype, into=of_v, empty=False, later=later_v),
        )

    @property
    def shape_of_key(self) -> tuple[int, ...]:
        """Shape of one key of the pair: [B, K/V heads, D]."""
        return self._new.shape[1:]

    def add(self, start: int, pair: torch.Tensor) -> None:
        """Add a pair of gradients of the tokens ``start ..``."""
        parts = split_pair(pair.transpose(0, 1), self._new.key_dim)
        for gradient, part in zip(self.both, parts, strict=True):
            gradient.add(ALL_ROWS, start, part)

    def message(self) -> torch.Tensor:
        """Return the pair of both sums in contiguous memory, which is allocated only now."""
        for gradient in self.both:
            gradient.place()
        return self._new.pair

    def empty(self) -> torch.Tensor:
        """Return the pair of no keys."""
        return torch.empty(
            (0, *self._new.shape[1:]), dtype=self._new.dtype, device=self._new.device
        )


class KeyGradients:
    """Context with K, V and sums of their gradients in the kernel's shapes; folds these to K/V heads at exit.

    Args:
        keys: K and V.
        index: K/V head of each query head, if heads are expanded.
        dtype: of the sums.
        into: a pair of earlier sums to add to; by default memory is allocated on demand.
        leave: the sums will become a message.
    """

    def __init__(
        self,
        keys: Keys,
        index: HeadIndex,
        dtype: torch.dtype,
        *,
        into: torch.Tensor | None = None,
        leave: bool = False,
    ) -> None:
        self.sums = KeyGradientSums(keys, dtype, into=into, leave=leave)
        self._index = index
        self._keys = kernel_keys(keys, index)
        self._expanded = self.sums.both
        if index is not None:
            dk, dv = (GradientSum(x, dtype) for x in self._keys)
            self._expanded = (dk, dv)

    def __enter__(self) -> tuple[torch.Tensor, torch.Tensor, GradientSum, GradientSum]:
        return *self._keys, *self._expanded

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            return
        if self._index is not None:
            for gradient, expanded in zip(self.sums.both, self._expanded, strict=True):
                gradient.add(ALL_ROWS, 0, _sum_query_heads(expanded.total, self._index))


def _sum_query_heads(expanded_BTHD: torch.Tensor, index: tuple[int, ...]) -> torch.Tensor:
    """Sum over the query heads of each K/V head."""
    parts = [expanded_BTHD[:, :, queries].sum(2) for _, queries in _queries_of(index)]
    return torch.stack(parts, dim=2)
