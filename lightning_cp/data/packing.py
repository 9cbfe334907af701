"""Documents packed end to end and cut into sequences of one length.

Shapes: every field of a sample is int64 ``[S]``. Batches are ``[B, S]``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.utils.data import Dataset

from lightning_cp.data.corpus import Bytes
from lightning_cp.errors import ConfigError
from lightning_cp.labels import IGNORED_LABEL


class PackedBytes(Dataset[dict[str, torch.Tensor]]):
    """Whole sequences of bytes, several documents in each, in a seeded order.

    A sample holds ``input_ids``, ``labels`` (the same bytes, *not* shifted; ``IGNORED_LABEL`` for
    the first byte of every document that starts inside the sequence, since nothing before it may
    predict it) and ``position_ids`` (0, 1, 2, ... restarting with every document).

    Args:
        documents: the bytes of each document, uint8, none empty.
        seq_len: S; what is left at the end and does not fill a sequence is dropped.
        seed: of the order of documents.
        at_most: how many sequences to keep, all if ``None``.
        part: what the text is for, named in errors.

    Raises:
        ConfigError: less text than one sequence.
    """

    def __init__(
        self,
        documents: Sequence[Bytes],
        seq_len: int,
        seed: int,
        at_most: int | None = None,
        part: str = "training",
    ) -> None:
        order = np.random.default_rng(seed).permutation(len(documents))
        lengths = np.array([documents[index].size for index in order], dtype=np.int64)
        total = int(lengths.sum())
        if seq_len < 2 or total < seq_len:
            raise ConfigError(
                f"data.seq_len={seq_len} asks for sequences of {seq_len} bytes, but the {part} "
                f"text has {total} bytes in {len(documents)} document(s). Give more text, or a "
                f"seq_len between 2 and {total}."
            )
        self.seq_len = seq_len
        self.sequences = min(total // seq_len, at_most or total)
        self.bytes = np.concatenate([documents[index] for index in order])[
            : self.sequences * seq_len
        ]
        self._starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])

    def __len__(self) -> int:
        return self.sequences

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        begin = index * self.seq_len
        inside = self._starts_within(begin)
        offsets = np.arange(self.seq_len)
        bounds = np.concatenate([[0], inside])
        input_ids = torch.from_numpy(self.bytes[begin : begin + self.seq_len].astype(np.int64))
        labels = input_ids.clone()
        labels[torch.from_numpy(inside)] = IGNORED_LABEL
        positions = offsets - bounds[np.searchsorted(bounds, offsets, side="right") - 1]
        return {
            "input_ids": input_ids,
            "labels": labels,
            "position_ids": torch.from_numpy(positions),
        }

    def _starts_within(self, begin: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Offsets of the documents that begin inside the sequence at ``begin``, after its start."""
        first, last = np.searchsorted(self._starts, [begin + 1, begin + self.seq_len])
        return self._starts[first:last] - begin
