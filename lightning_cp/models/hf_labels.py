"""What a Hugging Face model's loss is told: shifted targets, and how many there are."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from lightning_cp.errors import ConfigError
from lightning_cp.labels import IGNORED_LABEL
from lightning_cp.models.handle import StepState


def label_alignment(model: Any) -> str | None:
    """How the model's own loss reads ``labels``: "shift" (next token), "aligned", or ``None``: unknown.

    A model without a head takes no labels: the loss is the user's own.
    """
    if "labels" not in accepted(model):
        return None
    loss = getattr(model, "loss_function", None)
    kinds = {"ForCausalLMLoss": "shift", "ForMaskedLMLoss": "aligned"}
    return kinds.get(getattr(loss, "__name__", ""))


def accepted(model: Any) -> set[str]:
    """The names that a model can be called with."""
    return set(inspect.signature(model.forward).parameters)


def _takes_extra(model: Any) -> bool:
    parameters = inspect.signature(model.forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def complete_labels(model: Any, given: dict[str, Any], state: StepState) -> None:
    """Shifted labels and the count of targets, so that the model's own loss is a mean over targets."""
    if not _takes_extra(model):
        raise ConfigError(
            f"{type(model).__name__}.forward takes no extra arguments, so its loss cannot be told which "
            "targets its tokens have. Call it without labels, and compute the loss in the step from "
            "batch['shift_labels']."
        )
    targets = _shifted(given, state) if label_alignment(model) == "shift" else given["labels"]
    counted = state.aligned_labels
    if counted is not None and not same(targets, counted) and _count(targets) != state.valid_local:
        raise ConfigError(_CHANGED)
    if given.get("num_items_in_batch") is None:
        # A mean over no targets is 0/0; a sum divided by 1 is the 0 that it should be.
        given["num_items_in_batch"] = max(state.valid_local, 1)


_CHANGED = (
    "labels= are not the batch's, or were changed after it was sharded: shifting them now would be wrong "
    "at every seam between ranks, and the loss is weighted by the targets that were counted then. Pass "
    "the labels of the batch, and change them before (in on_after_batch_transfer or the dataset)."
)


def _shifted(given: dict[str, Any], state: StepState) -> torch.Tensor:
    """The targets of a model that shifts: what the step made itself, or ours if nothing was changed."""
    own, ours = given.get("shift_labels"), state.aligned_labels
    if own is not None and not same(own, ours):
        return own
    if ours is None or not same(given["labels"], state.labels):
        raise ConfigError(_CHANGED)
    given["shift_labels"] = ours
    return ours


def _count(targets: torch.Tensor) -> int:
    return int((targets != IGNORED_LABEL).sum())


def same(labels: torch.Tensor, sharded: torch.Tensor | None) -> bool:
    if sharded is None:
        return False
    return labels.shape == sharded.shape and torch.equal(labels, sharded)
