"""Keys and values: in messages, and in a kernel's shapes (ranges laid end to end, heads expanded).

In a message K and V are one tensor, the *pair* [tokens, B, K/V heads, D of K + D of V]: K of head 0, V of
head 0, K of head 1, ..., each as wide as it is, so that a range of K/V heads is one slice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby

import torch

from lightning_cp.kernels.sums import GradientSum
from lightning_cp.layout.tiles import ALL_ROWS, Ranges, num_keys

HeadIndex = tuple[int, ...] | None
"""K/V head of each query head, where plain grouping does not say it (``HeadBlock.kv_of_q``)."""


def unpair(kv: torch.Tensor, key_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of K [..., key dim] and V in their pair."""
    return kv[..., :key_dim], kv[..., key_dim:]


@dataclass(frozen=True)
class Keys:
    """Keys and values of some tokens, token-first: apart, as the caller gave them, or as a pair."""

    tensors: tuple[torch.Tensor, ...]
    """``(k, v)`` [T, B, K/V heads, D], or their pair alone."""
    key_dim: int
    """D of K."""

    @property
    def k_and_v(self) -> tuple[torch.Tensor, ...]:
        """The two [T, B, K/V heads, D]."""
        is_pair = len(self.tensors) == 1
        return unpair(self.tensors[0], self.key_dim) if is_pair else self.tensors

    @property
    def value_dim(self) -> int:
        """D of V."""
        return self.pair_shape[3] - self.key_dim

    def of_heads(self, first: int, last: int) -> tuple[torch.Tensor, ...]:
        """Views of the two, of some K/V heads."""
        return tuple(x[:, :, first:last] for x in self.k_and_v)

    @property
    def pair_shape(self) -> tuple[int, int, int, int]:
        """Of the pair."""
        tokens, batch, heads, _ = self.tensors[0].shape
        return tokens, batch, heads, sum(x.shape[3] for x in self.tensors)

    def message(self, ranges: Ranges) -> torch.Tensor:
        """The pair of some ranges (at least one), laid end to end in dense memory."""
        if len(self.tensors) == 1:
            return take(self.tensors[0], ranges).contiguous()
        made = self.tensors[0].new_empty(num_keys(ranges), *self.pair_shape[1:])
        for x, into in zip(self.tensors, unpair(made, self.key_dim), strict=True):
            sizes = [end - start for start, end in ranges]
            for (start, end), part in zip(ranges, into.split(sizes), strict=True):
                part.copy_(x[start:end])
        return made


def take(kv_TBKD: torch.Tensor, ranges: Ranges) -> torch.Tensor:
    """The keys of some ranges (at least one), laid end to end; no copy for a single range."""
    if len(ranges) == 1:
        start, end = ranges[0]
        return kv_TBKD[start:end]
    return torch.cat([kv_TBKD[start:end] for start, end in ranges])


def kernel_keys(keys: Keys, index: HeadIndex) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [B, keys, heads, D]; expanded to query heads where those straddle groups."""
    k, v = (x.transpose(0, 1) for x in keys.k_and_v)
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


class _NewPair:
    """Memory of a pair, taken when it is first needed."""

    def __init__(self, keys: Keys, dtype: torch.dtype) -> None:
        self.shape, self.key_dim = keys.pair_shape, keys.key_dim
        self._how = {"dtype": dtype, "device": keys.tensors[0].device}

    @cached_property
    def pair(self) -> torch.Tensor:
        return torch.empty(self.shape, **self._how)

    def half(self, at: int) -> torch.Tensor:
        """Where the gradient of K or V lies in it, [B, keys, K/V heads, D]."""
        return unpair(self.pair.transpose(0, 1), self.key_dim)[at]

    def nothing(self) -> torch.Tensor:
        """Of no keys."""
        return torch.empty((0, *self.shape[1:]), **self._how)


class KeySums:
    """Sums of the gradients of K and V [B, keys, K/V heads, D].

    Args:
        keys: K and V; not kept once there are gradients.
        dtype: of the sums.
        into: a pair that holds sums already, to be added to; wherever they come to lie by default.
        leave: they will become a message.
    """

    def __init__(
        self,
        keys: Keys,
        dtype: torch.dtype,
        *,
        into: torch.Tensor | None = None,
        leave: bool = False,
    ) -> None:
        self._new = new = _NewPair(keys, dtype)
        laters = [partial(new.half, at) for at in range(2)] if leave else [None, None]
        places = (None, None) if into is None else unpair(into.transpose(0, 1), keys.key_dim)
        k, v = (
            GradientSum(x.transpose(0, 1), dtype, into=place, empty=False, later=later)
            for x, place, later in zip(keys.k_and_v, places, laters, strict=True)
        )
        self.both = (k, v)

    @property
    def shape_of_key(self) -> tuple[int, ...]:
        """[B, K/V heads, D] of the pair."""
        return self._new.shape[1:]

    def add(self, start: int, pair: torch.Tensor) -> None:
        """Add the gradients of the tokens ``start ..``, a pair."""
        parts = unpair(pair.transpose(0, 1), self._new.key_dim)
        for gradient, part in zip(self.both, parts, strict=True):
            gradient.add(ALL_ROWS, start, part)

    def message(self) -> torch.Tensor:
        """The pair of both sums in dense memory, which is taken no earlier than it is needed."""
        for gradient in self.both:
            gradient.place()
        return self._new.pair

    def nothing(self) -> torch.Tensor:
        """The pair of no keys."""
        return self._new.nothing()


class KeyGradients:
    """K, V and sums of their gradients in the kernel's shapes; afterwards ``dk, dv`` of the K/V heads.

    Args:
        keys: K and V.
        index: which K/V heads are expanded.
        dtype: of the sums.
        into: a pair that holds sums already, to be added to; wherever they come to lie by default.
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
        self.sums = KeySums(keys, dtype, into=into, leave=leave)
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
                gradient.add(ALL_ROWS, 0, _folded(expanded.total, self._index))


def _folded(expanded_BTHD: torch.Tensor, index: tuple[int, ...]) -> torch.Tensor:
    """Summed over the query heads of each K/V head."""
    parts = [expanded_BTHD[:, :, queries].sum(2) for _, queries in _queries_of(index)]
    return torch.stack(parts, dim=2)
