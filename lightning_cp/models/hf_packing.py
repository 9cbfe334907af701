"""Restarting positions: whether one process would take a row for one document or for several.

transformers (5.23, ``masking_utils``) isolates the documents of a row if the model is causal, is given
no ``attention_mask`` and has no cache. With a cache, the default even in training, it takes the row
for one document. flash-attention isolates by ``position_ids`` itself, in batches of one row, cache or not.
Here they are always isolated, so that what one process would not isolate is refused.
"""

from __future__ import annotations

import warnings
from itertools import pairwise
from typing import Any

import torch

from lightning_cp.errors import ConfigError
from lightning_cp.layout import Documents
from lightning_cp.models.handle import SwapHandle


def check_packing(handle: SwapHandle, model: Any, given: dict[str, Any], before: str) -> None:
    """Compare the documents of the batch with what one process would make of this call.

    Args:
        handle: holds the active step.
        model: the model that is called.
        given: its arguments by name, as the step gave them.
        before: the attention implementation that one process uses.

    Raises:
        ConfigError: positions that are not the batch's, or documents that one process would not isolate.
    """
    _refuse_other_positions(handle, given.get("position_ids"))
    _check_flash_boundaries(handle, given.get("cu_seq_lens_q"))
    if not restarts(handle):
        return
    if before.startswith("flash"):
        if _rows(given) > 1:
            raise ConfigError(
                f"position_ids restart in a batch of {_rows(given)} rows: in one process flash-attention "
                "reads packed documents only from batches of one row. Use a batch size of 1, or 'sdpa' with "
                "use_cache=False."
            )
    elif caches(model, given):
        raise ConfigError(
            f"position_ids restart (packed documents), but {type(model).__name__} is called with "
            "use_cache=True (the default of its config): in one process transformers then takes a row for "
            "one document, and every document would see the ones before it. Set model.config.use_cache = "
            "False, so that documents are isolated in one process as they are here; or take position_ids "
            "out of the batch."
        )


def restarts(handle: SwapHandle) -> bool:
    """Whether the batch is packed and local positions count within documents."""
    state = handle.state
    assert state is not None
    if not _packed(state.layout.documents):
        return False
    if state.restarts is None:
        here = state.layout.positions(handle.mesh.cp_rank)
        real = here < state.layout.seq_len
        ids = state.position_ids
        state.restarts = bool(((ids != here.to(ids.device)) & real.to(ids.device)).any())
    return state.restarts


def warn_if_isolated(handle: SwapHandle, name: str) -> None:
    """Bidirectional models: documents may have been declared, which only the batch knows."""
    if restarts(handle):
        warnings.warn(
            f"position_ids restart, so the documents of a row attend only to themselves; in one process "
            f"transformers takes a row of a bidirectional model ({name}) for one document.",
            stacklevel=2,
        )


def caches(model: Any, given: dict[str, Any]) -> bool:
    """Whether one process would make a cache, which hides packing from transformers' masks."""
    asked = given.get("use_cache")
    if asked is None:
        asked = getattr(model.config.get_text_config(), "use_cache", False)
    recomputing = any(getattr(part, "gradient_checkpointing", False) for part in model.modules())
    return bool(asked) and not (model.training and recomputing)


def _packed(documents: Documents | None) -> bool:
    return documents is not None and any(row.shape[0] > 1 for row in documents.rows)


def _rows(given: dict[str, Any]) -> int:
    found = [given.get("input_ids"), given.get("inputs_embeds")]
    return next((x.shape[0] for x in found if x is not None), 1)


def _refuse_other_positions(handle: SwapHandle, given: torch.Tensor | None) -> None:
    state = handle.state
    assert state is not None
    ours = state.position_ids
    if (
        given is None
        or given is ours
        or given.dim() != ours.dim()
        or given.shape[-1] != ours.shape[-1]
    ):
        return
    if bool((given != ours.to(given.device)).any()):
        raise ConfigError(
            "the position_ids that the model was given are not the batch's: a rank's tokens do not follow "
            "each other, and packed documents are read from the batch before it is sharded. Use "
            "batch['position_ids'], or put yours into the batch (in the dataset or on_after_batch_transfer)."
        )


def _check_flash_boundaries(handle: SwapHandle, given: torch.Tensor | None) -> None:
    state = handle.state
    assert state is not None
    if given is None:
        return
    documents = state.layout.documents or Documents.single(state.layout.seq_len)
    said = [[a, b] for a, b in pairwise(given.flatten().tolist()) if b > a]
    if documents.shared and documents.rows[0].tolist() == said:
        return
    raise ConfigError(
        "cu_seq_lens_q does not describe the documents of the batch, which are read from restarting "
        "position_ids, cu_seqlens or segment_ids. Put one of these into the batch, and leave cu_seq_lens_q "
        "and cu_seq_lens_k away."
    )
