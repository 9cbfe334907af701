"""Counts of a batch: its rows, its documents, and the tokens that are not padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from lightning_cp.batch.documents import Declared, padding_mask_of
from lightning_cp.batch.read import WholeBatch
from lightning_cp.batch.rules import BatchRules
from lightning_cp.batch.shard import ShardedBatch
from lightning_cp.layout import Documents


@dataclass(eq=False)
class CountedBatch:
    """A whole batch as far as counting needs it; small copies on the host, read when they have arrived.

    Copies from a GPU are made while it goes on, so that no step waits for it: ask ``arrived`` first, or
    synchronise.
    """

    rows: int
    seq_len: int
    known: Documents | None = None
    """The documents, where a layout has them."""
    declared: Declared = field(default_factory=Declared)
    """What tells them elsewhere: copies on the host."""
    mask: torch.Tensor | None = None
    """[B, S], 0 for padding, if the batch has one: a copy on the host."""
    event: torch.cuda.Event | None = None

    @classmethod
    def of_whole(cls, whole: WholeBatch, rules: BatchRules) -> CountedBatch:
        """Of a batch that was not sharded."""
        told = dict(Declared.of(whole, rules).found)
        return cls._on_host(whole.rows, whole.seq_len, None, told, padding_mask_of(whole.batch))

    @classmethod
    def of_shard(cls, part: ShardedBatch, rules: BatchRules) -> CountedBatch:
        """Of the whole of which ``part`` is this rank's."""
        mask = None if rules.reads_masks else part.padding_mask  # else it is in the documents
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
        copies, event = _to_host({**told, **({} if mask is None else {_COUNTED: mask})})
        mask = copies.pop(_COUNTED, None)
        return cls(rows, seq_len, known, Declared(copies), mask, event)

    @property
    def arrived(self) -> bool:
        """True if reading waits for nothing."""
        return self.event is None or self.event.query()

    @cached_property
    def documents(self) -> Documents:
        """The documents that attention keeps apart; one over the whole sequence if the batch tells none."""
        found = self.known
        if found is None:
            found = self.declared.documents(self.seq_len, self.rows if self.rows > 1 else None)
        return Documents.single(self.seq_len) if found is None else found

    @cached_property
    def tokens(self) -> int:
        """Tokens that are not padding: what the mask [B, S] of the batch leaves, or what documents cover."""
        if self.mask is not None:
            return int((self.mask != 0).sum()) * (self.rows // self.mask.shape[0])
        covered = sum(int((row[:, 1] - row[:, 0]).sum()) for row in self.documents.rows)
        return covered * (self.rows if self.documents.num_rows == 1 else 1)


_COUNTED = "what tokens are counted by"


def _to_host(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], torch.cuda.Event | None]:
    """Copies, which a step cannot change, and what says that they are there."""
    copies = {n: x.detach().to("cpu", non_blocking=True, copy=True) for n, x in tensors.items()}
    if not any(x.is_cuda for x in tensors.values()):
        return copies, None
    event = torch.cuda.Event()
    event.record()
    return copies, event
