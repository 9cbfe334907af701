"""The tables of a tile list: every pair once, in blocks of one owner. No Triton is needed."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cp.kernels.triton.launch import Table, make_table
from lightning_cp.layout.mask import Mask
from lightning_cp.layout.tiles import ALL_ROWS, Tile
from tests.unit.kernels.test_tile_lists import BATCH, KEYS, QUERIES, seen_by, tile_lists

CPU = torch.device("cpu")


def counted(made: Table, over: str) -> torch.Tensor:
    """int [B, queries, keys]: how often a program meets a pair, read as the device code does."""
    count = torch.zeros(BATCH, QUERIES, KEYS, dtype=torch.int64)
    ahead = torch.arange(KEYS).unsqueeze(0) - torch.arange(QUERIES).unsqueeze(1)
    for row, start, end, first, last in made.blocks.tolist():
        rows = [row] if made.is_per_row else list(range(BATCH))
        for ref in made.refs[first:last].tolist():
            q_start, q_end, k_start, k_end, low, high, _ = made.tiles[ref].tolist()
            queries, keys = [q_start, q_end], [k_start, k_end]
            owned = queries if over == "queries" else keys
            assert owned[0] <= start < end <= owned[1], "a block reaches beyond its tile"
            owned[:] = [start, end]
            seen = (ahead >= low) & (ahead <= high)
            here = (slice(*queries), slice(*keys))
            for each in rows:
                count[each][here] += seen[here]
    return count


@settings(max_examples=150)
@given(
    tiles=tile_lists(),
    window=st.tuples(st.integers(-1, 6), st.integers(-1, 6)),
    causal=st.booleans(),
    size=st.integers(1, 20),
    over=st.sampled_from(["queries", "keys"]),
)
def test_every_pair_once(
    tiles: list[Tile],
    window: tuple[int, int],
    causal: bool,
    size: int,
    over: str,
) -> None:
    mask = Mask(causal=causal, window=window)
    made = make_table(tiles, mask, BATCH, over, size, CPU)  # type: ignore[arg-type]
    visible = seen_by(tiles, mask).long()
    if made is None:
        assert not visible.any()
        return
    assert torch.equal(counted(made, over), visible)
    lengths = made.blocks[:, 2] - made.blocks[:, 1]
    assert int(lengths.min()) >= 1
    assert int(lengths.max()) <= size


@settings(max_examples=100)
@given(tiles=tile_lists(), size=st.integers(1, 20))
def test_a_token_has_one_owner(tiles: list[Tile], size: int) -> None:
    made = make_table(tiles, Mask(), BATCH, "queries", size, CPU)
    if made is None:
        return
    owners = torch.zeros(BATCH, QUERIES, dtype=torch.int64)
    for row, start, end, *_ in made.blocks.tolist():
        rows = slice(row, row + 1) if made.is_per_row else slice(None)
        owners[rows, start:end] += 1
    assert int(owners.max()) == 1
    span = owners[:, slice(*made.span)]
    assert made.is_gapless == bool(span.all())
    assert int(owners.sum()) == int(span.sum())


def test_a_schedules_tiles_are_tabulated_once() -> None:
    tiles = (Tile(ALL_ROWS, 0, 9, 0, 9, 0, "causal"),)
    first = make_table(tiles, Mask(), BATCH, "queries", 4, CPU)
    assert make_table(tiles, Mask(), BATCH, "queries", 4, CPU) is first
    equal = tuple(tile._replace() for tile in tiles)
    assert make_table(equal, Mask(), BATCH, "queries", 4, CPU) is not first


def test_distances_are_global() -> None:
    made = make_table([Tile(ALL_ROWS, 4, 5, 2, 7, 100, "full")], Mask(), BATCH, "queries", 4, CPU)
    assert made is not None
    shift = int(made.tiles[0, 6])
    assert 4 - 2 + shift == 100  # the tile's first query and first key
