"""Integer tables that describe all tiles of a hop to one kernel launch.

A program owns one block of queries (or, for dk and dv, of keys) and passes over all the tiles that
touch it, so that each result is written once, by one program. Blocks are cut where a tile starts or
ends: then all tokens of a block are within the same tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from lightning_cp.kernels.devices import IdentityKey, to_device
from lightning_cp.layout.mask import UNBOUNDED, Mask
from lightning_cp.layout.tiles import ALL_ROWS, Tile

Ints = npt.NDArray[np.int64]

FAR = 1 << 30
"""An unbounded reach: beyond any local length; sums with a length still fit int32."""


@dataclass(frozen=True)
class Table:
    """A tile list for one launch; tensors are int32 on the device.

    Attributes:
        tiles: [tiles, 7]: first query and end, first key and end, then ``low, high, shift`` in
            local indices: query i sees key j iff ``low <= j - i <= high``, at the global distance
            ``|i - j + shift|``.
        blocks: [blocks, 5]: batch row (``ALL_ROWS``: each), first token, end, first and end index
            into ``refs``.
        refs: indices of the tiles of each block; blocks cut from the same tokens share theirs.
        span: first token and end of all blocks.
        is_gapless: every token of the span is in a block, in every row.
        is_per_row: blocks name their batch row; otherwise each is for every row.
    """

    tiles: torch.Tensor
    blocks: torch.Tensor
    refs: torch.Tensor
    span: tuple[int, int]
    is_gapless: bool
    is_per_row: bool


def make_table(
    tiles: Sequence[Tile],
    mask: Mask,
    batch: int,
    over: Literal["queries", "keys"],
    size: int,
    device: torch.device,
) -> Table | None:
    """Return the table of a tile list, cached; ``None`` if all tiles are empty.

    Args:
        tiles: the tiles of a hop.
        mask: the mask of ``band`` tiles.
        batch: batch rows.
        over: the side whose blocks programs own.
        size: most tokens of a block.
        device: of the kernel.
    """
    return _cached_table(IdentityKey(tiles), mask, batch, over, size, device)


@lru_cache(maxsize=1024)
def _cached_table(
    key: IdentityKey, mask: Mask, batch: int, over: str, size: int, device: torch.device
) -> Table | None:
    nonempty = [tile for tile in key.tiles if tile.q_len and tile.k_len]
    if not nonempty:
        return None
    is_per_row = any(tile.row != ALL_ROWS for tile in nonempty)
    if is_per_row:
        nonempty = list(_spread_rows(nonempty, batch))
    row, q_start, q_len, k_start, k_len, delta = np.array(
        [tile[:6] for tile in nonempty], dtype=np.int64
    ).T
    shift = delta + k_start - q_start
    low, high = (np.clip(x + shift, -FAR, FAR) for x in _reach(nonempty, mask))
    columns = (q_start, q_start + q_len, k_start, k_start + k_len, low, high, shift)
    start, length = (q_start, q_len) if over == "queries" else (k_start, k_len)
    blocks, refs = _cut_blocks(row, start, length, size)
    first, end = int(start.min()), int((start + length).max())
    every = (end - first) * (batch if is_per_row else 1)
    covered = int((blocks[:, 2] - blocks[:, 1]).sum())
    return Table(
        _to_device(np.column_stack(columns), device),
        _to_device(blocks, device),
        _to_device(refs, device),
        span=(first, end),
        is_gapless=covered == every,
        is_per_row=is_per_row,
    )


def _spread_rows(tiles: Sequence[Tile], batch: int) -> Iterator[Tile]:
    """Repeat tiles of all rows for each row: next to tiles of single rows they share owners."""
    for tile in tiles:
        rows = range(batch) if tile.row == ALL_ROWS else [tile.row]
        yield from (tile._replace(row=row) for row in rows)


def _reach(tiles: Sequence[Tile], mask: Mask) -> tuple[Ints, Ints]:
    """Return the lowest and highest key, relative to its own position, that each tile's queries see."""
    bounds = {
        "full": (-UNBOUNDED, UNBOUNDED),
        "causal": (-UNBOUNDED, 0),
        "band": (-mask.left, mask.right),
    }
    low, high = np.array([bounds[tile.mask] for tile in tiles], dtype=np.int64).T
    return low, high


def _cut_blocks(row: Ints, start: Ints, length: Ints, size: int) -> tuple[Ints, Ints]:
    """Cut one side of the tiles into blocks [n, 5] of at most ``size`` tokens; also return their tiles."""
    # All rows at once, on one line: each gets a stretch longer than its tiles reach.
    stretch = int((start + length).max()) + 1
    begin = start + (row - ALL_ROWS) * stretch
    end = begin + length
    edges = np.unique(np.concatenate([begin, end]))
    refs, part, first_ref, num_refs = _tiles_of_parts(
        np.searchsorted(edges, begin), np.searchsorted(edges, end)
    )
    pieces, owner = _pieces(edges[part], edges[part + 1], size)
    line = pieces[:, :1] // stretch
    end_ref = first_ref + num_refs
    blocks = np.column_stack(
        [line + ALL_ROWS, pieces - line * stretch, first_ref[owner], end_ref[owner]]
    )
    return blocks, refs


def _tiles_of_parts(first: Ints, last: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Find the tiles that cover each part between two edges; tile t covers ``first[t] .. last[t]``.

    Returns:
        The tiles, part by part; the parts that have any; the start and the count of each part's tiles.
    """
    tile, offset = _count_up(last - first)
    part = first[tile] + offset
    order = np.argsort(part, kind="stable")
    return tile[order], *np.unique(part[order], return_index=True, return_counts=True)


def _pieces(begin: Ints, end: Ints, size: int) -> tuple[Ints, Ints]:
    """Cut intervals into pieces [n, 2] of at most ``size``; also return the interval of each piece."""
    owner, index = _count_up(-(-(end - begin) // size))
    start = begin[owner] + index * size
    return np.stack([start, np.minimum(start + size, end[owner])], axis=1), owner


def _count_up(counts: Ints) -> tuple[Ints, Ints]:
    """Return ``(0, 0), (0, 1) .. (0, counts[0] - 1), (1, 0) ..`` as two columns."""
    which = np.repeat(np.arange(counts.size), counts)
    return which, np.arange(which.size) - np.repeat(np.cumsum(counts) - counts, counts)


def _to_device(x: Ints, device: torch.device) -> torch.Tensor:
    return to_device(torch.from_numpy(x.astype(np.int32)), device)
