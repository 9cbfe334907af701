"""The mask within a document (causality and window), and the count of its visible pairs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from operator import index
from typing import SupportsIndex, cast

import numpy as np

from lightning_cp.errors import ConfigError
from lightning_cp.layout.documents import Documents, Ints

UNBOUNDED = 1 << 60
"""A distance larger than any sequence; sums of two do not overflow int64."""


def _integer(value: object) -> object:
    """Convert integers of NumPy and others to int; return anything else unchanged."""
    try:
        return index(value) if isinstance(value, SupportsIndex) else value
    except TypeError:  # a tensor of floats has the method too
        return value


@dataclass(frozen=True)
class Mask:
    """Causality and a window, as in flash-attn.

    Args:
        causal: a query sees no later key.
        window: (left, right) distances still visible; -1 is unbounded.
        uses_distance: the scores depend on the distance (ALiBi, dropout), so that tiles from
            different global places must not be joined. A window implies it.
    """

    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    uses_distance: bool = False

    def __post_init__(self) -> None:
        # Configs give lists, which have no hash and equal no tuple.
        given = cast("Iterable[object] | int | None", self.window)
        window = tuple(given) if isinstance(given, Iterable) else ()
        if not {*map(type, window)} <= {int, bool}:
            window = tuple(map(_integer, window))
        if [*map(type, window)] != [int, int] or min(cast("tuple[int, int]", window)) < -1:
            raise ConfigError(
                f"window must be (left, right) whole distances of at least 0, or -1 for unbounded, "
                f"got {self.window}. "
                "Leave it out for no window."
            )
        object.__setattr__(self, "window", window)

    @property
    def left(self) -> int:
        """Largest distance of a visible key behind the query; ``UNBOUNDED`` if any."""
        return UNBOUNDED if self.window[0] < 0 else self.window[0]

    @property
    def right(self) -> int:
        """Largest distance of a visible key ahead of the query: 0 when causal; ``UNBOUNDED`` if any."""
        right = UNBOUNDED if self.window[1] < 0 else self.window[1]
        return min(right, 0) if self.causal else right

    @property
    def joins_segments(self) -> bool:
        """True if tiles from different global places may be joined into one."""
        return not self.uses_distance and self.window == (-1, -1)


@lru_cache(maxsize=256)
def visible_pairs(documents: Documents, mask: Mask) -> int:
    """Count visible pairs, summed over the given rows: one row where it stands for the whole batch.

    A closed form, independent of layout and schedule. In a document of n tokens, n - d queries have a key at
    distance d on either side. With distances up to l behind and r ahead that is

        n + sum(n - d for d in 1..min(l, n-1)) + sum(n - d for d in 1..min(r, n-1)),

    and sum(n - d for d in 1..m) = m n - m (m + 1) / 2. Causal without a window: n (n + 1) / 2.

    Args:
        documents: intervals that attend only to themselves.
        mask: causality and window.
    """
    lengths = np.concatenate([row[:, 1] - row[:, 0] for row in documents.rows])
    return int((lengths + _within(lengths, mask.left) + _within(lengths, mask.right)).sum())


def _within(lengths: Ints, distance: int) -> Ints:
    """Pairs of each length on one side of the diagonal, up to a distance."""
    reach = np.minimum(lengths - 1, distance)
    return reach * lengths - reach * (reach + 1) // 2


def triangle(n: Ints) -> Ints:
    """Return 0 + 1 + ... + (n - 1) for positive n, else 0."""
    n = np.maximum(n, 0)
    return n * (n - 1) // 2
