"""True if a model's loss is what its loss function made of our targets.

transformers names a loss function for every class, also for those that never call it: what a name says
of a model (see ``label_alignment``) is believed only once the function was seen to be called with the
targets and their count, and its result to be returned as it was.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from lightning_cp.errors import ConfigError
from lightning_cp.loss_terms import Count, note_mean, targets_of
from lightning_cp.models.handle import SwapHandle
from lightning_cp.models.hf_labels import label_alignment
from lightning_cp.module_hooks import add_hook, replace_method
from lightning_cp.untraced import untraced


class LossWatch:
    """Sees one model's loss function being called, from the model's call with labels to its return."""

    def __init__(self, handle: SwapHandle, model: Any) -> None:
        self._handle = handle
        self._model = model
        self._given: dict[str, Any] | None = None
        self._made: torch.Tensor | None = None

    def attach(self) -> None:
        """Watch in every step, until the swap is undone."""
        self._handle.on_activate(self._replace)
        leave = untraced(self._leave)
        self._handle.on_undo(add_hook(self._model.register_forward_hook, leave))

    def expect(self, given: dict[str, Any]) -> None:
        """The model is about to be called with ``given``."""
        self._given = given if given.get("labels") is not None else None
        self._made = None

    def _replace(self) -> Callable[[], None]:
        """Put a function that watches into the model's own attributes; returns what takes it out."""
        model = self._model
        static = inspect.getattr_static(type(model), "loss_function", None)
        key = "_loss_function" if isinstance(static, property) else "loss_function"
        own, note = model.loss_function, untraced(self._note)

        @functools.wraps(own)
        def loss_function(*args: Any, **kwargs: Any) -> torch.Tensor:
            loss = own(*args, **kwargs)
            note(loss, kwargs)
            return loss

        restore = replace_method(model, key, loss_function, plain=own)

        def put_back() -> None:
            self._given = self._made = None
            restore()

        return put_back

    def _note(self, loss: torch.Tensor, kwargs: dict[str, Any]) -> None:
        if self._is_ours(kwargs):
            self._made = loss.detach().clone()
            note_mean(loss, self._count())

    def _count(self) -> Count:
        """Targets of the loss function: those of the batch, unless the step has declared what it counts."""
        state, given = self._handle.state, self._given
        assert state is not None
        assert given is not None
        if state.counted is None:  # labels were compared with the batch's when the model was called
            return state.valid_local
        shifts = label_alignment(self._model) == "shift"
        return targets_of(given["shift_labels" if shifts else "labels"])

    def _is_ours(self, kwargs: dict[str, Any]) -> bool:
        if self._given is None:
            return False
        names = ("shift_labels", "num_items_in_batch")
        same = [kwargs.get(name) is self._given.get(name) for name in names]
        return all(same) or label_alignment(self._model) != "shift"

    def _leave(self, model: Any, args: Any, output: Any) -> None:
        if model is self._model:  # not a copy of it
            self.check(output)

    def check(self, output: Any) -> None:
        """The model, which was called as ``expect`` said, returns ``output``.

        Raises:
            ConfigError: its loss is not what the loss function made.
        """
        model = self._model
        given, self._given = self._given, None
        made, self._made = self._made, None
        if given is None or not self._handle.active:
            return
        if made is not None:
            check = functools.partial(_refuse_other, type(model).__name__, made, _loss_of(output))
            self._handle.checks.noted(f"loss of {type(model).__name__}", check)
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
    """The loss that a model returned: a field of its output, or the first of a tuple."""
    return output[0] if isinstance(output, tuple) else getattr(output, "loss", None)


def _refuse_other(name: str, made: torch.Tensor, returned: Any) -> None:
    same = isinstance(returned, torch.Tensor) and torch.equal(
        made.nan_to_num(), returned.detach().to(made.device).nan_to_num()
    )
    if not same:
        raise ConfigError(
            f"{name} returns another loss than the mean over targets that its loss function made: it adds "
            "something of its own, such as the auxiliary loss of a router or of further heads, which a rank "
            "would compute from its own tokens, and which is no mean over targets. For routers, "
            f"output_router_logits=False or router_aux_loss_coef=0 works. Otherwise: {INSTEAD}"
        )
