"""The balanced layout: equal tokens, equal work, the same everywhere."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from lightning_cp.errors import ShapeError
from lightning_cp.layout import Documents, Mask, Schedule, SequenceLayout, balance
from lightning_cp.layout.balance import CHUNK_COUNTS, MIN_CHUNK_TOKENS, ChunkDocuments, chunk_areas
from tests.helpers.layout.cases import Case, documents, layouts, masks, ring_positions, visible

BALANCED = layouts(kinds=("balanced",))
MASKS = {"causal": Mask(), "full": Mask(causal=False), "window": Mask(window=(2048, -1))}


def log_normal(tokens: int, count: int, seed: int, rows: int = 1, sigma: float = 1.5) -> Documents:
    """Rows filled with documents of log-normal lengths."""
    random = np.random.default_rng(seed)
    found: list[np.ndarray] = []
    for _ in range(rows):
        weights = random.lognormal(sigma=sigma, size=count)
        ends = np.floor(np.cumsum(weights) / weights.sum() * tokens).astype(np.int64)
        ends = np.unique(np.append(ends[ends > 0][:-1], tokens))
        found.append(np.stack([np.append(0, ends[:-1]), ends], axis=1))
    return Documents(found, tokens)


@example(SequenceLayout(4096, 4, 1, "balanced", log_normal(4096, 20, 22), chunks=8))
@given(BALANCED)
def test_every_rank_gets_the_same_number_of_chunks(layout: SequenceLayout) -> None:
    per_rank = 1 if layout.ring_size == 1 else layout.chunks
    assert per_rank is not None
    assert layout.chunks_per_rank == per_rank
    size = layout.ring_len // per_rank
    dealt: list[int] = []
    for rank in range(layout.ring_size):
        held = ring_positions(layout, rank)
        assert (np.diff(held) > 0).all(), "local order is global order"
        starts = held.reshape(per_rank, size)[:, 0]
        assert (held.reshape(per_rank, size) == starts[:, None] + np.arange(size)).all()
        assert (starts % size == 0).all()
        dealt += (starts // size).tolist()
        gaps = layout.segments(rank)
        assert (gaps[1:, 0] > gaps[:-1].sum(1)).all(), "neighbours are joined"
    assert sorted(dealt) == list(range(layout.ring_size * per_rank))


@given(
    st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), documents(n))), masks(), st.data()
)
def test_areas_are_counted_pairs(
    sized: tuple[int, Documents], mask: Mask, data: st.DataObject
) -> None:
    length, rows = sized
    cuts = sorted({0, length, *data.draw(st.sets(st.integers(0, length), max_size=6))})
    seen = visible(Case(SequenceLayout(length), rows, mask))
    counted = [int(seen[:, a:b].sum()) for a, b in pairwise(cuts)]
    assert chunk_areas(np.array(cuts), rows, mask).tolist() == counted
    beyond = chunk_areas(np.array([length, length + 5]), rows, mask)
    assert beyond.tolist() == [0], "padding is no work"


@given(BALANCED)
def test_loads_are_the_work_of_the_schedule(layout: SequenceLayout) -> None:
    assume(layout.ring_size > 1)
    assert layout.documents is not None
    plan = Schedule(layout, layout.documents, layout.mask)
    assert layout._assignment.loads == plan.work
    assert layout._assignment.imbalance == pytest.approx(plan.imbalance)


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4))
def test_two_chunks_of_one_document_are_zigzag(ring: int, ulysses: int, of_chunk: int) -> None:
    sizes = (2 * ring * ulysses * of_chunk, ring, ulysses)  # nothing to pad
    zigzag = SequenceLayout(*sizes, kind="zigzag")
    balanced = SequenceLayout(*sizes, kind="balanced", chunks=2)
    assert balanced.checksum == zigzag.checksum
    assert SequenceLayout(*sizes, kind="balanced", chunks=1).checksum == (
        SequenceLayout(*sizes, kind="contiguous").checksum
    )


def best_imbalance(areas: list[int], ring: int, per_rank: int) -> int:
    """The busiest rank of the best deal, by trying all."""
    loads, held = [0] * ring, [0] * ring

    def place(at: int, best: int) -> int:
        if at == len(areas):
            return min(best, max(loads))
        for rank in range(ring):
            if held[rank] < per_rank and loads[rank] + areas[at] < best:
                loads[rank] += areas[at]
                held[rank] += 1
                best = place(at + 1, best)
                loads[rank] -= areas[at]
                held[rank] -= 1
        return best

    return place(0, 1 << 60)


@settings(max_examples=100)  # each tries all deals
@given(st.sampled_from([(2, 2), (2, 4), (3, 2), (3, 3), (4, 2)]), st.data())
def test_the_deal_is_near_the_best_there_is(shape: tuple[int, int], data: st.DataObject) -> None:
    """Graham's bound for dealing longest first is 4/3 of the best; counts that must be equal keep it."""
    ring, per_rank = shape
    rows, mask = data.draw(documents(ring * per_rank * 4)), data.draw(masks())
    layout = SequenceLayout(rows.seq_len, ring, 1, "balanced", rows, mask, per_rank)
    cuts = np.arange(ring * per_rank + 1) * 4
    best = best_imbalance(chunk_areas(cuts, rows, mask).tolist(), ring, per_rank)
    assert 3 * max(layout._assignment.loads) <= 4 * best


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("tokens", "ring", "count"),
    [(1 << 15, 4, 40), (1 << 16, 8, 50), (1 << 18, 16, 200), (1 << 20, 64, 1000)],
)
def test_packed_rows_are_even(tokens: int, ring: int, count: int, rows: int, mask: Mask) -> None:
    """At most 2% above the mean, where zigzag is up to 7 times it; few chunks and little padding."""
    for seed in range(3):
        packed = log_normal(tokens, count, seed, rows)
        layout = SequenceLayout(tokens, ring, 1, "balanced", packed, mask)
        plan = Schedule(layout, packed, mask)
        assert plan.imbalance <= 1.02
        assert layout.chunks_per_rank in CHUNK_COUNTS
        assert (
            layout.padded_len - tokens < ring * layout.chunks_per_rank <= tokens / MIN_CHUNK_TOKENS
        )
        zigzag = Schedule(SequenceLayout(tokens, ring), packed, mask).imbalance
        if mask == Mask() and rows == 1:
            assert zigzag > 1.1, "there is something to balance"
        if layout.chunks_per_rank > 1:  # half as many would not do
            fewer = layout.chunks_per_rank // 2
            less = SequenceLayout(tokens, ring, 1, "balanced", packed, mask, fewer)
            assert Schedule(less, packed, mask).imbalance > 1.02


