"""The number of (query, key) pairs of attention: a closed form, which no layout and no schedule goes into."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from lightning_cp.layout.documents import Documents
from lightning_cp.layout.mask import Mask

Lengths = npt.NDArray[np.int64]


@lru_cache(maxsize=256)
def visible_pairs(documents: Documents, mask: Mask) -> int:
    """Visible pairs of all rows given, summed: of one row where one stands for the whole batch.

    In a document of n tokens, n - d queries have a key at distance d on either side. With distances up to l
    behind and r ahead that is

        n + sum(n - d for d in 1..min(l, n-1)) + sum(n - d for d in 1..min(r, n-1)),

    and sum(n - d for d in 1..m) = m n - m (m + 1) / 2. Causal without a window: n (n + 1) / 2.

    Args:
        documents: intervals that attend only to themselves.
        mask: causality and window.
    """
    lengths = np.concatenate([row[:, 1] - row[:, 0] for row in documents.rows])
    return int((lengths + _within(lengths, mask.left) + _within(lengths, mask.right)).sum())


def _within(lengths: Lengths, distance: int) -> Lengths:
    """Of each length: pairs on one side, up to a distance."""
    reach = np.minimum(lengths - 1, distance)
    return reach * lengths - reach * (reach + 1) // 2
