"""Restarting positions: whether one process would take a row for one document or for several.

transformers (5.23, ``masking_utils``) isolates the documents of a row if the model is causal, is given
no ``attention_mask`` and has no cache. With a cache, the default even in training, it takes the row
for one document. flash-attention isolates by ``position_ids`` itself, in batches of one row, cache or not.
Here the documents of the batch are always isolated, so that what one process would not isolate is refused.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from lightning_cp import console
from lightning_cp.errors import ConfigError
from lightning_cp.layout import Documents, SequenceLayout
from lightning_cp.layout.documents import text_positions
from lightning_cp.models.hf_positions import refuse_other_positions, rows_of
from lightning_cp.models.step_state import StepState


def check_call(state: StepState, model: Any, given: dict[str, Any], before: str) -> None:
    """When a model is called: its positions are the batch's, and whether one process would make a cache.

    Args:
        state: of the active step.
        model: the model that is called.
        given: its arguments by name, as the step gave them.
        before: the attention implementation that one process uses.

    Raises:
        ConfigError: positions that are not the batch's, or documents that one process would not isolate.
    """
    refuse_other_positions(state, given.get("position_ids"))
    _check_flash_boundaries(state.layout, given.get("cu_seq_lens_q"))
    if not state.positions.restart:
        return
    if "flash" in before and rows_of(given) > 1:
        raise ConfigError(
            f"position_ids restart in a batch of {rows_of(given)} rows: in one process flash-attention "
            "reads packed documents only from batches of one row. Use a batch size of 1, or 'sdpa' with "
            "use_cache=False."
        )
    if "flash" not in before and _caches(model, given):
        # Kept for the models inside: they are called with use_cache=False by ours.
        state.cached_by = type(model).__name__


def check_mask(
    state: StepState, model: str, *, causal: bool, given: bool, folded: bool, before: str
) -> None:
    """When a model makes its mask: one process would isolate the same documents.

    Args:
        state: of the active step.
        model: its type, for messages.
        causal: what the mask is.
        given: the model was given an ``attention_mask``.
        folded: transformers found the (local) positions to restart, and put that into the mask.
        before: the attention implementation that one process uses.

    Raises:
        ConfigError: one process would isolate other documents. With ``folded`` it depends on this
            rank's tokens whether it does.
    """
    if not state.positions.restart:
        if causal and folded and not state.cached_by and state.positions.count_anew:
            raise ConfigError(_UNDECLARED)
    elif not causal:
        return
    elif state.cached_by:
        raise ConfigError(
            f"position_ids restart (packed documents), but {state.cached_by} is called with "
            "use_cache=True (the default of its config): in one process transformers then takes a row for "
            "one document, and every document sees the ones before it. Set model.config.use_cache = "
            "False, so that documents are isolated in one process as they are here; or take position_ids "
            "out of the batch."
        )
    elif given:
        raise ConfigError(
            "position_ids restart (packed documents), but the model is given an attention_mask as well: in "
            "one process transformers then takes a row for one document. Call the model without "
            "attention_mask, or take position_ids out of the batch."
        )
    elif not folded and "flash" not in before and _jumps(state.position_ids):
        raise ConfigError(
            f"position_ids restart (packed documents), but {model} does not read them when it makes its "
            "mask: in one process it takes a row for one document. Say where documents are with segment_ids "
            "or cu_seqlens in the batch, and take position_ids out; or use batches that are not packed."
        )


def warn_isolated(warned: set[str], model: str) -> None:
    """Say once of a bidirectional model that its documents are isolated here."""
    if model in warned:
        return
    warned.add(model)
    console.warn(
        "position_ids restart, so the documents of a row attend only to themselves; in one process "
        f"transformers takes a row of a bidirectional model ({model}) for one document."
    )


_UNDECLARED = (
    "the position_ids of the batch restart and the model is called without attention_mask, so one process "
    "would isolate packed documents; but the batch has an attention_mask, and so its rows are single "
    "documents here. Take attention_mask out of the batch, or pass it to the model."
)


def _jumps(position_ids: torch.Tensor) -> bool:
    text = text_positions(position_ids)
    return text is not None and bool((text.diff(dim=-1) != 1).any())


def _caches(model: Any, given: dict[str, Any]) -> bool:
    """True if one process would make a cache, which hides packing from transformers' masks."""
    asked = given.get("use_cache")
    if asked is None:
        asked = getattr(model.config.get_text_config(), "use_cache", False)
    recomputing = any(getattr(part, "gradient_checkpointing", False) for part in model.modules())
    return bool(asked) and not (model.training and recomputing)


def _check_flash_boundaries(layout: SequenceLayout, given: torch.Tensor | None) -> None:
    if given is None:
        return
    documents = layout.documents or Documents.single(layout.seq_len)
    said = [[a, b] for a, b in pairwise(given.flatten().tolist()) if b > a]
    if documents.shared and documents.rows[0].tolist() == said:
        return
    raise ConfigError(
        "cu_seq_lens_q does not describe the documents of the batch, which are read from restarting "
        "position_ids, cu_seqlens or segment_ids. Put one of these into the batch, and leave cu_seq_lens_q "
        "and cu_seq_lens_k away."
    )
