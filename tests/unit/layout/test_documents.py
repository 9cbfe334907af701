"""Documents from every description that users have, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_cp.errors import ShapeError
from lightning_cp.layout import Documents
from tests.helpers.layout.cases import Ints, intervals

LENGTH = 24
PADDING = -7


def as_lists(documents: Documents) -> list[list[list[int]]]:
    return [row.tolist() for row in documents.rows]


@given(st.lists(intervals(LENGTH), min_size=1, max_size=3))
def test_segment_ids_with_padding(rows: list[Ints]) -> None:
    ids = torch.full((len(rows), LENGTH), PADDING)
    for row, pairs in enumerate(rows):
        for number, (start, end) in enumerate(pairs.tolist()):
            ids[row, start:end] = 100 - number
    assert Documents.from_segment_ids(ids, padding_id=PADDING) == Documents(rows, LENGTH)


@given(st.sets(st.integers(1, LENGTH - 1), max_size=8))
def test_packed_descriptions_agree(cuts: set[int]) -> None:
    bounds = [0, *sorted(cuts), LENGTH]
    lengths = np.diff(bounds).tolist()
    positions = torch.cat([torch.arange(length) for length in lengths])
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    wanted = [[list(pair) for pair in pairwise(bounds)]]
    for documents in (
        Documents.from_cu_seqlens(bounds),
        Documents.from_cu_seqlens(torch.tensor(bounds, dtype=torch.int32), LENGTH),
        Documents.from_cu_seqlens(np.array(bounds)),
        Documents.from_position_ids(positions),
        Documents.from_position_ids(positions[None]),
        Documents.from_segment_ids(ids),
    ):
        assert as_lists(documents) == wanted
        assert documents.seq_len == LENGTH
        assert documents.is_dense == (not cuts)


@given(st.lists(st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH)), min_size=1, max_size=3))
def test_padding_left_and_right(rows: list[tuple[int, int]]) -> None:
    mask = torch.zeros(len(rows), LENGTH, dtype=torch.int64)
    spans = [sorted(row) for row in rows]
    for row, (start, end) in enumerate(spans):
        mask[row, start:end] = 1
    wanted = [[[start, end]] if start < end else [] for start, end in spans]
    for kind in (torch.int64, torch.bool, torch.float32):
        assert as_lists(Documents.from_padding_mask(mask.to(kind))) == wanted


def test_empty_documents_are_dropped() -> None:
    assert as_lists(Documents.from_cu_seqlens([0, 0, 4, 4, 9])) == [[[0, 4], [4, 9]]]


def test_rows_of_cumulative_lengths() -> None:
    """As a loader stacks them; a row with fewer documents repeats its end."""
    stacked = torch.tensor([[0, 2, 5, 9], [0, 4, 9, 9]], dtype=torch.int32)
    rows = Documents.from_cu_seqlens(stacked, 9)
    assert as_lists(rows) == [[[0, 2], [2, 5], [5, 9]], [[0, 4], [4, 9]]]
    assert Documents.from_cu_seqlens(stacked[:1]) == Documents.from_cu_seqlens([0, 2, 5, 9])


def test_positions_that_restart_anywhere_begin_a_document() -> None:
    rows = torch.tensor([[3, 4, 5, 0, 1, 0, 0, 1], [0, 1, 2, 7, 8, 9, 3, 4]])
    assert as_lists(Documents.from_position_ids(rows)) == [
        [[0, 3], [3, 5], [5, 6], [6, 8]],
        [[0, 3], [3, 6], [6, 8]],
    ]


def test_equality_and_hash() -> None:
    one = Documents.from_cu_seqlens([0, 4, 9])
    assert one == Documents.from_segment_ids(torch.tensor([5, 5, 5, 5, 2, 2, 2, 2, 2]))
    assert hash(one) == hash(Documents.from_cu_seqlens([0, 4, 9]))
    assert one != Documents.from_cu_seqlens([0, 5, 9])
    assert one != Documents.single(9)
    assert one != "documents"
    assert Documents([[]], 8) != Documents([[]], 9)  # type: ignore[list-item]


def test_one_row_stands_for_all_and_equal_rows_are_shared() -> None:
    row, other = np.array([[0, 4], [4, 8]]), np.array([[0, 8]])
    assert Documents([row], 8).shared
    assert Documents([row, row], 8).shared
    assert not Documents([row, other], 8).shared
    assert Documents([row, row], 8).num_rows == 2
    assert Documents([other, other], 8).is_dense
    assert not Documents([other, row], 8).is_dense
    assert repr(Documents([row, other], 8)) == "Documents(rows=2, documents=[2, 1], seq_len=8)"


def test_documents_cannot_be_changed() -> None:
    given_row = np.array([[0, 4], [4, 8]])
    documents = Documents([given_row], 8)
    given_row[0, 1] = 5
    assert as_lists(documents) == [[[0, 4], [4, 8]]]
    with pytest.raises(ValueError, match="read-only"):
        documents.rows[0][0, 0] = 1


REFUSED: dict[str, tuple[Callable[[], Documents], str]] = {
    "no rows": (lambda: Documents([], 8), "at least one row, got none"),
    "overlap": (
        lambda: Documents([np.array([[0, 5], [4, 8]])], 8),
        r"sorted, disjoint intervals within 0\.\.8, got \[\[0, 5\], \[4, 8\]\] in row 0",
    ),
    "unsorted": (lambda: Documents([np.array([[4, 8], [0, 4]])], 8), "sorted, disjoint"),
    "empty": (lambda: Documents([np.array([[3, 3]])], 8), "non-empty"),
    "outside": (lambda: Documents([np.array([[0, 8]]), np.array([[0, 9]])], 8), "in row 1"),
    "negative": (lambda: Documents([np.array([[-1, 4]])], 8), "within 0"),
    "not pairs": (lambda: Documents([np.array([0, 4, 8])], 8), r"\(start, end\) pairs, .*\(3,\)"),
    "not integers": (lambda: Documents([np.array([[0.5, 4]])], 8), "integers .* got float64"),
    "cu dtype": (
        lambda: Documents.from_cu_seqlens(torch.tensor([0.0, 4.0])),
        "cu_seqlens must hold integers .* got float32",
    ),
    "cu dims": (
        lambda: Documents.from_cu_seqlens(torch.tensor([[[0, 4]]])),
        r"cu_seqlens must have 1 dimension\(s\), got shape \(1, 1, 2\)",
    ),
    "cu row": (
        lambda: Documents.from_cu_seqlens(torch.tensor([[0, 2, 4], [0, 3, 5]]), 4),
        "must end at the sequence length 4, got 5 at index 2 of row 1",
    ),
    "cu one entry": (lambda: Documents.from_cu_seqlens([0]), "at least two entries, got 1"),
    "cu start": (lambda: Documents.from_cu_seqlens([1, 4]), "start at 0, got 1 at index 0"),
    "cu decreasing": (
        lambda: Documents.from_cu_seqlens([0, 5, 3, 8]),
        "must not decrease, got 3 after 5 at index 2",
    ),
    "cu end": (
        lambda: Documents.from_cu_seqlens([0, 4, 8], seq_len=9),
        "end at the sequence length 9, got 8 at index 2",
    ),
    "cu device": (
        lambda: Documents.from_cu_seqlens(torch.tensor([0, 4], device="meta")),
        r"cu_seqlens of shape \(2,\) on meta has no values: give it on a real device, cpu best",
    ),
    "ids device": (
        lambda: Documents.from_segment_ids(torch.ones(2, 4, dtype=torch.int64, device="meta")),
        r"segment_ids of shape \(2, 4\) on meta has no values",
    ),
    "padding device": (
        lambda: Documents.from_padding_mask(torch.ones(2, 4, device="meta")),
        r"padding mask of shape \(2, 4\) on meta has no values",
    ),
    "ids come back": (
        lambda: Documents.from_segment_ids(torch.tensor([[1, 1, 2, 2], [1, 2, 2, 1]])),
        "got id 1 in separate places of row 1",
    ),
    "ids dtype": (
        lambda: Documents.from_segment_ids(torch.tensor([1.0, 2.0])),
        "segment_ids must hold integers",
    ),
    "ids dims": (
        lambda: Documents.from_segment_ids(torch.zeros(2, 3, 4, dtype=torch.int64)),
        r"segment_ids must be \[rows, seq_len\] or \[seq_len\], got shape \(2, 3, 4\)",
    ),
    "ids empty": (
        lambda: Documents.from_segment_ids(torch.zeros(2, 0, dtype=torch.int64)),
        r"segment_ids is empty: shape \(2, 0\)",
    ),
    "positions dtype": (
        lambda: Documents.from_position_ids(torch.tensor([0.0, 1.0])),
        "position_ids must hold integers",
    ),
    "padding inside": (
        lambda: Documents.from_padding_mask(torch.tensor([[1, 1, 1], [1, 0, 1]])),
        "got 2 separate runs of tokens in row 1.*cu_seqlens or segment ids",
    ),
    "additive mask": (
        lambda: Documents.from_padding_mask(torch.tensor([[0.0, 0.0, float("-inf")]])),
        "1 for tokens and 0 for padding, got -inf.*additive",
    ),
    "dense mask": (
        lambda: Documents.from_padding_mask(torch.ones(1, 1, 4, 4, dtype=torch.bool)),
        r"padding mask must be \[rows, seq_len\].*got shape \(1, 1, 4, 4\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_documents_refuse(name: str) -> None:
    make, match = REFUSED[name]
    with pytest.raises(ShapeError, match=match):
        make()


def test_the_checksum_tells_rows_apart() -> None:
    one_row = Documents([np.array([[0, 5], [5, 10]])], 10)
    two_rows = Documents([np.array([[0, 5]]), np.array([[5, 10]])], 10)
    assert one_row.checksum != two_rows.checksum
    assert one_row.checksum == Documents([np.array([[0, 5], [5, 10]])], 10).checksum
