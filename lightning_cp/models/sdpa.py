"""Interception of ``torch.nn.functional.scaled_dot_product_attention``, in any import style.

Every loaded module that holds a reference to the function gets the replacement instead, so that
``from torch.nn.functional import scaled_dot_product_attention`` is intercepted too. A ``TorchFunctionMode``
would not work: it is thread-local, and recomputation on CUDA runs in autograd's own thread.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F

from lightning_cp.attention.spec import AttentionSpec
from lightning_cp.errors import ConfigError
from lightning_cp.models.handle import SwapHandle
from lightning_cp.utils.patching import (
    LINK,
    ChainedPatch,
    PatchSet,
    ReplacedFunction,
    original_function,
    without_garbage_collection,
)
from lightning_cp.utils.tracing import exclude_from_compile, is_traced

SDPA = "scaled_dot_product_attention"


def sdpa_replacements(handle: SwapHandle) -> list[ReplacedFunction]:
    """Return the replacement, which routes calls through ``handle`` while a step is active."""
    original = F.scaled_dot_product_attention
    link = ChainedPatch(original)
    # A global must not keep alive a model that is part of a reference cycle.
    held = weakref.ref(handle)

    @exclude_from_compile
    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        handle = held()
        if handle is None or not handle.intercepts:
            extra: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
            return link.original(query, key, value, attn_mask, dropout_p, is_causal, **extra)
        _check(query, key, attn_mask, enable_gqa)
        spec = AttentionSpec(causal=is_causal, softmax_scale=scale, dropout_p=dropout_p)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return _match_sdpa_strides(handle.attention(q, k, v, spec), query)

    handle.on_activate(_disable_mha_fast_path)
    return [ReplacedFunction(F, SDPA, scaled_dot_product_attention, link)]


@without_garbage_collection()
def observe_sdpa(listener: Callable[..., None]) -> Callable[[], None]:
    """Report calls to ``listener(query, key, attn_mask, is_causal, out)``; return its undo function.

    Compiled code is not observed: Python does not make its calls.
    """
    original = F.scaled_dot_product_attention
    link = ChainedPatch(original)

    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **extra: Any,
    ) -> torch.Tensor:
        out = link.original(query, key, value, attn_mask, dropout_p, is_causal, **extra)
        if not is_traced(query):
            listener(query, key, attn_mask, is_causal, out)
        return out

    patches = PatchSet()
    patches.put_functions([ReplacedFunction(F, SDPA, scaled_dot_product_attention, link)])
    return patches.undo


def _check(
    query: torch.Tensor, key: torch.Tensor, attn_mask: torch.Tensor | None, enable_gqa: bool
) -> None:
    if attn_mask is not None:
        raise ConfigError(
            f"a dense attn_mask of shape {tuple(attn_mask.shape)} cannot be sharded. What can be expressed: "
            "is_causal, packed documents (cu_seqlens or segment_ids in the batch) and padding. Call "
            "scaled_dot_product_attention without attn_mask; for a window or a bias by distance (ALiBi), "
            "context_parallel_attention(q, k, v, spec=AttentionSpec(window=(w, 0), alibi_slopes=...)), with "
            "tensors [B, L, H, D]."
        )
    if query.dim() != 4:
        raise ConfigError(
            "scaled_dot_product_attention needs [batch, heads, tokens, head dim] under context parallelism, "
            f"got query {tuple(query.shape)}. Give it so, with one row or one head where there is no such "
            "dimension."
        )
    if query.shape[2] != key.shape[2]:
        raise ConfigError(
            f"scaled_dot_product_attention of {query.shape[2]} queries and {key.shape[2]} keys: the keys are "
            "of another sequence (cross-attention, or a cache), which is not sharded as the queries are. If "
            "every rank holds all of these keys, set context_parallel_local = True on the module that makes "
            "the call: each rank's queries then see all of them. Otherwise use a strategy without context "
            "parallelism."
        )
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ConfigError(
            f"query has {query.shape[1]} heads and key {key.shape[1]}. Pass enable_gqa=True for "
            "grouped heads."
        )


def _match_sdpa_strides(out_BLHD: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Return out [B, H, L, D] with the strides of PyTorch's own result, so that the same views of it exist.

    On CPU it is laid out as the query; the CUDA operators put heads next to each other.
    """
    if query.device.type == "cpu" and query.is_contiguous():
        return out_BLHD.transpose(1, 2).contiguous()
    return out_BLHD.contiguous().transpose(1, 2)


def is_sdpa(value: object) -> bool:
    """True for PyTorch's function or a replacement of it."""
    if isinstance(value, FunctionType):
        return LINK in vars(value) and value.__name__ == SDPA
    if not isinstance(value, BuiltinFunctionType):
        return False
    return value is original_function(F.scaled_dot_product_attention)


def _disable_mha_fast_path() -> Callable[[], None]:
    """Disable the fast path of ``nn.MultiheadAttention``, which skips the function without gradients."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    return lambda: torch.backends.mha.set_fastpath_enabled(before)
