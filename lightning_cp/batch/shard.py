"""Shard of a batch for one rank, target counts of all ranks, and counts of a batch's tokens and documents."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from lightning_cp.batch.documents import DeclaredDocuments, padding_mask_of
from lightning_cp.batch.read import WholeBatch, read_batch
from lightning_cp.batch.rules import KNOWN_DIMS, PAD_VALUES, BatchRules
from lightning_cp.batch.tracked_batch import POSITIONS, TARGETS, TrackedBatch
from lightning_cp.errors import ConfigError, ShapeError
from lightning_cp.layout import Documents, SequenceLayout
from lightning_cp.utils.containers import ROOT, map_tensors, tensors_of
from lightning_cp.utils.labels import IGNORED_LABEL


@dataclass
class ShardedBatch:
    """Shard of a batch for one rank, with facts of the whole batch that the step and the loss need."""

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
    """Rows of the whole batch."""
    padding_mask: torch.Tensor | None = None
    """[B, S], mask of the whole batch, if it has one: 0 for padding."""

    @property
    def positions_ignored(self) -> bool:
        """True if the step is known not to have read positions: from a dict, or a batch without any."""
        if isinstance(self.batch, TrackedBatch):
            return not self.batch.positions_read
        return not self.positions_given and not isinstance(self.batch, MutableMapping)


def shard_batch(
    whole: WholeBatch,
    layout: SequenceLayout,
    cp_rank: int,
    rules: BatchRules,
    valid: tuple[int, ...] | None = None,
) -> ShardedBatch:
    """Return this rank's shard of a batch: pure indexing, no communication.

    Global ``position_ids`` (0 where padded), and aligned labels as ``shift_labels`` where the model shifts,
    are added to a dict that lacks them. ``valid`` is the result of ``valid_counts``, if already known.
    """

    tensors: dict[str, torch.Tensor] = {}

    def visit(name: str, x: torch.Tensor) -> torch.Tensor:
        if name in whole.dims:
            only_labels = name == rules.label_key and name not in (*KNOWN_DIMS, ROOT)
            pad = PAD_VALUES.get(name, IGNORED_LABEL if only_labels else 0)
            x = layout.shard(x, cp_rank, dim=whole.dims[name], pad_value=pad)
        tensors[name] = x
        return x

    local = map_tensors(whole.batch, visit)
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
        local = TrackedBatch(local)
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
        padding_mask_of(whole.tensors),
    )


def add_positions_and_targets(batch: Any, rules: BatchRules, *, positions: bool = True) -> Any:
    """Return a batch that no other rank shares, with the positions and targets that a shard of it would get.

    Args:
        batch: the whole batch.
        rules: rules for reading it.
        positions: add positions as well, not only targets.

    Returns:
        ``batch`` itself if it has them, is no dict, or its sequence is not known: one process may read it in
        ways that several cannot.
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
    """Return the targets of every context-parallel rank; tokens, if the batch has no labels."""
    if whole.aligned_labels is None:
        per_token = torch.full((whole.seq_len,), whole.rows, dtype=torch.int64)
    else:
        valid = (whole.aligned_labels != IGNORED_LABEL).movedim(whole.label_dim, -1)
        per_token = valid.flatten(0, -2).sum(0).cpu() if valid.dim() > 1 else valid.long().cpu()
    return layout.count_by_rank(per_token)


_MASK_KEY = "what tokens are counted by"
"""Key of the mask among copies to the host."""


@dataclass(eq=False)
class CountedBatch:
    """Counts of a whole batch: its rows, its documents, and the tokens that are not padding.

    It holds small copies on the host. Copies from a GPU are asynchronous, so that no step waits: test
    ``arrived`` before reading, or synchronise.
    """

    rows: int
    seq_len: int
    known: Documents | None = None
    """Documents of the layout, if there is one."""
    declared: DeclaredDocuments = field(default_factory=DeclaredDocuments)
    """Declarations without a layout: copies on the host."""
    mask: torch.Tensor | None = None
    """[B, S], 0 for padding, if the batch has one: a copy on the host."""
    event: torch.cuda.Event | None = None

    @classmethod
    def of_whole(cls, whole: WholeBatch, rules: BatchRules) -> CountedBatch:
        """Make the counts of a batch that was not sharded."""
        told = dict(DeclaredDocuments.of(whole, rules).found)
        return cls._on_host(whole.rows, whole.seq_len, None, told, padding_mask_of(whole.tensors))

    @classmethod
    def of_shard(cls, part: ShardedBatch, rules: BatchRules) -> CountedBatch:
        """Make the counts of the whole batch of which ``part`` is this rank's shard."""
        mask = None if rules.reads_masks else part.padding_mask  # otherwise it is in the documents
        layout = part.layout
        return cls._on_host(part.rows, layout.seq_len, layout.documents, {}, mask)

    @classmethod
    def _on_host(
        cls,
        rows: int,
        seq_len: int,
        known: Documents | None,
        told: Mapping[str, torch.Tensor],
        mask: torch.Tensor | None,
    ) -> CountedBatch:
        copies, event = _to_host({**told, **({} if mask is None else {_MASK_KEY: mask})})
        mask = copies.pop(_MASK_KEY, None)
        return cls(rows, seq_len, known, DeclaredDocuments(copies), mask, event)

    @property
    def is_ready(self) -> bool:
        """True if the copies are complete."""
        return self.event is None or self.event.query()

    @cached_property
    def documents(self) -> Documents:
        """Documents of attention; one over the whole sequence if the batch declares none."""
        found = self.known
        if found is None:
            found = self.declared.documents(self.seq_len, self.rows if self.rows > 1 else None)
        return Documents.single(self.seq_len) if found is None else found

    @cached_property
    def tokens(self) -> int:
        """Number of tokens that are not padding: by the mask [B, S] of the batch, or covered by documents."""
        if self.mask is not None:
            return int((self.mask != 0).sum()) * (self.rows // self.mask.shape[0])
        covered = sum(int((row[:, 1] - row[:, 0]).sum()) for row in self.documents.rows)
        return covered * (self.rows if self.documents.num_rows == 1 else 1)


def _to_host(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], torch.cuda.Event | None]:
    """Return copies, which a step cannot change, and the event of their completion."""
    copies = {n: x.detach().to("cpu", non_blocking=True, copy=True) for n, x in tensors.items()}
    if not any(x.is_cuda for x in tensors.values()):
        return copies, None
    event = torch.cuda.Event()
    event.record()
    return copies, event
