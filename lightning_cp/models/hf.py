"""Hugging Face models, through transformers' attention *and* mask interfaces.

Both are registered: with an unknown mask name, transformers would drop padding silently. While a step
is active the model's configs name our implementation, whose mask is ``None`` (documents and padding
are in the layout; zigzag positions must not be read as packing), and a hook completes forward calls
with what a shard cannot know: global positions, labels shifted on the whole sequence, and the count
of targets. Outside of a step the configs name what they named before.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch

from lightning_cp.attention.spec import AttentionSpec
from lightning_cp.errors import ConfigError
from lightning_cp.models.handle import StepState, SwapHandle

IGNORE = -100
"""The label of a token that has no target."""

_names = (f"lightning_cp_{number}" for number in itertools.count())


def swap_hf(model: Any, handle: SwapHandle) -> None:
    """Swap the attention of one ``PreTrainedModel``.

    Raises:
        ConfigError: the model does not use transformers' attention interface.
    """
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    before: str = model.config._attn_implementation
    if not _uses_interface(model):
        raise ConfigError(
            f"{type(model).__name__} does not use transformers' attention interface, so its attention cannot "
            "be swapped (0 modules). Use a model that does (most current ones), or a strategy without "
            "context parallelism."
        )
    name = next(_names)
    AttentionInterface.register(name, _attention(handle))
    handle.on_undo(lambda: AttentionInterface._global_mapping.pop(name, None))
    AttentionMaskInterface.register(name, _no_mask)
    handle.on_undo(lambda: AttentionMaskInterface._global_mapping.pop(name, None))
    configs = _configs_that_change(model, name)
    handle.on_activate(lambda: _choose(configs, name))
    complete = _complete_call(handle)
    for inner in _hf_modules(model):
        handle.on_undo(inner.register_forward_pre_hook(complete, with_kwargs=True).remove)
    handle.report.append(f"{type(model).__name__} (attention interface, was {before})")


def label_alignment(model: Any) -> str | None:
    """How the model's own loss reads ``labels``: "shift" (next token), "aligned", or ``None``: unknown.

    A model without a head takes no labels: the loss is the user's own.
    """
    if "labels" not in _accepted(model):
        return None
    loss = getattr(model, "loss_function", None)
    kinds = {"ForCausalLMLoss": "shift", "ForMaskedLMLoss": "aligned"}
    return kinds.get(getattr(loss, "__name__", ""))


def _uses_interface(model: Any) -> bool:
    return bool(type(model)._can_set_attn_implementation())


def _hf_modules(model: Any) -> list[Any]:
    """The model and every model inside, which a step may call as well."""
    kind = sys.modules["transformers"].PreTrainedModel
    return [module for module in model.modules() if isinstance(module, kind)]


def _configs_that_change(model: Any, name: str) -> list[Any]:
    """The configs, shared or of parts, in which the model looks up its attention."""
    before = _all_configs(model)
    names = [config._attn_implementation for config in before]
    try:
        model.set_attn_implementation(name)
        return [config for config in before if config._attn_implementation == name]
    finally:
        for config, own in zip(before, names, strict=True):
            config._attn_implementation_internal = own


def _all_configs(model: Any) -> list[Any]:
    ahead = [module.config for module in _hf_modules(model)]
    found: dict[int, Any] = {}
    while ahead:
        config = ahead.pop()
        if config is None or id(config) in found:
            continue
        found[id(config)] = config
        ahead.extend(getattr(config, key, None) for key in config.sub_configs)
    return list(found.values())


def _choose(configs: list[Any], name: str) -> Callable[[], None]:
    """Name the implementation in ``configs``; returns what puts the previous names back."""
    before = [config._attn_implementation for config in configs]
    for config in configs:
        config._attn_implementation_internal = name

    def put_back() -> None:
        for config, own in zip(configs, before, strict=True):
            config._attn_implementation_internal = own

    return put_back


def _attention(handle: SwapHandle) -> Any:
    def attention(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        spec = _spec(module, attention_mask, dropout, scaling, is_causal, kwargs)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return handle.attention(q, k, v, spec), None

    return attention


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Causality is in the spec, documents and padding are in the layout."""


