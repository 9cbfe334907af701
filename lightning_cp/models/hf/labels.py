"""Loss of a Hugging Face model: shifted targets, their count, and checks that the loss used them.

transformers names a loss function for every class, also for those that never call it. The name is therefore
trusted only once the function was called with the targets and their count, and the model returned its result
unchanged (``LossWatch``).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch

from lightning_cp.batch.step_state import StepState
from lightning_cp.errors import ConfigError
from lightning_cp.loss.terms import divisor, targets_of
from lightning_cp.models.handle import SwapHandle
from lightning_cp.models.hf.positions import parameters_of, takes_extra
from lightning_cp.models.hf.router_loss import router_coefficients
from lightning_cp.utils.autograd_notes import Count, note_origin
from lightning_cp.utils.labels import IGNORED_LABEL
from lightning_cp.utils.patching import PatchSet, add_hook
from lightning_cp.utils.tracing import exclude_from_compile


def label_alignment(model: Any) -> str | None:
    """Return the model's reading of ``labels``: "shift" (next token), "aligned", or ``None``: unknown.

    A model without a head takes no labels: the user computes the loss. "shift" is also transformers' default
    for classes that it does not know; ``LossWatch`` verifies it at the call.
    """
    if "labels" not in parameters_of(model):
        return None
    loss = getattr(model, "loss_function", None)
    kinds = {
        "ForCausalLMLoss": "shift",
        "ForMaskedLMLoss": "aligned",
        "ForTokenClassification": "aligned",
        "ForSequenceClassificationLoss": "none",
    }
    return kinds.get(getattr(loss, "__name__", ""))


def complete_labels(model: Any, call: dict[str, Any], state: StepState) -> None:
    """Add shifted labels and the count of targets, so that the model's own loss is a mean over targets.

    Raises:
        ConfigError: labels that are not the batch's, that the model reads in another way than declared, or
            a count that differs from this rank's targets.
    """
    name, kind = type(model).__name__, label_alignment(model)
    if not takes_extra(model):
        raise ConfigError(
            f"{name}.forward takes no extra arguments, so its loss cannot receive the targets of its tokens. "
            "Call it without labels, and compute the loss in the step from batch['shift_labels']."
        )
    _check_alignment(name, kind, call, state)
    targets = _shifted(call, state) if kind == "shift" else call["labels"]
    known = state.aligned_labels
    # A count declared in the step is compared with the loss's count before the optimizer's step.
    changes = known is not None and state.counted is None and targets is not known
    if changes:
        state.refuse_if((targets != IGNORED_LABEL).sum() != state.valid_local, _CHANGED)
    # A mean over no targets is 0/0; a sum divided by 1 is 0, as it must be.
    items = divisor(state.targets)
    asked = call.get("num_items_in_batch")
    if asked is not None and float(asked) != items:
        raise ConfigError(
            f"{name} is called with num_items_in_batch={float(asked):g}, but this rank has {items} targets: "
            "its loss would be no mean over them, and the mean is what ranks weight. Leave "
            "num_items_in_batch away: the count is filled in."
        )
    call["num_items_in_batch"] = items if asked is None else asked
    state.labels_taken |= is_trained(model, call) or not state.trains


def is_trained(model: Any, call: dict[str, Any]) -> bool:
    """True if a loss of this call may train something, now or in a recomputation."""
    for x in chain(model.parameters(), call.values()):
        if isinstance(x, torch.Tensor) and x.requires_grad:
            return True
    return False


def check_labels_used(state: StepState) -> None:
    """Check, at the end of a step, that a model got the labels; the step may have shifted them itself."""
    if not state.labels_taken:
        check_loss_inside(state)


def check_loss_inside(state: StepState) -> None:
    """Refuse a loss of shifted labels that the step computes itself, without a declaration of the labels.

    Raises:
        ConfigError: naming what to declare.
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


def _check_alignment(name: str, kind: str | None, call: dict[str, Any], state: StepState) -> None:
    if state.labels_read == "aligned" and kind == "shift" and call.get("shift_labels") is None:
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


_WITHOUT_LABELS = (
    "the model was called with labels=, but labels='none' says that batches have no labels of tokens, so "
    "that ranks have counted none, and shift none over their ends. Declare labels='shift'; or leave labels= "
    "out of the call, and compute the loss from sequence_sum, sequence_mean, sequence_pick or unshard. "
    "Targets that the step draws: call count_targets(mask), and give the model shift_labels=."
)


def _shifted(call: dict[str, Any], state: StepState) -> torch.Tensor:
    """Return the targets of a model that shifts: the step's own, or the batch's if labels are unchanged."""
    own, ours = call.get("shift_labels"), state.aligned_labels
    labels, sharded = call["labels"], state.labels
    changed = None
    if sharded is not None and labels.shape == sharded.shape:
        changed = (labels != sharded).any()
    if own is None:
        if state.labels_read == "none":
            raise ConfigError(_WITHOUT_LABELS)
        if ours is None or changed is None:
            raise ConfigError(_CHANGED)
        state.refuse_if(changed, _CHANGED)
        call["shift_labels"] = ours
        return ours
    if ours is not None and own.shape == ours.shape:  # other targets are the step's own
        is_same = (own == ours).all()
        state.refuse_if(is_same if changed is None else is_same & changed, _CHANGED)
    return own


