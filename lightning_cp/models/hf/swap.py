"""Swap of Hugging Face models, through transformers' attention *and* mask interfaces.

Both are registered: with an unknown mask name, transformers would drop masks silently. While a step is
active, the model's configs name the registered implementation. Its masks are notes of the requested mask
(documents and padding are in the layout; zigzag positions must not be read as packing), and a hook
completes forward calls with facts that a shard lacks: global positions, labels shifted on the whole
sequence, and the count of targets. Outside of a step the configs name the original implementation.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable
from enum import StrEnum
from functools import lru_cache, partial
from typing import Any

import torch

from lightning_cp.attention.spec import AttentionSpec
from lightning_cp.errors import ConfigError
from lightning_cp.models.guards.token_mixing import LOCAL
from lightning_cp.models.handle import SwapHandle, SwapMethod
from lightning_cp.models.hf.bloom_falcon import has_own_attention, swap_own_attention
from lightning_cp.models.hf.forward import CallCheck
from lightning_cp.models.hf.labels import label_alignment as label_alignment
from lightning_cp.models.hf.masks import EXPRESSIBLE, MaskNote, mask_function
from lightning_cp.models.hf.positions import (
    check_rotary_takes_positions,
    patch_length_dependent_rope,
)
from lightning_cp.utils.patching import PatchSet
from lightning_cp.utils.tracing import exclude_from_compile

SPEC_ARGUMENTS = {"sliding_window", "softcap", "s_aux", "alibi_slopes"}
"""Arguments of an attention call that become part of the spec; a kernel without softcap refuses it."""

IGNORED_ARGUMENTS = {
    # Positions and documents: rotary embeddings are applied before the call, documents are in the layout.
    "position_ids": "applied before the call",
    "cache_position": "there is no cache",
    "cu_seq_lens_q": "compared with the layout when the model is called",
    "cu_seq_lens_k": "the same as cu_seq_lens_q: there is no cross-attention",
    "max_length_q": "the longest of those documents",
    "max_length_k": "the longest of those documents",
    "cu_seqlens": "documents of the batch, which are in the layout",
    "segment_ids": "documents of the batch, which are in the layout",
    "seq_idx": "documents of the batch, which are in the layout",
    # Arguments that models pass to everything below them.
    "use_cache": "refused when there is a cache",
    "output_attentions": "refused when the model is called",
    "output_hidden_states": "read by the model",
    "output_router_logits": "read by the model",
    "return_dict": "read by the model",
    "logits_to_keep": "read by the model",
    "num_items_in_batch": "read by the loss",
    "shift_labels": "read by the loss",
    "deterministic": "every kernel here gives the same result again",
}
"""Arguments that do not change the result, and why."""


def attention_function(handle: SwapHandle, before: str) -> Any:
    """Return the function to register as transformers' attention.

    Args:
        handle: executes the calls.
        before: the implementation that one process uses; flash-attention reads its window from the
            call's arguments, all others from the mask.
    """

    @exclude_from_compile
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
        name = type(module).__name__
        if handle.in_local:
            raise ConfigError(_LOCAL_PART.format(name))
        _check_arguments(name, kwargs)
        _check_self_attention(module, query, key)
        causal, window = _mask_of(module, attention_mask, is_causal, kwargs, before)
        spec = AttentionSpec(
            causal=causal,
            softmax_scale=scaling,
            window=window,
            softcap=kwargs.get("softcap") or 0.0,
            alibi_slopes=kwargs.get("alibi_slopes"),
            sinks=kwargs.get("s_aux"),
            dropout_p=dropout,
        )
        q, k, v = [x.transpose(1, 2) for x in (query, key, value)]
        # Models take views of it, as of the results of transformers' own functions.
        return handle.attention(q, k, v, spec).contiguous(), None

    return attention


_LOCAL_PART = (
    "{} is a part of a Hugging Face model that is swapped, and it, or a module around it, has "
    f"{LOCAL} = True: a model makes the masks of all its attention, so no part of it can be left "
    "alone. Set the attribute on modules without attention."
)


def _check_arguments(name: str, kwargs: dict[str, Any]) -> None:
    given = {key for key, value in kwargs.items() if value is not None and value is not False}
    unknown = sorted(given - SPEC_ARGUMENTS - IGNORED_ARGUMENTS.keys())
    if unknown:
        raise ConfigError(
            f"{name} passes {', '.join(f'{key}=' for key in unknown)} to attention, which is not sharded: "
            "ignoring it could be silently wrong. What is sharded beside the mask: scaling, "
            "sliding_window, softcap and s_aux (sinks). If it comes from the step's own call of the model, "
            "leave it out there."
        )


def _check_self_attention(module: Any, query: torch.Tensor, key: torch.Tensor) -> None:
    name = type(module).__name__
    said = getattr(module, "is_cross_attention", False) or "CrossAttention" in name
    if said or query.shape[2] != key.shape[2]:
        raise ConfigError(
            f"{name} attends to another sequence ({query.shape[2]} queries, {key.shape[2]} keys): "
            "cross-attention is not sharded. Use a decoder-only or encoder-only model, or a strategy without "
            "context parallelism."
        )


def _mask_of(
    module: Any, note: Any, is_causal: bool | None, kwargs: dict[str, Any], before: str
) -> tuple[bool, tuple[int, int]]:
    """Return causality and window of the call, on which its mask and its arguments must agree."""
    name = type(module).__name__
    if not isinstance(note, MaskNote):
        what = "no mask" if note is None else f"a dense attention mask of shape {tuple(note.shape)}"
        raise ConfigError(
            f"{name} was given {what}, not one that transformers' mask interface made, which cannot be "
            f"sharded (image and audio towers have none: their tokens are not the batch's). {EXPRESSIBLE}"
        )
    visible = note.visible
    said = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if bool(said) != visible.causal:
        raise ConfigError(
            f"{name} says is_causal={bool(said)}, but its mask is "
            f"{'causal' if visible.causal else 'bidirectional'}: in one process it depends on the attention "
            "implementation which of them holds. Set the module's is_causal to what is meant."
        )
    size = kwargs.get("sliding_window")
    asked = -1 if size is None else int(size) - 1  # theirs counts the query itself
    if asked != visible.window[0] and (size is not None or "flash" in before):
        raise ConfigError(
            f"{name} has sliding_window={size} in its attention call, but its mask has "
            f"{_window_text(visible.window)}: in one process it depends on the attention implementation "
            "which of them holds. Correct the model's config (sliding_window, layer_types), or use 'sdpa'."
        )
    return visible.causal, visible.window


def _window_text(window: tuple[int, int]) -> str:
    return "no window" if window[0] < 0 else f"a window of {window[0] + 1}"


_names = (f"lightning_cp_{number}" for number in itertools.count())


def swap_hf(model: Any, handle: SwapHandle) -> SwapMethod:
    """Swap the attention of one ``PreTrainedModel``.

    Raises:
        ConfigError: the model does not use transformers' attention interface, or has two sequences.
    """
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    before: str = model.config._attn_implementation
    if getattr(model.config, "is_encoder_decoder", False):
        raise ConfigError(
            f"{type(model).__name__} is an encoder-decoder model: it has two sequences, and cross-attention "
            "is not sharded. Use a decoder-only or encoder-only model, or a strategy without context "
            "parallelism."
        )
    own = not _uses_interface(model) and has_own_attention(model)
    if not own and not _uses_interface(model):
        raise ConfigError(
            f"{type(model).__name__} does not use transformers' attention interface, so its attention cannot "
            f"be swapped (0 modules). {_ALIBI if _has_alibi(model) else ''}Use a model that does (most "
            f"current ones; others do in later versions than {_version()}), or a strategy without context "
            "parallelism."
        )
    check_rotary_takes_positions(model)
    patch_length_dependent_rope(model, _all_configs(model), handle)
    name = next(_names)
    here: Any = weakref.proxy(handle)  # a global must not keep a model alive
    attend = attention_function(here, before)
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask_function(here, before, dims=2 if own else 4))
    for interface in (AttentionInterface, AttentionMaskInterface):
        handle.on_undo_or_deletion(interface._global_mapping.pop, name, None)
    configs = _all_configs(model) if own else _configs_that_change(model, name)
    handle.on_activate(partial(_select_implementation, configs, name))
    if own:
        swap_own_attention(model, handle, attend)
    CallCheck(handle, _hf_modules(model), before)
    return SwapMethod("own attention, patched" if own else "attention interface", before)


def _version() -> str:
    return sys.modules["transformers"].__version__


def _uses_interface(model: Any) -> bool:
    return bool(type(model)._can_set_attn_implementation())


_ALIBI = (
    "It adds an ALiBi bias to its scores in its own attention. ALiBi is exact in "
    "context_parallel_attention(q, k, v, spec=AttentionSpec(alibi_slopes=...)), which a model of your own "
    "can call. "
)


def _has_alibi(model: Any) -> bool:
    """True for models with an ALiBi bias: BLOOM and MPT always, Falcon depending on its config."""
    names = vars(sys.modules[type(model).__module__])
    return any("alibi" in name for name in names) and bool(getattr(model.config, "alibi", True))


def _hf_modules(model: Any) -> list[Any]:
    """Return the model and every model inside, which a step may call as well."""
    kind = sys.modules["transformers"].PreTrainedModel
    return [module for module in model.modules() if isinstance(module, kind)]


def _configs_that_change(model: Any, name: str) -> list[Any]:
    """Return the configs, shared or of parts, from which the model reads its attention implementation."""
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


def _select_implementation(configs: list[Any], name: str) -> Callable[[], None]:
    """Set the implementation in ``configs``; return the function that restores the previous one."""
    patches = PatchSet()
    for config in configs:
        ours = _implementation_name(name, config._attn_implementation)
        patches.put_value(config, "_attn_implementation_internal", ours)
    return patches.undo


@lru_cache(maxsize=256)
def _implementation_name(name: str, before: str) -> str:
    """Return the name of an implementation, of which a copy is the previous name.

    A copy of the config would not be restored. The name is an enumeration: PyTorch's compiler treats those as
    constants in all versions, and other subclasses of ``str`` since 2.13 only.
    """

    class Chosen(StrEnum):
        NAME = name

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            return before

        def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
            return str, (before,)

    return Chosen.NAME