def test_exchanges_reach_the_bound_with_fewer_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = log_normal(1 << 16, 50, 0)
    arguments = (1 << 16, 4, 1, packed, Mask(), 4)
    assert balance.assign_chunks.__wrapped__(*arguments).imbalance <= 1.02
    monkeypatch.setattr(balance, "_swap_chunks", lambda *_: None)
    assert balance.assign_chunks.__wrapped__(*arguments).imbalance > 1.02


def without_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance, "_prefer_fewer_keys", lambda areas, homes, owner, ring_size: owner)


def keys_moved(packed: Documents, ring: int, deal: balance.ChunkAssignment) -> int:
    """As the schedule counts them."""
    layout = SequenceLayout(packed.seq_len, ring, 1, "balanced", packed, Mask(), deal.per_rank)
    layout.__dict__["_assignment"] = deal
    keys = Schedule(layout, packed, Mask()).keys
    return int(keys.sum() - np.trace(keys))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("per_rank", [1, 3, 8])
def test_keys_needed_are_those_of_the_schedule(seed: int, per_rank: int) -> None:
    """Of any deal: here of random ones, over documents shorter and longer than a chunk."""
    ring, packed = 4, log_normal(3000, 12, seed)
    size = -(-3000 // (ring * per_rank))
    owner = np.random.default_rng(seed).permutation(np.repeat(np.arange(ring), per_rank))
    chunks = tuple(tuple(np.flatnonzero(owner == rank).tolist()) for rank in range(ring))
    dealt = balance.ChunkAssignment(chunks, (0,) * ring)
    cuts = np.arange(ring * per_rank + 1) * size
    needed = ChunkDocuments.of(cuts, packed.rows[0]).keys_needed(owner)
    assert needed == keys_moved(packed, ring, dealt)


def test_documents_are_kept_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer keys travel, with as many chunks, still within the bound."""
    packed = log_normal(1 << 16, 16, 0)
    arguments = (1 << 16, 4, 1, packed, Mask(), 8)
    near = balance.assign_chunks.__wrapped__(*arguments)
    without_neighbours(monkeypatch)
    scattered = balance.assign_chunks.__wrapped__(*arguments)
    assert near.imbalance <= 1.02
    assert 3 * keys_moved(packed, 4, near) < 2 * keys_moved(packed, 4, scattered)


@pytest.mark.parametrize("seed", range(6))
def test_never_more_keys_for_it(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = log_normal(1 << 14, 40, seed)
    near = balance.best_assignment.__wrapped__(1 << 14, 4, 1, packed, Mask())
    without_neighbours(monkeypatch)
    balance.assign_chunks.cache_clear()
    scattered = balance.best_assignment.__wrapped__(1 << 14, 4, 1, packed, Mask())
    balance.assign_chunks.cache_clear()
    assert near.per_rank == scattered.per_rank
    assert keys_moved(packed, 4, near) <= keys_moved(packed, 4, scattered)


def test_lengths_that_do_not_divide_and_ulysses() -> None:
    """The grid of chunks and Ulysses slices is all that is added."""
    packed = log_normal(50_003, 60, 5)
    for ring, ulysses in ((4, 3), (8, 2), (5, 4)):
        layout = SequenceLayout(50_003, ring, ulysses, "balanced", packed)
        assert Schedule(layout, packed, Mask()).imbalance <= 1.02
        assert layout.padded_len % layout.divisor == 0
        assert layout.local_len * ring * ulysses == layout.padded_len
        assert layout.padded_len - 50_003 < layout.divisor
        with pytest.raises(
            ShapeError, match=f"balanced.*next valid length is {layout.padded_len};"
        ):
            layout.check_unpadded()


def test_short_sequences_are_not_chopped_up() -> None:
    """Chunks of at least 64 tokens, or one chunk: contiguous."""
    packed = Documents.from_cu_seqlens([0, 3, 200, 256])
    layout = SequenceLayout(256, 2, 1, "balanced", packed)
    assert layout.ring_len // layout.chunks_per_rank >= MIN_CHUNK_TOKENS
    short = SequenceLayout(40, 4, kind="balanced")
    assert short.checksum == SequenceLayout(40, 4, kind="contiguous").checksum


def test_nothing_to_attend_to_is_even() -> None:
    empty = Documents([np.zeros((0, 2), dtype=np.int64)], 512)
    layout = SequenceLayout(512, 4, kind="balanced", documents=empty)
    assert layout.chunks_per_rank == 1
    assert layout._assignment.imbalance == 1.0


def test_other_tokens_have_another_checksum() -> None:
    packed = log_normal(4096, 20, 1)
    several = [
        SequenceLayout(4096, 4, 1, "balanced", packed, chunks=chunks) for chunks in (1, 2, 4, 8)
    ]
    several += [SequenceLayout(4096, 4), SequenceLayout(4096, 2, 2), SequenceLayout(4095, 4)]
    assert len({layout.checksum for layout in several}) == len(several)
    assert SequenceLayout(4096, 4, documents=packed).checksum == several[4].checksum
