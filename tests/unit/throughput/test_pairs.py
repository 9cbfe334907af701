"""The closed form of visible pairs against a dense boolean mask, summed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_cp.layout import Documents, Mask, SequenceLayout, schedule, visible_pairs
from tests.helpers.throughput.brute import dense_pairs

WINDOWS = [(-1, -1), (0, 0), (3, -1), (-1, 2), (4, 1), (1000, 1000)]


@st.composite
def rows_of_documents(draw: st.DrawFn) -> list[list[tuple[int, int]]]:
    """Rows of 40 tokens: documents with padding between and around them."""
    rows: list[list[tuple[int, int]]] = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = sorted(draw(st.sets(st.integers(0, 40), min_size=2, max_size=9)))
        rows.append(list(zip(cuts[::2], cuts[1::2], strict=False)))
    return rows


@pytest.mark.nightly
@given(rows_of_documents(), st.booleans(), st.sampled_from(WINDOWS))
def test_as_many_as_a_dense_mask_has(
    rows: list[list[tuple[int, int]]], causal: bool, window: tuple[int, int]
) -> None:
    documents = Documents([np.array(row, dtype=np.int64).reshape(-1, 2) for row in rows], 40)
    ids = torch.full((len(rows), 40), -1)
    for index, row in enumerate(rows):
        for number, (start, end) in enumerate(row):
            ids[index, start:end] = number
    assert visible_pairs(documents, Mask(causal, window)) == dense_pairs(ids, causal, window)


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "balanced"])
def test_as_many_as_the_schedule_computes(kind: str) -> None:
    documents = Documents.from_cu_seqlens([0, 5, 6, 50, 64])
    mask = Mask(True, (7, -1))
    layout = SequenceLayout(64, 4, 1, kind, documents)  # type: ignore[arg-type]
    assert sum(schedule(layout, None, mask).work) == visible_pairs(documents, mask)


def test_millions_of_tokens_do_not_overflow() -> None:
    assert visible_pairs(Documents.single(10_000_000), Mask()) == 10_000_000 * 10_000_001 // 2
