"""Arguments of a Hugging Face model's loss: shifted targets, and how many there are."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch

from lightning_cp.errors import ConfigError
from lightning_cp.labels import IGNORED_LABEL
from lightning_cp.loss_terms import divisor
from lightning_cp.models.hf_signature import parameters_of, takes_extra
from lightning_cp.models.step_state import StepState


def label_alignment(model: Any) -> str | None:
    """The way the model's own loss reads ``labels``: "shift" (next token), "aligned", or ``None``: unknown.

    A model without a head takes no labels: the loss is the user's own. "shift" is also what transformers
    says of classes that it does not know; whether it is so is seen when they are called (``LossWatch``).
    """
    if "labels" not in parameters_of(model):
        return None
    loss = getattr(model, "loss_function", None)
    kinds = {
        "ForCausalLMLoss": "shift",
        "ForMaskedLMLoss": "aligned",
        "ForTokenClassification": "aligned",
    }
    return kinds.get(getattr(loss, "__name__", ""))


def complete_labels(model: Any, given: dict[str, Any], state: StepState) -> None:
    """Shifted labels and the count of targets, so that the model's own loss is a mean over targets.

    Raises:
        ConfigError: labels that are not the batch's, are read otherwise than was declared, or a count
            that is not that of this rank's targets.
    """
    name, kind = type(model).__name__, label_alignment(model)
    if not takes_extra(model):
        raise ConfigError(
            f"{name}.forward takes no extra arguments, so its loss cannot be told which targets its tokens "
            "have. Call it without labels, and compute the loss in the step from batch['shift_labels']."
        )
    _refuse_other_kind(name, kind, given, state)
    targets = _shifted(given, state) if kind == "shift" else given["labels"]
    known = state.aligned_labels
    # What was counted in the step is compared with what the loss counts before the optimizer's step.
    changed = known is not None and state.counted is None and not same(targets, known)
    if changed and _count(targets) != state.valid_local:
        raise ConfigError(_CHANGED)
    # A mean over no targets is 0/0; a sum divided by 1 is the 0 that it should be.
    items = divisor(state.targets)
    asked = given.get("num_items_in_batch")
    if asked is not None and float(asked) != items:
        raise ConfigError(
            f"{name} is called with num_items_in_batch={float(asked):g}, but this rank has {items} targets: "
            "its loss would be no mean over them, and the mean is what ranks weight. Leave "
            "num_items_in_batch away: the count is filled in."
        )
    given["num_items_in_batch"] = items if asked is None else asked
    state.labels_taken |= is_trained(model, given) or not state.trains


def is_trained(model: Any, given: dict[str, Any]) -> bool:
    """True if a loss of this call may train something, now or where it is computed again."""
    inputs = (x for x in given.values() if isinstance(x, torch.Tensor))
    return any(x.requires_grad for x in chain(model.parameters(), inputs))


def require_taken(state: StepState) -> None:
    """At the end of a step: refuse it if no model was given the labels, which it may have shifted itself."""
    if not state.labels_taken:
        refuse_outside(state)


def refuse_outside(state: StepState) -> None:
    """Refuse a loss of shifted labels that the step computes, or is about to, while nobody said how.

    Raises:
        ConfigError: saying what to declare.
    """
    if state.loss_outside or not state.needs_loss:
        return
    if state.labels_read == "shift" and state.aligned_labels is not None:
        raise ConfigError(_OUTSIDE)


_OUTSIDE = (
    "the model was called without labels, so the loss is computed outside of it, where shifting "
    "labels (logits[:, :-1], labels[:, 1:]) would be silently wrong at every seam between ranks. Pass "
    "labels=batch['labels'] to the model; or take the targets from batch['shift_labels'] without shifting, "
    "and declare labels='shift'; or shift in the dataset and declare labels='aligned'."
)


def _refuse_other_kind(
    name: str, kind: str | None, given: dict[str, Any], state: StepState
) -> None:
    if state.labels_read == "aligned" and kind == "shift" and given.get("shift_labels") is None:
        raise ConfigError(
            f"labels='aligned' is declared, but {name} shifts its labels by itself: they would be shifted "
            "twice. Call it without labels and compute the loss in the step, or leave the dataset's labels "
            "unshifted and the declaration away."
        )
    if state.labels_read == "shift" and kind != "shift":
        raise ConfigError(
            f"labels='shift' is declared, but {name} does not shift its labels: the loss is weighted by "
            "other targets than it reads. Declare labels='aligned', or call it without labels and compute "
            "the loss in the step from batch['shift_labels']."
        )


_CHANGED = (
    "labels= are not the batch's, or were changed after it was sharded: shifting them now would be wrong "
    "at every seam between ranks, and the loss is weighted by the targets that were counted then. Pass "
    "the labels of the batch, and change them before (in on_after_batch_transfer or the dataset). Targets "
    "that the step draws: call count_targets(mask) before the model; one that shifts takes them as "
    "shift_labels=, the target of each token."
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
