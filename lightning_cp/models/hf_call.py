"""Completing the calls of a Hugging Face model with what a shard cannot know."""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning_cp.errors import ConfigError
from lightning_cp.models.handle import StepState, SwapHandle
from lightning_cp.models.hf_labels import complete_labels, label_alignment
from lightning_cp.models.hf_loss import LossWatch
from lightning_cp.models.hf_packing import check_call
from lightning_cp.models.hf_positions import (
    check_positions,
    counts_alone,
    own_positions,
    refuse_counting,
)
from lightning_cp.models.hf_signature import parameters_of


class CallCheck:
    """Refuses calls that cannot be sharded, and adds positions, targets and their count to the others.

    Args:
        handle: holds the active step, if there is one.
        models: one Hugging Face model, and all models inside it.
        before: the attention implementation that one process uses.
    """

    def __init__(self, handle: SwapHandle, models: list[Any], before: str) -> None:
        self._handle = handle
        self._before = before
        self._own_positions = own_positions(models[0])
        self._counts_alone = counts_alone(models)
        # The inner models are called next, and their calls are checked.
        self._outer = {model for model in models if set(models) & set(model.modules()) - {model}}
        with_loss = [model for model in models if "labels" in parameters_of(model)]
        self._watches = {model: LossWatch(handle, model) for model in with_loss}
        # Functions, not methods: a copy of the model would copy what a method belongs to.
        complete: Any = lambda *call: self._complete(*call)  # noqa: E731
        for model in models:
            handle.on_undo(model.register_forward_pre_hook(complete, with_kwargs=True).remove)
        for watch in self._watches.values():
            watch.attach()

    def _complete(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward pre-hook. Some checks compare this rank's tokens, so that ranks agree on each call."""
        state = self._handle.state
        if state is None:
            return None
        args, given = by_name(model, args, kwargs)
        check = partial(self._check_and_fill, model, given, state)
        what, follow = f"call of {type(model).__name__}", model in self._outer
        self._handle.checks.agreed(what, check, more_follow=follow)
        if model in self._watches:  # a copy of a swapped model is not
            self._watches[model].expect(given)
        return args, given

    def _check_and_fill(self, model: Any, given: dict[str, Any], state: StepState) -> None:
        _refuse_cache_and_weights(model, given)
        if self._counts_alone:
            refuse_counting(model, given)
        check_call(state, model, given, self._before)
        check_positions(state, self._own_positions)
        names = parameters_of(model)
        if "use_cache" in names:
            given["use_cache"] = False
        if given.get("position_ids") is None and "position_ids" in names:
            given["position_ids"] = state.position_ids
        if given.get("labels") is not None:
            complete_labels(model, given, state)
        elif _loss_is_outside(model, state):
            raise ConfigError(_OUTSIDE)


def _loss_is_outside(model: Any, state: StepState) -> bool:
    """Whether the step is about to compute a loss of shifted labels, and nobody said how."""
    if state.loss_outside or not state.needs_loss or state.aligned_labels is None:
        return False
    return label_alignment(model) == "shift"


def _refuse_cache_and_weights(model: Any, given: dict[str, Any]) -> None:
    if any(given.get(name) is not None for name in ("past_key_values", "cache")):  # since 5.24
        raise ConfigError(
            "a key/value cache cannot be used under context parallelism: generate with cp_size=1."
        )
    asked = given.get("output_attentions")
    if getattr(model.config, "output_attentions", False) if asked is None else asked:
        raise ConfigError(
            f"{type(model).__name__} is called with output_attentions=True, but no rank has the attention "
            "weights: they are never made. Call it without, or with a strategy without context parallelism."
        )


def by_name(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, all by name where the signature allows it."""
    parameters = parameters_of(model)
    named = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(args) > len(named):
        return args, dict(kwargs)
    return (), {**dict(zip(named, args, strict=False)), **kwargs}


_OUTSIDE = (
    "the model was called without labels, so the loss is computed outside of it, where shifting "
    "labels (logits[:, :-1], labels[:, 1:]) would be silently wrong at every seam between ranks. Pass "
    "labels=batch['labels'] to the model; or take the targets from batch['shift_labels'] without shifting, "
    "and declare labels='shift'; or shift in the dataset and declare labels='aligned'."
)
