"""Joining neighbouring tiles, so that zigzag costs one kernel call per hop.

Three passes. Full tiles side by side in keys are joined; then, where distance does not matter,
``causal + full + causal`` on a diagonal become one causal tile (local order is sorted, so local
causality is global causality); then full tiles one above the other in queries are joined.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lightning_cp.layout.columns import CAUSAL, FULL, Columns, concat_columns

Ints = npt.NDArray[np.int64]


def coalesce(tiles: Columns, joins_segments: bool) -> Columns:
    """Join what can be one kernel call without changing what is computed.

    Args:
        tiles: the tiles of one query rank.
        joins_segments: tiles from different global places may be joined; otherwise only tiles
            whose ``delta`` says that they are neighbours globally too.
    """
    tiles = _join_along_keys(tiles, joins_segments)
    if joins_segments:
        tiles = _join_diagonals(tiles)
    return _join_along_queries(tiles, joins_segments)


def _join_along_keys(tiles: Columns, joins_segments: bool) -> Columns:
    order = np.lexsort((tiles.k_start, tiles.q_len, tiles.q_start, tiles.row, tiles.k_rank))
    t = tiles.select(order)
    same = _equal_to_previous(t.k_rank, t.row, t.q_start, t.q_len)
    touching = t.k_start[1:] == t.k_start[:-1] + t.k_len[:-1]
    continuous = t.delta[1:] == t.delta[:-1] - t.k_len[:-1]
    first, total = _merge_runs(t, same & touching, continuous | joins_segments, t.k_len)
    return t.select(first).with_columns(k_len=total)


def _join_along_queries(tiles: Columns, joins_segments: bool) -> Columns:
    order = np.lexsort((tiles.q_start, tiles.k_len, tiles.k_start, tiles.row, tiles.k_rank))
    t = tiles.select(order)
    same = _equal_to_previous(t.k_rank, t.row, t.k_start, t.k_len)
    touching = t.q_start[1:] == t.q_start[:-1] + t.q_len[:-1]
    continuous = t.delta[1:] == t.delta[:-1] + t.q_len[:-1]
    first, total = _merge_runs(t, same & touching, continuous | joins_segments, t.q_len)
    return t.select(first).with_columns(q_len=total)


def _equal_to_previous(*columns: Ints) -> npt.NDArray[np.bool_]:
    same = np.ones(max(columns[0].size - 1, 0), dtype=bool)
    for column in columns:
        same &= column[1:] == column[:-1]
    return same


def _merge_runs(
    t: Columns,
    neighbours: npt.NDArray[np.bool_],
    joinable: npt.NDArray[np.bool_] | bool,
    lengths: Ints,
) -> tuple[npt.NDArray[np.intp], Ints]:
    """Index of the first tile of each run of joinable full tiles, and the run's summed length."""
    if not t.size:
        return np.zeros(0, dtype=np.intp), lengths
    full = t.kind == FULL
    joined = neighbours & joinable & full[1:] & full[:-1]
    first = np.flatnonzero(np.concatenate([[True], ~joined]))
    return first, np.add.reduceat(lengths, first)


def _join_diagonals(tiles: Columns) -> Columns:
    """Grow each square causal tile by the (full, causal) pair that continues its diagonal."""
    square = (tiles.kind == CAUSAL) & (tiles.delta == 0) & (tiles.q_len == tiles.k_len)
    if square.sum() < 2:
        return tiles
    below = {
        key: index
        for index, key in enumerate(
            zip(
                tiles.k_rank.tolist(),
                tiles.row.tolist(),
                tiles.q_start.tolist(),
                tiles.q_len.tolist(),
                tiles.k_start.tolist(),
                tiles.k_len.tolist(),
                strict=True,
            )
        )
        if tiles.kind[index] == FULL
    }
    diagonal = np.flatnonzero(square)
    diagonal = diagonal[
        np.lexsort((tiles.q_start[diagonal], tiles.row[diagonal], tiles.k_rank[diagonal]))
    ]
    keep = np.ones(tiles.size, dtype=bool)
    size = tiles.q_len.copy()
    current = int(diagonal[0])
    for following in diagonal[1:].tolist():
        corner = _corner_key(tiles, size, current, following)
        index = below.get(corner) if corner is not None else None
        if index is None:
            current = following
            continue
        size[current] += tiles.q_len[following]
        keep[[index, following]] = False
    k_len = np.where(square, size, tiles.k_len)
    return concat_columns([tiles.with_columns(q_len=size, k_len=k_len).select(keep)])


def _corner_key(
    tiles: Columns, size: Ints, current: int, following: int
) -> tuple[int, int, int, int, int, int] | None:
    """The full tile that must exist for ``following`` to continue the diagonal of ``current``."""
    grown = int(size[current])
    if (
        tiles.k_rank[current] != tiles.k_rank[following]
        or tiles.row[current] != tiles.row[following]
        or tiles.q_start[following] != tiles.q_start[current] + grown
        or tiles.k_start[following] != tiles.k_start[current] + grown
    ):
        return None
    return (
        int(tiles.k_rank[current]),
        int(tiles.row[current]),
        int(tiles.q_start[following]),
        int(tiles.q_len[following]),
        int(tiles.k_start[current]),
        grown,
    )
