"""The schedule at the size it is made for. Times are printed, never asserted."""

from __future__ import annotations

import time

import numpy as np
import pytest

from lightning_cp.layout import Documents, Mask, RankSchedule, Schedule, SequenceLayout

TOKENS, RING, DOCUMENTS = 1 << 20, 64, 1000


def log_normal_documents() -> Documents:
    """1,000 documents with log-normal lengths that fill a million tokens."""
    weights = np.random.default_rng(0).lognormal(sigma=1.5, size=DOCUMENTS)
    lengths = np.maximum(1, np.floor(weights / weights.sum() * TOKENS)).astype(np.int64)
    lengths[-1] += TOKENS - lengths.sum()
    assert lengths.min() > 0
    return Documents.from_cu_seqlens(np.concatenate([[0], np.cumsum(lengths)]))


def num_tiles(one: RankSchedule) -> int:
    return sum(len(hop.tiles) for hop in one.hops)


@pytest.mark.parametrize("mask", [Mask(), Mask(window=(4096, -1)), Mask(causal=False)], ids=str)
def test_a_million_tokens_in_a_thousand_documents(
    mask: Mask, capsys: pytest.CaptureFixture[str]
) -> None:
    layout, documents = SequenceLayout(TOKENS, RING), log_normal_documents()
    rank = RING // 3
    Schedule(layout, documents, mask).rank(rank)  # warm caches and imports, as in training
    plans = [Schedule(layout, documents, mask) for _ in range(20)]
    start = time.process_time()
    made = [plan.rank(rank) for plan in plans][-1]
    per_rank = (time.process_time() - start) / len(plans)
    plan = plans[-1]
    active = sum(1 for hop in made.hops if not hop.idle)
    with capsys.disabled():
        print(
            f"\n1M tokens, ring {RING}, {DOCUMENTS} documents, {mask}: {1e3 * per_rank:.2f} ms CPU "
            f"for one rank's {num_tiles(made)} tiles in {active} active hops; "
            f"imbalance {plan.imbalance:.3f}"
        )
    seen = sum(tile.q_len * tile.k_len for hop in made.hops for tile in hop.tiles)
    assert seen >= plan.work[rank] > 0
    assert sum(hop.num_received for hop in made.hops[1:]) < plan.keys_rotated


def test_a_plain_million_tokens() -> None:
    """One document: one tile per hop, whatever the length; work as the formula says."""
    plan = Schedule(SequenceLayout(TOKENS, RING), Documents.single(TOKENS), Mask())
    assert num_tiles(plan.rank(5)) == RING
    assert plan.work == (TOKENS * (TOKENS + 1) // 2 // RING,) * RING
