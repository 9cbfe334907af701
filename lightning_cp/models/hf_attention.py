"""One attention call of a Hugging Face model, in the terms of ``AttentionSpec``."""

from __future__ import annotations

from typing import Any

import torch

from lightning_cp.attention.spec import AttentionSpec
from lightning_cp.errors import ConfigError
from lightning_cp.models.handle import SwapHandle
from lightning_cp.models.hf_mask import EXPRESSIBLE, MaskNote
from lightning_cp.models.mixing import LOCAL
from lightning_cp.untraced import untraced

READ = {"sliding_window", "softcap", "s_aux", "alibi_slopes"}
"""Arguments that become part of the spec; a kernel that lacks a cap refuses it."""

HARMLESS = {
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
    # What models hand through to everything below them.
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
    """The function that is registered as transformers' attention.

    Args:
        handle: where calls go.
        before: the implementation that one process uses; flash-attention reads its window from the
            call's arguments, all others from the mask.
    """

    @untraced
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
        _refuse_local(name, handle)
        _refuse_unknown(name, kwargs)
        _refuse_cross(module, query, key)
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
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        # Models take views of it, as they may of what transformers' own functions return.
        return handle.attention(q, k, v, spec).contiguous(), None

    return attention


def _refuse_local(name: str, handle: SwapHandle) -> None:
    if handle.in_local:
        raise ConfigError(
            f"{name} is a part of a Hugging Face model that is swapped, and it, or a module around it, has "
            f"{LOCAL} = True: a model makes the masks of all its attention, so no part of it can be left "
            "alone. Set the attribute on modules without attention."
        )


def _refuse_unknown(name: str, kwargs: dict[str, Any]) -> None:
    given = {key for key, value in kwargs.items() if value is not None and value is not False}
    unknown = sorted(given - READ - HARMLESS.keys())
    if unknown:
        raise ConfigError(
            f"{name} passes {', '.join(f'{key}=' for key in unknown)} to attention, which is not sharded: "
            "ignoring it could be silently wrong. What is sharded beside the mask: scaling, "
            "sliding_window, softcap and s_aux (sinks). If it comes from the step's own call of the model, "
            "leave it out there."
        )


def _refuse_cross(module: Any, query: torch.Tensor, key: torch.Tensor) -> None:
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
    """Causality and window of the call, if its mask and its arguments agree on them."""
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
            f"{_shown(visible.window)}: in one process it depends on the attention implementation which of "
            "them holds. Correct the model's config (sliding_window, layer_types), or use 'sdpa'."
        )
    return visible.causal, visible.window


def _shown(window: tuple[int, int]) -> str:
    return "no window" if window[0] < 0 else f"a window of {window[0] + 1}"
