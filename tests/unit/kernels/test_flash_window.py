"""Band tiles in FlashAttention's terms, and what schedules promise about tiles."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cp.kernels.per_tile import is_causal
from lightning_cp.kernels.varlen import bottom_right_window, split_band
from lightning_cp.layout.documents import Documents
from lightning_cp.layout.mask import Mask
from lightning_cp.layout.sequence import LayoutKind, SequenceLayout
from lightning_cp.layout.tiles import Tile, schedule
from tests.helpers.kernels.emulated import flash_hides

LAYOUTS: tuple[LayoutKind, ...] = ("contiguous", "zigzag")
Scheduled = tuple[Mask, list[Tile]]


@st.composite
def schedules(draw: st.DrawFn) -> Scheduled:
    """All tiles of a random schedule."""
    seq_len, ring_size = draw(st.integers(8, 60)), draw(st.integers(1, 4))
    cuts = draw(st.sets(st.integers(1, seq_len - 1), max_size=4))
    documents = Documents.from_cu_seqlens([0, *sorted(cuts), seq_len])
    window = draw(st.tuples(st.integers(-1, 20), st.integers(-1, 20)))
    mask = Mask(causal=draw(st.booleans()), window=window)
    kind = draw(st.sampled_from(LAYOUTS))
    plan = schedule(SequenceLayout(seq_len, ring_size, kind=kind), documents, mask)
    ranks = [plan.rank(rank) for rank in range(ring_size)]
    return mask, [tile for rank in ranks for hop in rank.hops for tile in hop.tiles]


def tile_hides(tile: Tile, mask: Mask) -> torch.Tensor:
    """bool [queries, keys] by the definition of a band tile."""
    ahead = torch.arange(tile.k_len).unsqueeze(0) - torch.arange(tile.q_len).unsqueeze(1)
    ahead = ahead - tile.delta
    return (ahead < -mask.left) | (ahead > mask.right)


@settings(max_examples=300)
@given(schedules())
def test_parts_hide_what_their_band_hides(scheduled: Scheduled) -> None:
    mask, tiles = scheduled
    for tile in tiles:
        if tile.mask != "band":
            continue
        hidden = torch.ones(tile.q_len, tile.k_len, dtype=torch.bool)
        parts = split_band(tile, mask)
        assert len(parts) <= 3
        for part in parts:
            rows = slice(part.q_start - tile.q_start, part.q_start - tile.q_start + part.q_len)
            keys = slice(part.k_start - tile.k_start, part.k_start - tile.k_start + part.k_len)
            window = bottom_right_window(part, mask)
            hidden[rows, keys] = flash_hides(part.q_len, part.k_len, False, *window)
        assert torch.equal(hidden, tile_hides(tile, mask))


@settings(max_examples=300)
@given(schedules())
def test_schedules_keep_what_the_operators_rely_on(scheduled: Scheduled) -> None:
    mask, tiles = scheduled
    for tile in tiles:
        assert tile.q_len
        assert tile.k_len
        assert is_causal(tile) == (tile.mask == "causal")  # asserts that it is square
        if tile.mask == "band":
            hidden = tile_hides(tile, mask)
            assert not bool(hidden.all(1).any()), "a query without keys"
            assert not bool(hidden.all(0)[[0, -1]].any()), "an edge key that nobody sees"
