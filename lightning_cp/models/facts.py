"""Facts of a batch's positions before it is sharded: the same on every rank.

A rank sees its own tokens only. What it found out from these alone another rank might not find, and would
wait in a collective for one that has raised.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_cp.layout import Documents, SequenceLayout
from lightning_cp.layout.documents import text_positions


@dataclass(frozen=True)
class PositionFacts:
    """Facts of the positions of the whole batch."""

    from_zero: bool = True
    """They are 0, 1, 2, ... in every row, as where the batch brings none."""
    count_anew: bool = False
    """Those of the text are not 0, 1, 2, ... and a constant; in packed rows, not 0, 1, 2, ..."""
    packed: bool = False
    """A row has several documents, whoever declared them."""
    longest: int = -1
    """The largest position of all; -1 if that was not looked at."""

    @property
    def restart(self) -> bool:
        """The batch is packed, and positions count within documents."""
        return self.packed and self.count_anew


def position_facts(position_ids: torch.Tensor | None, layout: SequenceLayout) -> PositionFacts:
    """Read the positions of a batch.

    Args:
        position_ids: integers [..., S], of the whole sequence, if the batch brings any.
        layout: of the batch, with its documents.
    """
    packed = _packed(layout.documents)
    if position_ids is None:
        return PositionFacts(packed=packed, longest=layout.seq_len - 1)
    ahead = position_ids - torch.arange(layout.seq_len, device=position_ids.device)
    text = text_positions(ahead)
    anew = ahead.new_zeros(()) if text is None else (text != (0 if packed else text[..., :1])).any()
    said = (ahead.any().long(), anew.long(), position_ids.max())
    moved, anew, longest = torch.stack(said).tolist()  # at once: of a GPU each waits for it
    return PositionFacts(not moved, bool(anew), packed, longest)


def _packed(documents: Documents | None) -> bool:
    return documents is not None and any(row.shape[0] > 1 for row in documents.rows)