def is_same_labels(labels: torch.Tensor, sharded: torch.Tensor | None) -> bool:
    if sharded is None or labels is sharded:
        return labels is sharded
    return labels.shape == sharded.shape and torch.equal(labels, sharded)


class LossWatch:
    """Check that one model's loss is the result of its loss function on the given targets."""

    def __init__(self, handle: SwapHandle, model: Any) -> None:
        self._handle = handle
        self._model = model
        self._note_uncompiled = exclude_from_compile(self._note)
        self._call: dict[str, Any] | None = None
        self._computed_loss: torch.Tensor | None = None

    def attach(self) -> None:
        """Watch in every step, until the swap is undone."""
        self._handle.on_activate(self._replace)
        leave = exclude_from_compile(self._leave)
        self._handle.on_undo(add_hook(self._model.register_forward_hook, leave))

    def begin_call(self, call: dict[str, Any]) -> None:
        """Record the arguments of the model's next call."""
        self._call = call if call.get("labels") is not None else None
        self._computed_loss = self._handle.router_loss = None

    def _replace(self) -> Callable[[], None]:
        """Wrap the model's loss function for one step; return the undo function."""
        model = self._model
        static = inspect.getattr_static(type(model), "loss_function", None)
        key = "_loss_function" if isinstance(static, property) else "loss_function"
        own, note = model.loss_function, self._note_uncompiled

        @functools.wraps(own)
        def loss_function(*args: Any, **kwargs: Any) -> torch.Tensor:
            loss = own(*args, **kwargs)
            note(loss, kwargs)
            return loss

        patches = PatchSet()
        patches.put_method(model, key, loss_function, plain=own)
        patches.add(self._forget)
        return patches.undo

    def _forget(self) -> None:
        self._call = self._computed_loss = None

    def _note(self, loss: torch.Tensor, kwargs: dict[str, Any]) -> None:
        if self._is_ours(kwargs):
            self._computed_loss = loss.detach().clone()
            note_origin(loss, self._count())

    def _count(self) -> Count:
        """Return the number of targets: that of the batch, unless the step has declared one."""
        state, call = self._handle.state, self._call
        assert state is not None
        assert call is not None
        if state.counted is None:  # labels were compared with the batch's when the model was called
            return state.valid_local
        shifts = label_alignment(self._model) == "shift"
        return targets_of(call["shift_labels" if shifts else "labels"])

    def _is_ours(self, kwargs: dict[str, Any]) -> bool:
        if self._call is None:
            return False
        passed = kwargs.get("shift_labels") is self._call.get("shift_labels")
        passed &= kwargs.get("num_items_in_batch") is self._call.get("num_items_in_batch")
        return passed or label_alignment(self._model) != "shift"

    def _leave(self, model: Any, args: Any, output: Any) -> None:
        if model is self._model:  # not a copy of it
            self.check(output)

    def check(self, output: Any) -> None:
        """Check the output of the call that ``begin_call`` announced.

        Raises:
            ConfigError: its loss is not the result of the loss function.
        """
        model = self._model
        call, self._call = self._call, None
        made, self._computed_loss = self._computed_loss, None
        if call is None or self._handle.state is None:
            return
        of_routers, self._handle.router_loss = self._handle.router_loss, None
        if made is not None:
            wanted = [made]
            if of_routers is not None:
                own = of_routers.to(made.device)
                wanted += [made.clone().add_(x * own) for x in router_coefficients(model)]
            name, returned = type(model).__name__, _loss_of(output)
            check = functools.partial(
                _check_returned_loss, name, wanted, returned, self._handle.state
            )
            self._handle.ranks.checks.run_deferred(f"loss of {name}", check)
        elif label_alignment(model) == "shift":
            raise ConfigError(
                f"{type(model).__name__} computes its loss by itself: transformers' loss function was not "
                "called with the shifted targets and their count, so the loss would be wrong at every seam "
                f"between ranks. {INSTEAD}"
            )


INSTEAD = (
    "Call the model without labels, compute the loss in the step from batch['shift_labels'] (the target of "
    "each token), and declare labels='shift'."
)


def _loss_of(output: Any) -> Any:
    """Return the loss in a model's output: a field, or the first entry of a tuple."""
    return output[0] if isinstance(output, tuple) else getattr(output, "loss", None)


def _check_returned_loss(
    name: str, wanted: list[torch.Tensor], returned: Any, state: StepState
) -> None:
    """Check that the returned loss is one of those that it may be."""
    unlike = torch.ones_like(wanted[0], dtype=torch.bool)
    for made in wanted:
        if isinstance(returned, torch.Tensor) and returned.shape == made.shape:
            unlike &= made.nan_to_num() != returned.detach().to(made.device).nan_to_num()
    state.refuse_if(
        unlike.any(),
        f"{name} returns another loss than the mean over targets that its loss function made: it adds "
        "a term, such as the loss of further heads, or of routers in another way than "
        "Mixtral's, which a rank would compute from its own tokens, and which is not a mean over targets. "
        f"For routers, output_router_logits=False or router_aux_loss_coef=0 works. Otherwise: {INSTEAD}",
    )
