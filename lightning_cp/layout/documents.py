"""Documents: intervals of the sequence that attend only to themselves.

Packed, padded and plain rows are all sorted lists of disjoint intervals. Tokens outside every interval are
padding: they get no tiles, so they cost nothing.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Sequence
from functools import cached_property
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt
import torch

from lightning_cp.errors import ShapeError

Ints = npt.NDArray[np.int64]
Intervals = Ints
"""int64 ``[documents, 2]``: (start, end) of each document, sorted and disjoint."""

IntsLike = Sequence[int] | torch.Tensor | npt.NDArray[np.integer]


class Documents:
    """The documents of every row of a batch. Immutable and hashable, so that schedules can be cached.

    One row stands for all rows of a batch; otherwise there is one entry per batch row.
    """

    def __init__(self, rows: Sequence[Intervals], seq_len: int) -> None:
        if not rows:
            raise ShapeError(
                "Documents needs at least one row, got none. "
                "Give the documents of each row of the batch."
            )
        self.seq_len = int(seq_len)
        self.rows: tuple[Intervals, ...] = tuple(_read_only(row) for row in rows)
        for index, row in enumerate(self.rows):
            _check_intervals(row, self.seq_len, index)
        if len(self.rows) > 1 and all(np.array_equal(self.rows[0], row) for row in self.rows[1:]):
            self._distinct = 1
        else:
            self._distinct = len(self.rows)
        self._key = (self.seq_len, tuple(row.tobytes() for row in self.rows))

    @classmethod
    def single(cls, seq_len: int) -> Documents:
        """Make one document that fills the sequence."""
        return cls([np.array([[0, seq_len]], dtype=np.int64)], seq_len)

    @classmethod
    def from_cu_seqlens(
        cls, cu_seqlens: IntsLike, seq_len: SupportsIndex | None = None
    ) -> Documents:
        """Make packed rows from cumulative lengths ``[documents + 1]``, as flash-attn takes them for one row,
        or ``[rows, documents + 1]``. Rows with fewer documents repeat their last entry.

        Raises:
            ShapeError: not integers in one or two dimensions, first entry not 0, decreasing, or last entry
                not ``seq_len``.
        """
        shape = _shape_of(cu_seqlens, "cu_seqlens")
        table = _int_array(cu_seqlens, "cu_seqlens", ndim=2 if len(shape) == 2 else 1)
        if not table.size or table.shape[-1] < 2:
            raise ShapeError(
                f"cu_seqlens needs at least two entries, got {table.shape[-1]}. "
                "One document is [0, seq_len]."
            )
        if not isinstance(seq_len, SupportsIndex | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ShapeError(
                f"seq_len must be an integer, got {seq_len!r}. Give the number of tokens as an int."
            )
        total = int(table.flat[-1]) if seq_len is None else operator.index(seq_len)
        several = table.ndim == 2
        rows = [
            _from_boundaries(cu, total, f" of row {row}" * several)
            for row, cu in enumerate(np.atleast_2d(table))
        ]
        return cls(rows, total)

    @classmethod
    def from_segment_ids(
        cls, segment_ids: torch.Tensor, padding_id: int | None = None
    ) -> Documents:
        """Make documents from ids ``[rows, seq_len]`` (or ``[seq_len]``): a run of equal ids is a document.

        Args:
            segment_ids: integers; ids of documents are unique within a row.
            padding_id: the id of tokens outside every document, if there is one.

        Raises:
            ShapeError: an id occurs again after another one, so that its tokens are not one interval.
        """
        ids = _rows(segment_ids, "segment_ids")
        return cls([_runs(row, padding_id, index) for index, row in enumerate(ids)], ids.shape[1])

    @classmethod
    def from_position_ids(cls, position_ids: torch.Tensor) -> Documents:
        """Make documents from positions that restart: one begins wherever the step is not +1.

        Args:
            position_ids: integers ``[rows, seq_len]`` or ``[seq_len]``; or ``[4, rows, seq_len]`` as
                transformers stacks them for images, whose first row counts the text (``text_positions``).

        Raises:
            ShapeError: another shape, which defines no documents; or not integers.
        """
        text = text_positions(position_ids)
        if text is None:
            raise ShapeError(
                "position_ids tell documents as [rows, seq_len], [seq_len], or [4, rows, seq_len] with the "
                f"text's positions first, got shape {tuple(position_ids.shape)}. "
                "Reshape them to one of these."
            )
        positions = _rows(text, "position_ids")
        seq_len = positions.shape[1]
        rows: list[Intervals] = []
        for row in positions:
            starts = np.concatenate([[0], np.flatnonzero(np.diff(row) != 1) + 1]).astype(np.int64)
            rows.append(np.stack([starts, np.append(starts[1:], seq_len)], axis=1))
        return cls(rows, seq_len)

    @classmethod
    def from_padding_mask(cls, mask: torch.Tensor) -> Documents:
        """Make documents from a ``[rows, seq_len]`` mask, 1 for tokens and 0 for left or right padding.

        Raises:
            ShapeError: a row has padding between tokens (a dense mask cannot be expressed), or values
                other than 0 and 1 (an additive mask means the opposite).
        """
        _check_values(mask, "padding mask")
        other = (mask != 0) & (mask != 1)
        if other.any():
            raise ShapeError(
                f"a padding mask must be 1 for tokens and 0 for padding, got {mask[other][0].item()}. "
                "An additive mask (0 for tokens, -inf for padding) becomes one by `mask == 0`; numbers of "
                "documents are segment_ids."
            )
        tokens = _rows(mask.to(torch.int64), "padding mask")
        rows: list[Intervals] = []
        for index, row in enumerate(tokens != 0):
            edges = np.flatnonzero(np.diff(np.concatenate([[False], row, [False]]).astype(np.int8)))
            if edges.size > 2:
                raise ShapeError(
                    f"a padding mask must have its zeros at the left or right end of a row, got "
                    f"{edges.size // 2} separate runs of tokens in row {index}. Describe packed "
                    "documents with cu_seqlens or segment ids instead."
                )
            rows.append(edges.reshape(-1, 2).astype(np.int64))
        return cls(rows, tokens.shape[1])

    @property
    def num_rows(self) -> int:
        """Number of rows; 1 means that every batch row has these documents."""
        return len(self.rows)

    @property
    def shared(self) -> bool:
        """True if all rows have the same documents, so that one tile list serves the batch."""
        return self._distinct == 1

    @cached_property
    def is_dense(self) -> bool:
        """True if every row is one document that fills the sequence."""
        return all(row.shape[0] == 1 and row[0, 1] - row[0, 0] == self.seq_len for row in self.rows)

    @property
    def checksum(self) -> int:
        """A checksum of all boundaries, equal across processes."""
        lengths = np.array([self.seq_len, *map(len, self.rows)], dtype=np.int64)
        return zlib.crc32(b"".join([lengths.tobytes(), *(row.tobytes() for row in self.rows)]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Documents) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        counts = [row.shape[0] for row in self.rows]
        return f"Documents(rows={len(self.rows)}, documents={counts}, seq_len={self.seq_len})"


def text_positions(position_ids: torch.Tensor) -> torch.Tensor | None:
    """Return the positions ``[rows, seq_len]`` that define documents, from those of transformers' models.

    Models for images have several positions per token: ``[3, rows, seq_len]`` (time, height, width) define no
    documents, which gives ``None``; in ``[4, rows, seq_len]`` those of the text come first.
    """
    _check_tensor(position_ids, "position_ids")
    if position_ids.dim() == 3:
        return position_ids[0] if position_ids.shape[0] in (1, 4) else None
    if position_ids.dim() == 1:
        return position_ids[None]
    return position_ids if position_ids.dim() == 2 else None


def _read_only(row: Intervals) -> Intervals:
    given = np.asarray(row)
    if given.size and (given.ndim != 2 or given.shape[1] != 2):
        raise ShapeError(
            f"documents must be (start, end) pairs, got shape {given.shape}. "
            "Give a tensor [documents, 2] for each row."
        )
    if given.size and not np.issubdtype(given.dtype, np.integer):
        raise ShapeError(
            f"documents must hold integers (int32 or int64), got {given.dtype}. "
            "Convert them with .long()."
        )
    out = np.array(given, dtype=np.int64).reshape(-1, 2)
    out.setflags(write=False)
    return out


def _from_boundaries(cu: npt.NDArray[np.int64], total: int, of_row: str) -> Intervals:
    """Return the documents between the boundaries of one row, without empty ones."""
    if cu[0] != 0:
        raise ShapeError(
            f"cu_seqlens must start at 0, got {cu[0]} at index 0{of_row}. "
            "Prepend 0 to the ends of documents."
        )
    bad = np.flatnonzero(np.diff(cu) < 0)
    if bad.size:
        at = int(bad[0]) + 1
        raise ShapeError(
            f"cu_seqlens must not decrease, got {cu[at]} after {cu[at - 1]} at index {at}{of_row}. "
            "Sort the boundaries."
        )
    if cu[-1] != total:
        raise ShapeError(
            f"cu_seqlens must end at the sequence length {total}, got {cu[-1]} at index "
            f"{cu.size - 1}{of_row}. "
            "Append the sequence length, padding included."
        )
    pairs = np.stack([cu[:-1], cu[1:]], axis=1)
    return pairs[pairs[:, 1] > pairs[:, 0]]


def _check_intervals(row: Intervals, seq_len: int, index: int) -> None:
    flat = row.reshape(-1)
    ordered = np.all(row[:, 1] > row[:, 0]) and np.all(np.diff(flat) >= 0)
    if not ordered or (flat.size and (flat[0] < 0 or flat[-1] > seq_len)):
        raise ShapeError(
            f"documents must be non-empty, sorted, disjoint intervals within 0..{seq_len}, "
            f"got {row.tolist()} in row {index}. "
            "Leave out empty documents, and sort the others."
        )


def _int_array(values: IntsLike, name: str, ndim: int) -> npt.NDArray[np.int64]:
    if isinstance(values, torch.Tensor):
        _check_values(values, name)
        values = values.detach().cpu().numpy()
    array = np.asarray(values)
    if not np.issubdtype(array.dtype, np.integer):
        raise ShapeError(
            f"{name} must hold integers (int32 or int64), got {array.dtype}. "
            "Convert it with .long()."
        )
    if array.ndim != ndim:
        raise ShapeError(
            f"{name} must have {ndim} dimension(s), got shape {tuple(array.shape)}. "
            "Reshape it, or take out the other dimensions."
        )
    return array.astype(np.int64)


def _check_values(x: torch.Tensor, name: str) -> None:
    _check_tensor(x, name)
    if x.is_meta:
        raise ShapeError(
            f"{name} of shape {tuple(x.shape)} on meta has no values: give it on a real device, cpu best "
            "(documents are read there)."
        )


def _shape_of(values: IntsLike, name: str) -> tuple[int, ...]:
    try:
        return np.shape(values)
    except ValueError as ragged:
        raise ShapeError(
            f"{name} must have rows of one length: rows with fewer documents repeat their last entry."
        ) from ragged


def _check_tensor(x: object, name: str) -> None:
    if not isinstance(x, torch.Tensor):
        raise ShapeError(
            f"{name} must be a tensor, got {type(x).__name__}: torch.tensor(...) makes one."
        )


def _rows(values: torch.Tensor, name: str) -> npt.NDArray[np.int64]:
    _check_tensor(values, name)
    if values.dim() not in (1, 2):
        raise ShapeError(
            f"{name} must be [rows, seq_len] or [seq_len], got shape {tuple(values.shape)}. "
            "Give one number for each token of a row."
        )
    rows = values if values.dim() == 2 else values.unsqueeze(0)
    out = _int_array(rows, name, ndim=2)
    if out.size == 0:
        raise ShapeError(
            f"{name} is empty: shape {tuple(values.shape)}. Leave it out if there are no documents."
        )
    return out


def _runs(row: npt.NDArray[np.int64], padding_id: int | None, index: int) -> Intervals:
    starts = np.concatenate([[0], np.flatnonzero(np.diff(row)) + 1]).astype(np.int64)
    ids = row[starts]
    runs = np.stack([starts, np.append(starts[1:], row.size)], axis=1)
    if padding_id is not None:
        runs, ids = runs[ids != padding_id], ids[ids != padding_id]
    if np.unique(ids).size != ids.size:
        seen, counts = np.unique(ids, return_counts=True)
        raise ShapeError(
            f"a segment id must be one contiguous run, got id {seen[counts > 1][0]} in separate places "
            f"of row {index}. Give every document its own id."
        )
    return runs