def _spec(
    module: Any,
    attention_mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    kwargs: dict[str, Any],
) -> AttentionSpec:
    """What transformers asks of one attention call."""
    if attention_mask is not None:
        raise ConfigError(
            f"{type(module).__name__} was given a dense attention mask of shape "
            f"{tuple(attention_mask.shape)}, "
            "which cannot be sharded. What can be expressed: causality, sliding windows, packed documents "
            "(restarting position_ids) and padding (a 2-D attention_mask)."
        )
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    window = kwargs.get("sliding_window")
    left = -1 if window is None else int(window) - 1  # theirs counts the query itself
    sinks = kwargs.get("s_aux")
    return AttentionSpec(
        causal=causal,
        softmax_scale=scaling,
        window=(left, -1 if causal else left),
        softcap=kwargs.get("softcap") or 0.0,
        sinks=sinks,
        dropout_p=dropout,
    )


def _complete_call(handle: SwapHandle) -> Any:
    def complete(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = handle.state
        if state is None:
            return None
        args, given = _by_name(model, args, kwargs)
        if given.get("past_key_values") is not None:
            raise ConfigError(
                "a key/value cache cannot be used under context parallelism: generate with cp_size=1."
            )
        accepted = _accepted(model)
        if "use_cache" in accepted:
            given["use_cache"] = False
        if given.get("position_ids") is None and "position_ids" in accepted:
            given["position_ids"] = state.position_ids
        if given.get("labels") is not None:
            _complete_labels(model, given, state)
        elif model.training and not state.loss_outside and label_alignment(model) == "shift":
            raise ConfigError(_OUTSIDE)
        return args, given

    return complete


def _by_name(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, all by name where the signature allows it."""
    parameters = inspect.signature(model.forward).parameters
    named = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(args) > len(named):
        return args, dict(kwargs)
    return (), {**dict(zip(named, args, strict=False)), **kwargs}


def _accepted(model: Any) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


def _takes_extra(model: Any) -> bool:
    parameters = inspect.signature(model.forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def _complete_labels(model: Any, given: dict[str, Any], state: StepState) -> None:
    """Shifted labels and the count of targets, so that the model's own loss is a mean over targets."""
    if not _takes_extra(model):
        raise ConfigError(
            f"{type(model).__name__}.forward takes no extra arguments, so its loss cannot be told which "
            "targets its tokens have. Call it without labels, and compute the loss in the step from "
            "batch['shift_labels']."
        )
    targets = _shifted(given, state) if label_alignment(model) == "shift" else given["labels"]
    counted = state.aligned_labels
    if counted is not None and not _same(targets, counted) and _count(targets) != state.valid_local:
        raise ConfigError(_CHANGED)
    if given.get("num_items_in_batch") is None:
        # A mean over no targets is 0/0; a sum divided by 1 is the 0 that it should be.
        given["num_items_in_batch"] = max(state.valid_local, 1)


_OUTSIDE = (
    "the model was called without labels in training, so the loss is computed outside of it, where shifting "
    "labels (logits[:, :-1], labels[:, 1:]) would be silently wrong at every seam between ranks. Pass "
    "labels=batch['labels'] to the model; or take the targets from batch['shift_labels'] without shifting, "
    "and declare labels='shift'; or shift in the dataset and declare labels='aligned'."
)

_CHANGED = (
    "labels= are not the batch's, or were changed after it was sharded: shifting them now would be wrong "
    "at every seam between ranks, and the loss is weighted by the targets that were counted then. Pass "
    "the labels of the batch, and change them before (in on_after_batch_transfer or the dataset)."
)


def _shifted(given: dict[str, Any], state: StepState) -> torch.Tensor:
    """The targets of a model that shifts: what the step made itself, or ours if nothing was changed."""
    own, ours = given.get("shift_labels"), state.aligned_labels
    if own is not None and not _same(own, ours):
        return own
    if ours is None or not _same(given["labels"], state.labels):
        raise ConfigError(_CHANGED)
    given["shift_labels"] = ours
    return ours


def _count(targets: torch.Tensor) -> int:
    return int((targets != IGNORE).sum())


def _same(labels: torch.Tensor, sharded: torch.Tensor | None) -> bool:
    if sharded is None:
        return False
    return labels.shape == sharded.shape and torch.equal(labels, sharded)
