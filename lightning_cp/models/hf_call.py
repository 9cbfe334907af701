"""Completing the calls of a Hugging Face model with what a shard cannot know."""

from __future__ import annotations

import inspect
from typing import Any

from lightning_cp.errors import ConfigError
from lightning_cp.models.handle import SwapHandle
from lightning_cp.models.hf_labels import accepted, complete_labels, label_alignment
from lightning_cp.models.hf_packing import check_call
from lightning_cp.models.hf_positions import check_positions


def complete_call(handle: SwapHandle, before: str, positions: str = "") -> Any:
    """A forward pre-hook: refuses what cannot be sharded, and adds positions, targets and their count.

    Args:
        handle: holds the active step, if there is one.
        before: the attention implementation that one process uses.
        positions: the module that counts positions in its own way, if there is one.
    """

    def complete(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = handle.state
        if state is None:
            return None
        args, given = _by_name(model, args, kwargs)
        _refuse_cache_and_weights(model, given)
        check_call(handle, model, given, before)
        check_positions(handle, positions)
        names = accepted(model)
        if "use_cache" in names:
            given["use_cache"] = False
        if given.get("position_ids") is None and "position_ids" in names:
            given["position_ids"] = state.position_ids
        if given.get("labels") is not None:
            complete_labels(model, given, state)
        elif model.training and not state.loss_outside and label_alignment(model) == "shift":
            raise ConfigError(_OUTSIDE)
        return args, given

    return complete


def _refuse_cache_and_weights(model: Any, given: dict[str, Any]) -> None:
    if given.get("past_key_values") is not None:
        raise ConfigError(
            "a key/value cache cannot be used under context parallelism: generate with cp_size=1."
        )
    asked = given.get("output_attentions")
    if getattr(model.config, "output_attentions", False) if asked is None else asked:
        raise ConfigError(
            f"{type(model).__name__} is called with output_attentions=True, but no rank has the attention "
            "weights: they are never made. Call it without, or with a strategy without context parallelism."
        )


def _by_name(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, all by name where the signature allows it."""
    parameters = inspect.signature(model.forward).parameters
    named = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(args) > len(named):
        return args, dict(kwargs)
    return (), {**dict(zip(named, args, strict=False)), **kwargs}


_OUTSIDE = (
    "the model was called without labels in training, so the loss is computed outside of it, where shifting "
    "labels (logits[:, :-1], labels[:, 1:]) would be silently wrong at every seam between ranks. Pass "
    "labels=batch['labels'] to the model; or take the targets from batch['shift_labels'] without shifting, "
    "and declare labels='shift'; or shift in the dataset and declare labels='aligned'."
)
