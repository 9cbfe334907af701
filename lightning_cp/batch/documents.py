"""The documents that a batch declares."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lightning_cp.batch.read import WholeBatch
from lightning_cp.batch.rules import BatchRules
from lightning_cp.containers import tensors_of
from lightning_cp.errors import ConfigError
from lightning_cp.labels import IGNORED_LABEL
from lightning_cp.layout import Documents


def documents_of(whole: WholeBatch, rules: BatchRules) -> Documents | None:
    """The documents that a batch declares, or ``None``: one document.

    ``cu_seqlens`` (``[documents + 1]`` for all rows, or one line for each) and ``segment_ids`` are taken
    always; a padding mask and restarting positions only if the model itself reads them.

    Raises:
        ConfigError: a dense attention mask, or targets on the padding behind a row.
        ShapeError: boundaries that do not describe this batch.
    """
    tensors = dict(tensors_of(whole.batch))
    if "cu_seqlens" in tensors:
        return Documents.from_cu_seqlens(tensors["cu_seqlens"], whole.seq_len)
    if "segment_ids" in tensors:
        return Documents.from_segment_ids(tensors["segment_ids"])
    if not rules.reads_masks:
        return None
    mask, positions = tensors.get("attention_mask"), tensors.get("position_ids")
    if mask is not None and mask.dim() != 2:
        raise ConfigError(
            f"an attention_mask of shape {tuple(mask.shape)} cannot be sharded: what can be expressed is a "
            "2-D padding mask, packed documents (restarting position_ids, cu_seqlens or segment_ids), "
            "causality and sliding windows."
        )
    if mask is not None and not bool(mask.all()):
        _refuse_padded_targets(mask, whole.aligned_labels)
        return Documents.from_padding_mask(mask)
    if mask is None and positions is not None and positions.dim() == 2:
        return Documents.from_position_ids(positions)
    return None


def padding_mask_of(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """The batch's mask [B, S] that is 0 for padding, whether the model reads it or not."""
    mask = tensors.get("attention_mask")
    return mask if mask is not None and mask.dim() == 2 else None


def _refuse_padded_targets(mask: torch.Tensor, aligned: torch.Tensor | None) -> None:
    """In one process padding behind a row sees the row, and its loss counts; here it sees nothing.

    Padding before a row sees nothing in one process either, so that the target which shifting puts on
    the last of it is no error.
    """
    if aligned is None or aligned.shape != mask.shape:
        return
    behind = (mask == 0) & (mask.cumsum(1) > 0)
    count = int((behind & (aligned != IGNORED_LABEL)).sum())
    if count:
        raise ConfigError(
            f"{count} target(s) of this batch stand on padding (attention_mask 0 behind a row's tokens), "
            "which is not computed under context parallelism. Set the labels of padding to -100."
        )
