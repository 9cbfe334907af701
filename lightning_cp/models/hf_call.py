"""Completing the calls of a Hugging Face model with what a shard cannot know."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lightning_cp.errors import ConfigError
from lightning_cp.models.handle import SwapHandle
from lightning_cp.models.hf_labels import (
    complete_labels,
    is_trained,
    label_alignment,
    refuse_outside,
)
from lightning_cp.models.hf_loss import LossWatch
from lightning_cp.models.hf_output import refuse_head, watch_output
from lightning_cp.models.hf_packing import check_call
from lightning_cp.models.hf_positions import (
    check_positions,
    counts_alone,
    own_positions,
    positions_for,
    refuse_counting,
)
from lightning_cp.models.hf_signature import parameters_of
from lightning_cp.models.step_state import StepState
from lightning_cp.module_hooks import add_hook, replace_method
from lightning_cp.untraced import untraced


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
        self._models = set(models)
        self._announced: set[Any] = set()
        """Those whose call has come through their hooks, and will come to their forward next."""
        self._depth = 0
        """Models that are being called, each within the one before."""
        for model in models:
            complete = untraced(self._complete)
            handle.on_undo(add_hook(model.register_forward_pre_hook, complete, with_kwargs=True))
            handle.on_undo(_replace(model, "forward", self._in_place_of_forward))
            if hasattr(model, "generate"):
                handle.on_undo(_replace(model, "generate", self._in_place_of_generate))
        handle.on_activate(lambda: self._forget)
        for watch in self._watches.values():
            watch.attach()

    def _in_place_of_forward(
        self, model: Any, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Do what hooks do, if this forward was not called by way of them; look at what is returned."""
        past_hooks, args, kwargs = self._enter(model, args, kwargs)
        try:
            output = own(*args, **kwargs)
        except BaseException:  # a recomputation ends so, as soon as it has what it needs
            self._left()
            raise
        self._leave(model, past_hooks, output)
        return output

    @untraced
    def _enter(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[bool, tuple[Any, ...], dict[str, Any]]:
        if self._handle.state is None:
            return False, args, kwargs
        past_hooks = model not in self._announced
        if past_hooks:
            args, kwargs = self._complete(model, args, kwargs)
        self._announced.discard(model)
        self._depth += 1
        return past_hooks, args, kwargs

    @untraced
    def _leave(self, model: Any, past_hooks: bool, output: Any) -> None:
        state = self._handle.state
        if state is None:
            return
        self._left()
        if not self._depth:
            watch_output(model, output, state.layout.local_len)
        if past_hooks and model in self._watches:
            self._watches[model].check(output)

    @untraced
    def _left(self) -> None:
        self._depth = max(0, self._depth - 1)

    def _in_place_of_generate(self, model: Any, own: Any, args: Any, kwargs: Any) -> Any:
        if self._handle.active:
            raise ConfigError(_GENERATE.format(type(model).__name__))
        return own(*args, **kwargs)

    def _forget(self) -> None:
        """Remove what an error left there."""
        self._announced.clear()
        self._depth = 0

    def _complete(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward pre-hook. Some checks compare this rank's tokens, so that ranks agree on each call."""
        state = self._handle.state
        if state is None:
            return None
        if model not in self._models:
            raise ConfigError(_COPY.format(type(model).__name__))
        args, given = by_name(model, args, kwargs)
        check = partial(self._check_and_fill, model, given, state)
        what, follow = f"call of {type(model).__name__}", model in self._outer
        self._handle.checks.agreed(what, check, more_follow=follow)
        self._announced.add(model)
        if model in self._watches:
            self._watches[model].expect(given)
        return args, given

    def _check_and_fill(self, model: Any, given: dict[str, Any], state: StepState) -> None:
        _refuse_cache_and_weights(model, given)
        refuse_head(model, given)
        if self._counts_alone:
            refuse_counting(model, given)
        check_call(state, model, given, self._before)
        check_positions(state, self._own_positions)
        names = parameters_of(model)
        if "use_cache" in names:
            given["use_cache"] = False
        if given.get("position_ids") is None and "position_ids" in names:
            given["position_ids"] = positions_for(state, given)
        if given.get("labels") is not None:
            complete_labels(model, given, state)
        elif label_alignment(model) == "shift" and _trains(model, given):
            refuse_outside(state)


def _trains(model: Any, given: dict[str, Any]) -> bool:
    """True if what the step computes of this call's outputs may train something."""
    return torch.is_grad_enabled() and is_trained(model, given)


def _replace(model: Any, name: str, instead: Callable[..., Any]) -> Callable[[], None]:
    """Have ``instead`` called, with the model, its own method, and the arguments, as long as it is swapped.

    Not from step to step: compiled code would be compiled again each time. ``forward`` may be called itself,
    past the hooks of its call: so do older releases of peft, ``checkpoint(model.forward, ...)`` and whoever
    writes ``model.forward(...)``.
    """
    own = getattr(model, name)

    @functools.wraps(own)
    def method(*args: Any, **kwargs: Any) -> Any:
        return instead(model, own, args, kwargs)

    return replace_method(model, name, method)


def _refuse_cache_and_weights(model: Any, given: dict[str, Any]) -> None:
    if any(given.get(name) is not None for name in ("past_key_values", "cache")):  # since 5.24
        raise ConfigError(
            "a key/value cache cannot be used under context parallelism. Pass none in a step, and generate "
            "outside of one, where the model is the plain model."
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


_COPY = (
    "a copy of a {} is called within a step, which was made after training began, so that its attention is "
    "not sharded. Make it before, as a part of the module (in __init__ or configure_model), or call it with "
    "whole batches outside of steps."
)

_GENERATE = (
    "{}.generate was called within a step: it makes one token after another from a key/value cache, and a "
    "rank has a part of the prompt. Generate with cp_size=1, or outside of steps (on_validation_epoch_end, "
    "say), where the model is the plain model and takes whole prompts."
)
