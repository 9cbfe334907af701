"""The same batch with fewer labels, so that ranks and rows have different numbers of targets than of tokens.

With a target for every token a mean over targets equals one over tokens or rows, but in a later batch it may
not.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_cp.batch import BatchRules, WholeBatch
from lightning_cp.batch.rules import KNOWN_DIMS, PAD_VALUES, TARGETS
from lightning_cp.layout import SequenceLayout
from lightning_cp.utils.containers import map_tensors
from lightning_cp.utils.labels import IGNORED_LABEL


def has_ignored(whole: WholeBatch, layout: SequenceLayout) -> bool:
    """True if a token of the batch or of its padding has no target, so the step supports such labels."""
    labels = whole.aligned_labels
    padded = layout.local_len * layout.cp_size > layout.seq_len
    return labels is not None and (padded or bool((labels == IGNORED_LABEL).any()))


def with_uneven_labels(
    batch: Any, whole: WholeBatch, rules: BatchRules, layout: SequenceLayout
) -> Any | None:
    """A copy of a batch without some of its labels; each rank's part of a row keeps some.

    Returns:
        ``None`` if there are no labels that can be left out, or too few.
    """
    labels, key = whole.aligned_labels, rules.label_key
    if labels is None or not _can_be_left_out(labels):
        return None
    if key in KNOWN_DIMS and key not in PAD_VALUES:
        return None  # the model reads input_ids
    targets = (labels != IGNORED_LABEL).movedim(whole.label_dim, -1)
    left_out = _left_out(targets.reshape(-1, whole.seq_len).cpu(), layout)
    if not left_out.any():
        return None
    aligned = left_out.view(targets.shape).movedim(-1, whole.label_dim)
    shifts = rules.labels == "shift"
    own = torch.nn.functional.pad(aligned[:, :-1], (1, 0)) if shifts else aligned

    def visit(name: str, x: torch.Tensor) -> torch.Tensor:
        if name == key:
            return x.masked_fill(own.to(x.device), IGNORED_LABEL)
        if shifts and name == TARGETS and x.shape == aligned.shape and _can_be_left_out(x):
            return x.masked_fill(aligned.to(x.device), IGNORED_LABEL)
        return x

    return map_tensors(batch, visit)


def _can_be_left_out(labels: torch.Tensor) -> bool:
    return labels.dtype in (torch.int64, torch.int32, torch.int16, torch.int8)


def _left_out(targets: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:
    """A mask bool [rows, S] of labels to leave out, evenly spaced among each rank's targets of a row."""
    left_out = torch.zeros_like(targets)
    rows = torch.arange(len(targets))[:, None]
    for rank in range(layout.cp_size):
        positions = layout.positions(rank)
        positions = positions[positions < layout.seq_len]
        of_rank = ALL - MOST * rank // max(1, layout.cp_size - 1)
        # Proportions between rows differ for each rank, and so do the parts of each layout.
        of_rows = torch.where(rows % 2 == 0, of_rank, of_rank**2 // ALL) * (4 - rows % 3) // 4
        first_half = torch.arange(len(positions)) * 2 < len(positions)
        mine = targets[:, positions]
        share = mine * torch.where(first_half, of_rows, of_rows // 2)
        end = share.cumsum(1)
        left_out[:, positions] = mine & (-(-end // ALL) == -(-(end - share) // ALL))
    return left_out


ALL, MOST = 1000, 700
"""Shares of a rank's targets: of the first row the first rank keeps all of its first half, the last 300."""
