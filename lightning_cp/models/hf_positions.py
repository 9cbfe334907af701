"""Models that do not count positions 0, 1, 2, ..., or that cannot be told any."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from lightning_cp.errors import ConfigError, ShapeError
from lightning_cp.models.hf_own import is_relative
from lightning_cp.models.hf_signature import parameters_of
from lightning_cp.models.step_state import StepState


def own_positions(model: Any) -> str:
    """The module that counts positions in its own way, as "RobertaEmbeddings"; empty if there is none."""
    for module in model.modules():
        name = type(module).__name__
        if hasattr(module, _MAKER) or name in _FROM_MASK or _asks_its_file(module):
            return name
    return ""


_MAKER = "create_position_ids_from_input_ids"
"""The name under which transformers' models count from behind the padding index."""

_FROM_MASK = {"OPTLearnedPositionalEmbedding"}
"""Classes that count the tokens that are not padding, so that positions begin at 0 behind left padding."""


def _asks_its_file(module: nn.Module) -> bool:
    """Embeddings with learned positions, in a file where the maker is a function of its own (ESM)."""
    file = sys.modules.get(type(module).__module__)
    return hasattr(file, _MAKER) and isinstance(
        getattr(module, "position_embeddings", None), nn.Module
    )


def check_positions(state: StepState, name: str) -> None:
    """Refuse global positions 0, 1, 2, ... where one process would have counted otherwise.

    Raises:
        ConfigError: the batch brings no positions of its own, and they would be others than here.
    """
    if not name or not state.positions.from_zero:
        return
    layout = state.layout
    rows = layout.documents.rows if layout.documents is not None else ()
    if name in _FROM_MASK and all(not row.size or row[0, 0] == 0 for row in rows):
        return
    raise ConfigError(
        f"{name} does not count positions from 0 on (it looks at padding, or begins behind the padding "
        "index), which a rank cannot do from its own tokens. Put the position_ids that it would make "
        "into the batch (in the dataset or on_after_batch_transfer), for the whole sequence."
    )


def counts_alone(models: list[Any]) -> bool:
    """True if no model of these, one inside the other, can be told positions, and none is relative.

    A bias by distance (T5, BLOOM) needs no positions; whether it can be sharded is seen at its attention.
    """
    if any("position_ids" in parameters_of(model) for model in models):
        return False
    if is_relative(models[0]):
        return False
    return not any(hasattr(part, "relative_attention_bias") for part in models[0].modules())


def take_positions(roots: list[Any]) -> bool:
    """True if all of these Hugging Face models can be told positions 0, 1, 2, ..., and would count these."""
    for root in roots:
        inside = [part for part in root.modules() if hasattr(part, "_can_set_attn_implementation")]
        if own_positions(root) or counts_alone(inside):
            return False
    return True


def refuse_counting(model: Any, given: dict[str, Any]) -> None:
    """Refuse a call with tokens of a model that numbers them from 0 on every rank.

    Raises:
        ConfigError: naming the model.
    """
    if given.get("input_ids") is None and given.get("inputs_embeds") is None:
        return  # a tower for images or audio: its attention says what is wrong
    raise ConfigError(
        f"{type(model).__name__} takes no position_ids, and neither does any model inside: every rank would "
        "count its own tokens from 0, which is silently wrong. Use a model whose forward takes position_ids "
        "(in one of your own: add the argument, and number tokens by it), or a strategy without context "
        "parallelism."
    )


def positions_for(state: StepState, given: dict[str, Any]) -> torch.Tensor:
    """Global positions of the tokens of a call, which has the rows of the batch.

    Rows that all count 0, 1, 2, ... are of any number: a step may join the batch and what it made of it.

    Raises:
        ShapeError: other rows than the batch's, whose positions differ.
    """
    ours, rows = state.position_ids, rows_of(given)
    if ours.dim() != 2 or ours.shape[0] in (1, rows):
        return ours
    if state.positions.from_zero:
        return ours[:1].expand(rows, -1)
    raise ShapeError(
        f"the model is called with {rows} rows, but the batch has {ours.shape[0]}, whose positions differ. "
        "Call it with the rows of the batch, or make the others before it is sharded."
    )


def refuse_other_positions(state: StepState, given: torch.Tensor | None) -> None:
    """Refuse positions that are not the batch's, in whatever shape they are given.

    Raises:
        ConfigError: a rank that counts by itself would count from 0.
    """
    ours = state.position_ids
    if given is None or given is ours or given.shape[-1] != ours.shape[-1]:
        return
    if state.positions.from_zero:
        ours = ours.flatten(0, -2)[0]  # of all rows
    elif not _fit(given, ours):
        return  # of an inner model, in a form of its own
    if bool((given != ours.to(given.device)).any()):
        raise ConfigError(
            "the position_ids that the model was given are not the batch's: a rank's tokens do not follow "
            "each other, and packed documents are read from the batch before it is sharded. Use "
            "batch['position_ids'], or put yours into the batch (in the dataset or on_after_batch_transfer)."
        )


def _fit(given: torch.Tensor, ours: torch.Tensor) -> bool:
    sizes = zip(reversed(given.shape), reversed(ours.shape), strict=False)
    return all(a == b or 1 in (a, b) for a, b in sizes)


def rows_of(given: dict[str, Any]) -> int:
    """The number of rows of a call; 1 if that is not seen."""
    found = [given.get("input_ids"), given.get("inputs_embeds")]
    return next((x.shape[0] for x in found if x is not None), 1)
