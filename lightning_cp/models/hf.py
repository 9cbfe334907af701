"""Hugging Face models, through transformers' attention *and* mask interfaces.

Both are registered: with an unknown mask name, transformers would drop padding silently. While a step
is active our mask is ``None`` (documents and padding are in the layout; zigzag positions must not be
read as packing), and a hook completes the forward call with what a shard cannot know: global
positions, labels shifted on the whole sequence, and the count of targets. Outside of a step both
interfaces hand over to the implementation that the model had before.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from typing import Any

import torch

from lightning_cp.attention.spec import AttentionSpec
from lightning_cp.errors import ConfigError
from lightning_cp.models.handle import StepState, SwapHandle

_names = (f"lightning_cp_{number}" for number in itertools.count())


def swap_hf(model: Any, handle: SwapHandle) -> None:
    """Swap the attention of one ``PreTrainedModel``.

    Raises:
        ConfigError: the model does not use transformers' attention interface.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    name = next(_names)
    before: str = model.config._attn_implementation
    if not _uses_interface(model):
        raise ConfigError(
            f"{type(model).__name__} does not use transformers' attention interface, so its attention cannot "
            "be swapped (0 modules). Use a model that does (most current ones), or a strategy without "
            "context parallelism."
        )
    AttentionInterface.register(name, _attention(handle, before, ALL_ATTENTION_FUNCTIONS))
    AttentionMaskInterface.register(name, _mask(handle, before, ALL_MASK_ATTENTION_FUNCTIONS))
    handle.on_undo(lambda: AttentionMaskInterface._global_mapping.pop(name, None))
    handle.on_undo(lambda: AttentionInterface._global_mapping.pop(name, None))
    model.set_attn_implementation(name)
    handle.on_undo(lambda: model.set_attn_implementation(before))
    hook = model.register_forward_pre_hook(_complete_call(handle), with_kwargs=True)
    handle.on_undo(hook.remove)
    handle.report.append(f"{type(model).__name__} (attention interface, was {before})")


def label_alignment(model: Any) -> str | None:
    """How the model's own loss reads ``labels``: "shift" (next token), "aligned", or ``None``: unknown."""
    loss = getattr(model, "loss_function", None)
    kinds = {"ForCausalLMLoss": "shift", "ForMaskedLMLoss": "aligned"}
    return kinds.get(getattr(loss, "__name__", ""))


def _uses_interface(model: Any) -> bool:
    return bool(type(model)._can_set_attn_implementation())


def _attention(handle: SwapHandle, before: str, functions: Any) -> Any:
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
        if not handle.active:
            own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
            call = functions.get_interface(before, own)
            extra = {} if is_causal is None else {"is_causal": is_causal}
            return call(
                module, query, key, value, attention_mask,
                dropout=dropout, scaling=scaling, **extra, **kwargs,
            )  # fmt: skip
        spec = _spec(module, attention_mask, dropout, scaling, is_causal, kwargs)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return handle.attention(q, k, v, spec), None

    return attention


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


def _mask(handle: SwapHandle, before: str, functions: Any) -> Any:
    def mask(*args: Any, **kwargs: Any) -> Any:
        if handle.active or before not in functions:
            return None
        return functions[before](*args, **kwargs)

    return mask


def _complete_call(handle: SwapHandle) -> Any:
    def complete(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = handle.state
        if state is None:
            return None
        given = dict(kwargs)
        if kwargs.get("past_key_values") is not None:
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
        return args, given

    return complete


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
    if label_alignment(model) == "shift" and given.get("shift_labels") is None:
        if not _same(given["labels"], state.labels):
            raise ConfigError(
                "labels were changed after the batch was sharded: shifting them now would be wrong at every "
                "seam between ranks. Change them before (on_after_batch_transfer or the dataset), or pass "
                "shift_labels= made from batch['shift_labels']."
            )
        given["shift_labels"] = state.aligned_labels
    if given.get("num_items_in_batch") is None:
        # A mean over no targets is 0/0; a sum divided by 1 is the 0 that it should be.
        given["num_items_in_batch"] = max(state.valid_local, 1)


def _same(labels: torch.Tensor, sharded: torch.Tensor | None) -> bool:
    if sharded is None:
        return False
    return labels is sharded or (labels.shape == sharded.shape and torch.equal(labels, sharded))
