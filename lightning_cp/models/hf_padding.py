"""True if the padding that a model is told of is the padding of the batch, which the layout knows."""

from __future__ import annotations

import torch

from lightning_cp.errors import ConfigError
from lightning_cp.layout import SequenceLayout
from lightning_cp.models.step_state import StepState


def check_padding(
    state: StepState, cp_rank: int, mask: torch.Tensor | None, *, causal: bool
) -> None:
    """Refuse a padding mask that is not the batch's, or one that the batch has and the model was not given.

    Args:
        state: of the active step.
        cp_rank: whose tokens the model was given.
        mask: bool [B, L], what the model was given of the local tokens.
        causal: padding behind a row is seen by no token of it, so that it may be left out.

    Raises:
        ConfigError: the layout treats other tokens as padding than the model would.
    """
    layout = state.layout
    if mask is None:
        if _matters(layout, causal):
            raise ConfigError(
                "the batch has an attention_mask with padding, but the model was called without it, so one "
                "process would attend to padding. Pass attention_mask=batch['attention_mask'] to the model, "
                "or take it out of the batch."
            )
        return
    if state.tokens is None:
        state.tokens = _tokens(layout, cp_rank).to(mask.device)
    real, kept = state.tokens
    if bool(((mask.bool() != kept) & real).any()):
        raise ConfigError(
            "the attention_mask that the model was given is not the batch's: what a token may see is taken "
            "from the batch before it is sharded, so a mask that is made or changed in the step would be "
            "ignored. Put attention_mask into the batch (in the dataset or on_after_batch_transfer)."
        )


def _matters(layout: SequenceLayout, causal: bool) -> bool:
    """True if a token would see padding if nobody said that it is padding."""
    if layout.documents is None:
        return False
    for row in layout.documents.rows:
        if not row.shape[0]:
            continue
        before_or_between = int(row[-1, 1]) - int((row[:, 1] - row[:, 0]).sum())
        behind = layout.seq_len - int(row[-1, 1])
        if before_or_between or (behind and not causal):
            return True
    return False


def _tokens(layout: SequenceLayout, cp_rank: int) -> torch.Tensor:
    """bool [2, rows, L]: local tokens within the sequence, and within a document."""
    rows = layout.documents.rows if layout.documents is not None else ()
    kept = torch.full((max(len(rows), 1), layout.padded_len), layout.documents is None)
    for index, row in enumerate(rows):
        for start, end in row.tolist():
            kept[index, start:end] = True
    positions = layout.positions(cp_rank)
    real = (positions < layout.seq_len).expand(kept.shape[0], -1)
    return torch.stack([real, kept[:, positions]])
