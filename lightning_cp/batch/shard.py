"""One rank's part of a batch, and how many targets every rank has."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_cp.batch.documents import padding_mask_of
from lightning_cp.batch.noted import POSITIONS, TARGETS, NotedBatch
from lightning_cp.batch.read import WholeBatch, read_batch
from lightning_cp.batch.rules import KNOWN_DIMS, PAD_VALUES, BatchRules
from lightning_cp.containers import ROOT, map_tensors, tensors_of
from lightning_cp.errors import ConfigError, ShapeError
from lightning_cp.labels import IGNORED_LABEL
from lightning_cp.layout import SequenceLayout


@dataclass
class ShardedBatch:
    """One rank's part of a batch, and what the step and the loss need to know of the whole."""

    batch: Any
    layout: SequenceLayout
    position_ids: torch.Tensor
    positions_given: bool
    """The dataset made the positions."""
    labels: torch.Tensor | None
    aligned_labels: torch.Tensor | None
    valid: tuple[int, ...]
    """Targets (tokens, if there are no labels) of every context-parallel rank."""
    rows: int = 1
    """Of the whole batch."""
    padding_mask: torch.Tensor | None = None
    """[B, S], of the whole batch, if it has one: 0 for padding."""

    @property
    def positions_ignored(self) -> bool:
        """The step did not read positions, as far as can be seen: from a dict, or from what has none."""
        if isinstance(self.batch, NotedBatch):
            return not self.batch.positions_read
        return not self.positions_given and not isinstance(self.batch, MutableMapping)


def shard_batch(
    whole: WholeBatch,
    layout: SequenceLayout,
    cp_rank: int,
    rules: BatchRules,
    valid: tuple[int, ...] | None = None,
) -> ShardedBatch:
    """This rank's part of a batch: pure indexing, no communication.

    Global ``position_ids`` go along (0 where padded), and aligned labels as ``shift_labels`` where the
    model shifts; both are added to a dict that lacks them. ``valid`` is what ``valid_counts`` says, if
    that is known already.
    """

    def visit(name: str, x: torch.Tensor) -> torch.Tensor:
        if name not in whole.dims:
            return x
        only_labels = name == rules.label_key and name not in (*KNOWN_DIMS, ROOT)
        pad = PAD_VALUES.get(name, IGNORED_LABEL if only_labels else 0)
        return layout.shard(x, cp_rank, dim=whole.dims[name], pad_value=pad)

    local = map_tensors(whole.batch, visit)
    tensors = dict(tensors_of(local))
    aligned = whole.aligned_labels
    aligned_local = None
    if aligned is not None:
        aligned_local = layout.shard(aligned, cp_rank, dim=whole.label_dim, pad_value=IGNORED_LABEL)
    positions = whole.positions_in(tensors)
    given = positions is not None
    if positions is None:
        device = tensors[next(iter(whole.dims))].device
        global_positions = layout.positions(cp_rank).to(device)
        positions = global_positions.masked_fill(global_positions >= layout.seq_len, 0)
        positions = positions.expand(whole.rows, -1)
    if type(local) is dict and POSITIONS not in local:
        local = NotedBatch(local)
    if isinstance(local, MutableMapping):
        added = {POSITIONS: positions}
        if rules.labels == "shift" and aligned_local is not None:
            added[TARGETS] = aligned_local
        for name in (
            added.keys() - local.keys()
        ):  # outputs of Hugging Face models have no setdefault
            local[name] = added[name]
    return ShardedBatch(
        local,
        layout,
        positions,
        given,
        tensors.get(rules.label_key),
        aligned_local,
        valid_counts(whole, layout) if valid is None else valid,
        whole.rows,
        padding_mask_of(whole.batch),
    )


def completed(batch: Any, rules: BatchRules, *, positions: bool = True) -> Any:
    """A batch that no other rank shares: as it is, and with what a shard of it would have been given.

    Args:
        batch: all of it.
        rules: how it is read.
        positions: are given as well, not the targets alone.

    Returns:
        ``batch`` itself where it has them, is no dict, or what its sequence is cannot be said: one process
        may read it in ways that several cannot.
    """
    if not isinstance(batch, MutableMapping):
        return batch
    added: dict[str, torch.Tensor] = {}
    whole = _read(batch, replace(rules, labels="ignore"))
    if whole is not None and positions and POSITIONS not in batch:
        device = dict(tensors_of(batch))[next(iter(whole.dims))].device
        added[POSITIONS] = torch.arange(whole.seq_len, device=device).expand(whole.rows, -1)
    shifted = _read(batch, rules) if rules.labels == "shift" and TARGETS not in batch else None
    if shifted is not None and shifted.aligned_labels is not None:
        added[TARGETS] = shifted.aligned_labels
    if not added:
        return batch
    local = map_tensors(batch, lambda name, x: x)
    for name, x in added.items():  # outputs of Hugging Face models have no update
        local[name] = x
    return local


def _read(batch: Any, rules: BatchRules) -> WholeBatch | None:
    try:
        return read_batch(batch, rules, needs_labels=False)
    except (ConfigError, ShapeError):
        return None


def valid_counts(whole: WholeBatch, layout: SequenceLayout) -> tuple[int, ...]:
    """Targets of every context-parallel rank; tokens, if the batch has no labels."""
    if whole.aligned_labels is None:
        per_token = torch.full((whole.seq_len,), whole.rows, dtype=torch.int64)
    else:
        valid = (whole.aligned_labels != IGNORED_LABEL).movedim(whole.label_dim, -1)
        per_token = valid.flatten(0, -2).sum(0).cpu() if valid.dim() > 1 else valid.long().cpu()
    return tuple(int(layout.shard(per_token, rank, dim=0).sum()) for rank in range(layout.cp_size))
