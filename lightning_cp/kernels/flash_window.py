"""Band tiles in the terms of FlashAttention's window arguments.

The operator aligns windows at the bottom right: query i sees key j iff
``-left <= j - i - (k_len - q_len) <= right``. A tile says
``-mask.left <= j - i - delta <= mask.right``, so each side shifts by the difference of the two
origins. The operator also takes a window of at least ``k_len`` for an unbounded one, and an
unbounded one beside a bounded one for ``k_len``; both are only true while ``q_len <= k_len``, so a
taller band tile is cut.
"""

from __future__ import annotations

from itertools import pairwise

from lightning_cp.layout.tiles import Mask, Tile

UNBOUNDED_WINDOW = -1
"""The operator's word for a side without a bound."""


def bottom_right_window(tile: Tile, mask: Mask) -> tuple[int | None, int | None]:
    """``window_size_left, window_size_right`` of a tile; ``None`` unless it is a band."""
    if tile.mask != "band":
        return None, None
    shift = tile.k_len - tile.q_len - tile.delta
    left, right = mask.left + shift, mask.right - shift
    # A negative window would be read as unbounded. The schedule trims each tile to the queries and
    # keys that see each other, so that its last query sees a key, and its last key is seen.
    assert left >= 0, f"{tile}: its last query sees none of its keys"
    assert right >= 0, f"{tile}: its last key is seen by none of its queries"
    return _clip(left, tile.k_len), _clip(right, tile.k_len)


def representable(tile: Tile, mask: Mask) -> list[Tile]:
    """The tile itself, or at most three parts of it that the operator's window can express.

    Every query sees a key. So those that do not see the last key are fewer than the keys, and so
    are those that do not see the first: cut at both places, each band has as many keys as queries.
    """
    if tile.mask != "band" or tile.q_len <= tile.k_len:
        return [tile]
    low, high = tile.delta - mask.left, tile.delta + mask.right
    sees_last = min(max(tile.k_len - 1 - high, 0), tile.q_len)  # first query that sees the last key
    loses_first = min(max(1 - low, 0), tile.q_len)  # first query that no longer sees the first key
    cuts = sorted({0, sees_last, loses_first, tile.q_len})
    return [_part(tile, first, end, low, high) for first, end in pairwise(cuts)]


def _part(tile: Tile, first: int, end: int, low: int, high: int) -> Tile:
    """Queries ``first .. end`` of a tile whose query i sees the keys ``i + low .. i + high``."""
    k_first = max(0, first + low)
    k_end = min(tile.k_len, end + high)
    full = end - 1 + low <= k_first and k_end - 1 <= first + high
    return tile._replace(
        q_start=tile.q_start + first,
        q_len=end - first,
        k_start=tile.k_start + k_first,
        k_len=k_end - k_first,
        delta=tile.delta + first - k_first,
        mask="full" if full else "band",
    )


def _clip(window: int, k_len: int) -> int:
    return window if window < k_len else UNBOUNDED_WINDOW
