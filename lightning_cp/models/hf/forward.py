"""Checks and completion of a Hugging Face model's calls: positions, labels, cache, and outputs.

Some outputs are made of a whole sequence, and a rank would make them of its own tokens. Heads with one value
per sequence and pooled outputs are refused by name. Other outputs without a dimension along the sequence (a
second head's values, the logits of the last tokens) are allowed as long as no gradient reaches them. Losses
among them are checked in ``lightning_cp.models.hf.labels``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch

from lightning_cp.batch.step_state import StepState
from lightning_cp.errors import ConfigError
from lightning_cp.models.handle import SwapHandle
from lightning_cp.models.hf.labels import (
    LossWatch,
    check_loss_inside,
    complete_labels,
    is_trained,
    label_alignment,
)
from lightning_cp.models.hf.pooling import RowHead, has_row_head
from lightning_cp.models.hf.positions import (
    Parameters,
    check_call,
    check_positions,
    check_takes_positions,
    counts_positions_locally,
    parameters_of,
    position_counter,
    positions_for,
)
from lightning_cp.utils.patching import PatchSet, add_hook
from lightning_cp.utils.tracing import exclude_from_compile

_HEADS = re.compile(r"For(MultipleChoice|NextSentencePrediction)$")
_POOLED = "pooler_output"


def check_head(model: Any, call: Mapping[str, Any], head: RowHead | None = None) -> None:
    """Check, before a call, that the model's values per sequence are of whole ones.

    Args:
        model: the model.
        call: its arguments by name.
        head: of a model with one value per row.

    Raises:
        ConfigError: naming the class.
    """
    name = type(model).__name__
    if _HEADS.search(name) or (head is not None and not head.is_supported):
        raise ConfigError(
            f"{name} makes one value of a sequence, from tokens that only some ranks have. What works: the "
            "model without its head, and self.sequence_pick(hidden, index) or sequence_mean in the step, "
            "with labels='none'; or a value for each token (ForTokenClassification, ForCausalLM)."
        )
    if call.get("start_positions") is not None or call.get("end_positions") is not None:
        raise ConfigError(
            f"{name} is called with start_positions or end_positions: its loss is a softmax over tokens, of "
            "which a rank has a part. Call it without them, with labels='none', and write the loss: "
            "the mean of F.cross_entropy(self.unshard(output.start_logits), starts) and the same of the "
            "ends. Fill logits of padding with -inf before."
        )


def watch_output(model: Any, output: Any, local_len: int) -> None:
    """Check the output of the outermost call for pooled values, and hook those without a token dimension.

    Args:
        model: the model that the step called.
        output: of the call.
        local_len: tokens of a rank.

    Raises:
        ConfigError: a model without a head returns its pooled token; or later, a gradient reaches an output
            without a dimension along the sequence.
    """
    name = type(model).__name__
    if isinstance(output, tuple):
        pooled = getattr(model, "pooler", None) is not None
        fields = {str(place): value for place, value in enumerate(output)}
    else:
        fields = dict(output) if isinstance(output, Mapping) else {}
        pooled = isinstance(fields.get(_POOLED), torch.Tensor)
    if pooled:
        raise ConfigError(
            f"{name} returns {_POOLED}, made from one of a rank's own tokens, where one process takes one of "
            "the whole sequence. Leave the pooling layer out: model.pooler = None, or "
            "add_pooling_layer=False. If the loss needs that token, take it in the step: "
            "self.sequence_pick(hidden, 0), of last_hidden_state."
        )
    for key, value in fields.items():
        if not isinstance(value, torch.Tensor) or not value.requires_grad or not value.dim():
            continue
        if local_len not in value.shape:
            value.register_hook(partial(_raise_unsharded_output, name, key, tuple(value.shape)))


def _raise_unsharded_output(
    name: str, key: str, shape: tuple[int, ...], gradient: torch.Tensor
) -> NoReturn:
    raise ConfigError(
        f"the loss uses {key} {shape} of {name}, which has no dimension along the sequence, so that each "
        "rank makes it of its own tokens. What works: a loss of values of each token (all logits, "
        "last_hidden_state)."
    )


class CallCheck:
    """Check and completion of a model's calls: positions, targets and their count are added.

    Args:
        handle: holds the active step, if there is one.
        models: one Hugging Face model, and all models inside it.
        before: the attention implementation that one process uses.
    """

    def __init__(self, handle: SwapHandle, models: list[Any], before: str) -> None:
        self._handle = handle
        self._before = before
        self._own_positions = position_counter(models[0])
        self._counts_alone = counts_positions_locally(models)
        # The inner models are called next, and their calls are checked.
        self._outer = {model for model in models if set(models) & set(model.modules()) - {model}}
        with_loss = [model for model in models if "labels" in parameters_of(model)]
        self._watches = {model: LossWatch(handle, model) for model in with_loss}
        self._heads = {model: RowHead(handle, model) for model in models if has_row_head(model)}
        self._models = set(models)
        self._announced: set[Any] = set()
        """Models whose hooks ran, and whose forward runs next."""
        self._depth = 0
        """Number of nested calls in progress."""
        for model in models:
            complete = exclude_from_compile(self._complete)
            handle.on_undo(add_hook(model.register_forward_pre_hook, complete, with_kwargs=True))
            _replace(handle.patches, model, "forward", self._wrap_forward)
            if hasattr(model, "generate"):
                _replace(handle.patches, model, "generate", self._wrap_generate)
        handle.on_activate(lambda: self._forget)
        for watch in self._watches.values():
            watch.attach()

    def _wrap_forward(
        self, model: Any, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the hooks' work if the forward was called past them, and check the output."""
        past_hooks, args, kwargs = self._enter(model, args, kwargs)
        try:
            output = own(*args, **kwargs)
        except BaseException:  # a recomputation ends with one, as soon as it has its tensors
            self._left()
            raise
        self._leave(model, past_hooks, output)
        return output

    @exclude_from_compile
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

    @exclude_from_compile
    def _leave(self, model: Any, past_hooks: bool, output: Any) -> None:
        state = self._handle.state
        if state is None:
            return
        self._depth = max(0, self._depth - 1)
        if not self._depth and model not in self._heads:
            watch_output(model, output, state.layout.local_len)
        if past_hooks and model in self._watches:
            self._watches[model].check(output)

    @exclude_from_compile
    def _left(self) -> None:
        self._depth = max(0, self._depth - 1)

    def _wrap_generate(self, model: Any, own: Any, args: Any, kwargs: Any) -> Any:
        if self._handle.active:
            raise ConfigError(_GENERATE.format(type(model).__name__))
        return own(*args, **kwargs)

    def _forget(self) -> None:
        """Reset the state that an error left behind."""
        self._announced.clear()
        self._depth = 0

    def _complete(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Check and complete a call (a forward pre-hook); ranks agree, as checks depend on local tokens."""
        state = self._handle.state
        if state is None:
            return None
        if model not in self._models:
            raise ConfigError(_COPY.format(type(model).__name__))
        parameters = parameters_of(model)
        args, call = arguments_by_name(parameters, args, kwargs)
        check = partial(self._check_and_fill, model, parameters, call, state)
        what, follow = f"call of {type(model).__name__}", model in self._outer
        self._handle.ranks.checks.run(what, check, more_follow=follow)
        self._announced.add(model)
        if model in self._watches:
            self._watches[model].begin_call(call)
        if model in self._heads:
            self._heads[model].begin_call(call)
        return args, call

    def _check_and_fill(
        self, model: Any, parameters: Parameters, call: dict[str, Any], state: StepState
    ) -> None:
        _check_no_cache_or_weights(model, call)
        check_head(model, call, self._heads.get(model))
        if self._counts_alone:
            check_takes_positions(model, call)
        check_call(state, model, call, self._before)
        check_positions(state, self._own_positions)
        if "use_cache" in parameters:
            call["use_cache"] = False
        if call.get("position_ids") is None and "position_ids" in parameters:
            call["position_ids"] = positions_for(state, call)
        if call.get("labels") is not None and model not in self._heads:
            complete_labels(model, call, state)
        elif "labels" in parameters and label_alignment(model) == "shift" and _trains(model, call):
            check_loss_inside(state)


def _trains(model: Any, call: dict[str, Any]) -> bool:
    """True if a loss of this call's outputs may train something."""
    return torch.is_grad_enabled() and is_trained(model, call)


def _replace(patches: PatchSet, model: Any, name: str, instead: Callable[..., Any]) -> None:
    """Replace a method by ``instead(model, own method, args, kwargs)`` until the swap is undone.

    The replacement stays between steps, or code would be compiled again for each step. It is needed beside
    hooks because ``forward`` may be called past them: by older releases of peft, by
    ``checkpoint(model.forward, ...)`` and by any ``model.forward(...)``.
    """
    own = getattr(model, name)

    @functools.wraps(own)
    def method(*args: Any, **kwargs: Any) -> Any:
        return instead(model, own, args, kwargs)

    patches.put_method(model, name, method)


def _check_no_cache_or_weights(model: Any, call: dict[str, Any]) -> None:
    # It is named cache since 5.24.
    if call.get("past_key_values") is not None or call.get("cache") is not None:
        raise ConfigError(
            "a key/value cache cannot be used under context parallelism. Pass none in a step, and generate "
            "outside of one, where the model is the plain model."
        )
    asked = call.get("output_attentions")
    if getattr(model.config, "output_attentions", False) if asked is None else asked:
        raise ConfigError(
            f"{type(model).__name__} is called with output_attentions=True, but no rank has the attention "
            "weights: they are never made. Call it without, or with a strategy without context parallelism."
        )


def arguments_by_name(
    parameters: Parameters, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call, all by name where the signature allows it."""
    if not args:
        return (), dict(kwargs)
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
    "rank has a part of the prompt. Generate with context_parallel_size=1, or outside of steps "
    "(on_validation_epoch_end, say), where the model is the plain model and takes whole prompts."
)
