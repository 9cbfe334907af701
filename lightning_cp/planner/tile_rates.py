"""How fast a kernel is on a tile of any size, between those that were measured."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from lightning_cp.layout import Schedule
from lightning_cp.layout.tiles import Tile
from lightning_cp.planner.machines import TileRate


def rates_on(plan: Schedule, rates: Sequence[TileRate]) -> tuple[float, float]:
    """FLOP/s, forward and backward, on all tiles of the rank that has most of them.

    A tile that is not square counts as the square of as many entries, and one with a band as a causal one.
    """
    busiest = plan.work.index(max(plan.work))
    pairs: Counter[tuple[str, float]] = Counter()
    for hop in plan.rank(busiest).hops:
        for tile in hop.tiles:
            mask = "full" if tile.mask == "full" else "causal"
            pairs[mask, math.sqrt(tile.q_len * tile.k_len)] += visible(tile)
    seconds = [
        sum(count / rate_on(*tile, rates)[backward] for tile, count in pairs.items())
        for backward in (False, True)
    ]
    total = sum(pairs.values())
    return total / seconds[0], total / seconds[1]


def visible(tile: Tile) -> int:
    """Pairs of a full or causal tile; of a band those that only its right side hides."""
    if tile.mask == "full":
        return tile.q_len * tile.k_len
    rows = np.arange(tile.q_len) + tile.delta + 1
    return int(np.clip(rows, 0, tile.k_len).sum())


def rate_on(mask: str, length: float, rates: Sequence[TileRate]) -> tuple[float, float]:
    """FLOP/s, forward and backward: between two lengths seconds grow evenly with the length's logarithm.

    Args:
        mask: full or causal; the other one's rates, where it was not measured.
        length: of a square.
        rates: at least one, shortest first.
    """
    known = [rate for rate in rates if rate.mask == mask] or list(rates)
    at = np.log([rate.tokens for rate in known])
    forward, backward = (
        1.0 / float(np.interp(math.log(length), at, [1.0 / getattr(rate, name) for rate in known]))
        for name in ("forward", "backward")
    )
    return forward, backward
