"""Query and K/V heads over Ulysses ranks, against one head at a time."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_cp.errors import ConfigError, LightningCPError, ShapeError
from lightning_cp.layout import HeadBlock, HeadSplit


@st.composite
def splits(draw: st.DrawFn) -> HeadSplit:
    """Any K/V heads and group size, over any number of ranks that divides the query heads."""
    kv_heads, group = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    heads = kv_heads * group
    sizes = [size for size in range(1, heads + 1) if heads % size == 0]
    return HeadSplit(heads, kv_heads, draw(st.sampled_from(sizes)))


def whole(split: HeadSplit, rank: int) -> HeadBlock:
    """All heads of a rank."""
    (block,) = split.blocks(rank)
    assert (block.kv, block.q) == ((0, split.num_local_kv(rank)), (0, split.local_heads))
    return block


def kv_of(split: HeadSplit, head: int) -> int:
    """The K/V head of a query head: groups of neighbours."""
    return head // (split.num_heads // split.num_kv_heads)


@given(splits())
def test_query_heads_are_dealt_once(split: HeadSplit) -> None:
    dealt = [head for rank in range(split.ulysses_size) for head in range(*split.q_range(rank))]
    assert dealt == list(range(split.num_heads))
    assert split.local_heads * split.ulysses_size == split.num_heads


@given(splits())
def test_a_rank_receives_exactly_the_kv_heads_it_uses(split: HeadSplit) -> None:
    for rank in range(split.ulysses_size):
        used = sorted({kv_of(split, head) for head in range(*split.q_range(rank))})
        assert list(range(*split.kv_range(rank))) == used
        assert split.num_local_kv(rank) == len(used)


@given(splits())
@example(HeadSplit(12, 3, 4))
def test_the_index_finds_the_head(split: HeadSplit) -> None:
    """``None`` only where the kernel's own grouping (neighbours, equal groups) finds the same."""
    for rank in range(split.ulysses_size):
        first_kv, _ = split.kv_range(rank)
        wanted = tuple(kv_of(split, head) - first_kv for head in range(*split.q_range(rank)))
        count = split.num_local_kv(rank)
        index = whole(split, rank).kv_of_q
        grouped = split.local_heads % count == 0 and wanted == tuple(
            head // (split.local_heads // count) for head in range(split.local_heads)
        )
        assert index == (None if grouped else wanted)


@given(splits(), st.integers(1, 4))
@example(HeadSplit(12, 3, 4), 1)
def test_blocks_hold_every_head_once_with_the_kv_heads_it_uses(split: HeadSplit, size: int) -> None:
    for rank in range(split.ulysses_size):
        first_q, first_kv = split.q_range(rank)[0], split.kv_range(rank)[0]
        queries: list[int] = []
        for block in split.blocks(rank, size):
            heads, keys = range(*block.q), range(*block.kv)
            assert 1 <= len(keys) <= size
            queries += heads
            of_heads = [kv_of(split, first_q + head) - first_kv - keys[0] for head in heads]
            grouped = [i * len(keys) // len(heads) for i in range(len(heads))]
            assert of_heads == (grouped if block.kv_of_q is None else list(block.kv_of_q))
        assert queries == list(range(split.local_heads))


@given(splits())
def test_shared_kv_heads(split: HeadSplit) -> None:
    users = [0] * split.num_kv_heads
    for rank in range(split.ulysses_size):
        for head in {kv_of(split, head) for head in range(*split.q_range(rank))}:
            users[head] += 1
    assert min(users) >= 1
    assert split.shares_kv == (max(users) > 1)


def test_groups_that_straddle_ranks() -> None:
    """12 query heads in groups of 4 on 4 ranks of 3: ranks 1 and 2 use two K/V heads unevenly."""
    split = HeadSplit(num_heads=12, num_kv_heads=3, ulysses_size=4)
    assert [split.kv_range(rank) for rank in range(4)] == [(0, 1), (0, 2), (1, 3), (2, 3)]
    assert [whole(split, rank).kv_of_q for rank in range(4)] == [None, (0, 1, 1), (0, 0, 1), None]
    assert split.shares_kv


def test_two_kv_heads_on_four_ranks() -> None:
    split = HeadSplit(num_heads=8, num_kv_heads=2, ulysses_size=4)
    assert [split.kv_range(rank) for rank in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert all(whole(split, rank).kv_of_q is None for rank in range(4))


@pytest.mark.parametrize(
    ("sizes", "error", "match"),
    [
        ((12, 5, 1), ShapeError, "12 query heads and 5 K/V heads"),
        ((4, 8, 1), ShapeError, "4 query heads and 8 K/V heads"),
        ((4, 0, 1), ShapeError, "4 query heads and 0 K/V heads"),
        (
            (12, 4, 8),
            ConfigError,
            "ulysses_size=8 does not divide the 12 attention heads. "
            r"Sizes that work: 1, 2, 3, 4, 6, 12; give the rest of the ranks to the ring",
        ),
        ((0, 1, 1), ConfigError, "at least 1, got 0 heads"),
        ((4, 2, 0), ConfigError, "at least 1, got 4 heads and ulysses_size=0"),
    ],
)
def test_a_split_refuses(
    sizes: tuple[int, int, int], error: type[LightningCPError], match: str
) -> None:
    with pytest.raises(error, match=match):
        HeadSplit(*sizes)
