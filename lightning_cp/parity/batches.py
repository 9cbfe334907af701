"""Variants of a batch: a window that one device can run; the same tokens without padding or documents; fewer
labels.

With a target for every token a mean over targets equals one over tokens or rows, but in a later batch it may
not. With fewer labels, ranks and rows have different numbers of targets than of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_cp.batch import BatchRules, WholeBatch, add_positions_and_targets, read_batch
from lightning_cp.batch.read import SEGMENTS, has_boundaries
from lightning_cp.batch.rules import KNOWN_DIMS, PAD_VALUES, TARGETS
from lightning_cp.layout import SequenceLayout
from lightning_cp.models.hf.labels import is_same_labels
from lightning_cp.models.swap import hf_models
from lightning_cp.utils.containers import map_tensors, tensors_of
from lightning_cp.utils.labels import IGNORED_LABEL
from lightning_cp.utils.patching import add_hook


def batch_window(batch: Any, rules: BatchRules, tokens: int, divisor: int) -> Any:
    """A window of the batch's sequence, in all rows; the batch itself if it is short enough.

    It is the first window that holds targets: without any, the loss would be that of nothing.

    Args:
        batch: the whole batch.
        rules: the rules for reading it.
        tokens: of all rows together.
        divisor: the least number of tokens of a row, so that each rank has some.

    Raises:
        ConfigError: a batch that cannot be read.
        ShapeError: sequences of several lengths.
    """
    whole = read_batch(batch, rules, needs_labels=False)
    length = max(tokens // max(1, whole.rows), divisor)
    if not rules.padding:
        length = _divisible_length(length, whole.seq_len, divisor)
    if length >= whole.seq_len:
        return batch
    start = _first_with_targets(whole, length)
    return map_tensors(batch, lambda name, x: _cut(name, x, whole, start, length))


def _divisible_length(length: int, seq_len: int, divisor: int) -> int:
    """The largest length up to ``length`` that shares the divisors of the whole, so that nothing is
    padded.
    """
    unit = math.gcd(seq_len, divisor * MAX_CHUNKS)
    while unit > length and unit % 2 == 0:
        unit //= 2
    shorter = length // unit * unit
    return shorter if shorter >= divisor else length


MAX_CHUNKS = 64
"""The largest number of chunks of a rank's tokens."""


def _first_with_targets(whole: WholeBatch, length: int) -> int:
    """Start of the window: the first multiple of its length with a target in the window; 0 if there is
    none.
    """
    if whole.aligned_labels is None:
        return 0
    targets = (whole.aligned_labels != IGNORED_LABEL).movedim(whole.label_dim, -1)
    counts = targets.flatten(0, -2).sum(0) if targets.dim() > 1 else targets
    at = counts.nonzero()
    if not len(at):
        return 0
    return min(int(at[0]) // length * length, whole.seq_len - length)


def _cut(name: str, x: torch.Tensor, whole: WholeBatch, start: int, length: int) -> torch.Tensor:
    if name in whole.dims:
        return x.narrow(whole.dims[name], start, length)
    if has_boundaries(name):
        return _boundaries(x, start, length)
    return x


def _boundaries(x: torch.Tensor, start: int, length: int) -> torch.Tensor:
    """Boundaries of documents within the window, for each row [documents + 1]."""
    lines = [line - start for line in x.reshape(-1, x.shape[-1])]
    inside = [line.clamp(0, length) for line in lines]
    if x.dim() == 1:
        return torch.unique_consecutive(inside[0])
    return torch.stack(inside).to(x)


def without_documents(batch: Any) -> Any | None:
    """The same tokens as one document per row; ``None`` if there are no documents."""
    names = dict(tensors_of(batch))
    packed = [name for name in names if has_boundaries(name) or name in SEGMENTS]
    restarts = "position_ids" in names and bool((names["position_ids"].diff(dim=-1) < 0).any())
    if not (packed or restarts) or not isinstance(batch, dict):
        return None
    kept = {name: x for name, x in batch.items() if name not in packed}
    if restarts:
        positions = names["position_ids"]
        kept["position_ids"] = torch.arange(
            positions.shape[-1], device=positions.device, dtype=positions.dtype
        ).expand_as(positions)
    return kept


def without_padding(batch: Any) -> Any | None:
    """The same tokens without padding; ``None`` if there is none."""
    mask = batch.get("attention_mask") if isinstance(batch, dict) else None
    if not isinstance(mask, torch.Tensor) or bool(mask.all()):
        return None
    return {**batch, "attention_mask": torch.ones_like(mask)}


def with_another_first_token(batch: Any, rules: BatchRules) -> Any:
    """The same batch with another first token: a model whose later outputs change uses other tokens.

    Labels, positions, masks and documents stay.
    """
    whole = read_batch(batch, replace(rules, labels="ignore"), needs_labels=False)
    others = ("labels", "shift_labels", "position_ids", "attention_mask", *SEGMENTS)
    fixed = {rules.label_key, *others}

    def visit(name: str, x: torch.Tensor) -> torch.Tensor:
        if name not in whole.dims or name in fixed or x.dtype == torch.bool:
            return x
        changed = x.clone()
        first = changed.narrow(whole.dims[name], 0, 1)
        if x.is_floating_point():
            first.mul_(-1).add_(1)
        else:  # an id that occurs
            first.copy_(torch.where(first == x.amax(), x.amin(), x.amax()))
        return changed

    return map_tensors(batch, visit)


# A batch as one process receives it.


def copy_batch(batch: Any) -> Any:
    """A copy of a batch that a step may change."""
    return map_tensors(batch, lambda _, x: x.clone())


def complete_batch(batch: Any, rules: BatchRules) -> Any:
    """A copy with the positions and targets that a shard of it would have."""
    return copy_batch(add_positions_and_targets(batch, rules))


@contextmanager
def models_shift_labels(model: nn.Module, batch: Any, step_batch: Any) -> Iterator[None]:
    """Within the block, Hugging Face models shift labels themselves, when called with labels and our targets.

    The reference is the model's own loss; a step may pass its whole batch to the model.

    Args:
        model: contains the Hugging Face models.
        batch: if it has targets of its own, those are used.
        step_batch: the batch that the step receives.
    """
    ours = (
        step_batch[TARGETS].clone()
        if _has_targets(step_batch) and not _has_targets(batch)
        else None
    )

    def leave_out(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        targets = kwargs.get(TARGETS)
        if targets is None or kwargs.get("labels") is None or not is_same_labels(targets, ours):
            return None
        return args, {name: x for name, x in kwargs.items() if name != TARGETS}

    with ExitStack() as stack:
        for root in hf_models(model) if ours is not None else ():
            options = {"with_kwargs": True, "prepend": True}
            stack.callback(add_hook(root.register_forward_pre_hook, leave_out, **options))
        yield


def _has_targets(batch: Any) -> bool:
    return isinstance(batch, MutableMapping) and TARGETS in batch


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
