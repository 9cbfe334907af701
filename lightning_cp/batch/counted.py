"""What is counted of a batch: its rows, its documents, and the tokens that are not padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from lightning_cp.batch.documents import documents_of, padding_mask_of
from lightning_cp.batch.read import WholeBatch
from lightning_cp.batch.rules import BatchRules
from lightning_cp.batch.shard import ShardedBatch
from lightning_cp.containers import tensors_of
from lightning_cp.layout import Documents

TELL_DOCUMENTS = ("cu_seqlens", "segment_ids", "attention_mask", "position_ids")


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
    rules: BatchRules | None = None
    """How documents are read from ``copies``; ``None`` where that has been done."""
    copies: Mapping[str, torch.Tensor] = field(default_factory=dict)
    event: torch.cuda.Event | None = None

    @classmethod
    def of_whole(cls, whole: WholeBatch, rules: BatchRules) -> CountedBatch:
        """Of a batch that was not sharded."""
        told = {n: x for n, x in tensors_of(whole.batch) if n in TELL_DOCUMENTS}
        if not rules.reads_masks:
            told.pop("position_ids", None)
        copies, event = _to_host(told)
        return cls(whole.rows, whole.seq_len, None, rules, copies, event)

    @classmethod
    def of_shard(cls, part: ShardedBatch, rules: BatchRules) -> CountedBatch:
        """Of the whole of which ``part`` is this rank's."""
        mask = None if rules.reads_masks else part.padding_mask  # else it is in the documents
        copies, event = _to_host({} if mask is None else {"attention_mask": mask})
        layout = part.layout
        return cls(part.rows, layout.seq_len, layout.documents, None, copies, event)

    @property
    def arrived(self) -> bool:
        """Whether reading waits for nothing."""
        return self.event is None or self.event.query()

    @cached_property
    def documents(self) -> Documents:
        """The documents that attention keeps apart; one over the whole sequence if the batch tells none."""
        found = self.known
        if self.rules is not None:
            copied = WholeBatch(dict(self.copies), {}, self.seq_len, self.rows, None)
            found = documents_of(copied, self.rules)
        return Documents.single(self.seq_len) if found is None else found

    @cached_property
    def tokens(self) -> int:
        """Tokens that are not padding: what the mask [B, S] of the batch leaves, or what documents cover."""
        mask = padding_mask_of(self.copies)
        if mask is not None:
            return int((mask != 0).sum()) * (self.rows // mask.shape[0])
        covered = sum(int((row[:, 1] - row[:, 0]).sum()) for row in self.documents.rows)
        return covered * (self.rows if self.documents.num_rows == 1 else 1)


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
