"""Intercepting ``torch.nn.functional.scaled_dot_product_attention``, in any import style.

Every loaded module that holds a reference to the function gets ours instead, so that
``from torch.nn.functional import scaled_dot_product_attention`` is seen too. A ``TorchFunctionMode``
would not do: it is thread-local, and recomputation on CUDA runs in autograd's own thread.
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
from lightning_cp.models.functions import (
    LINK,
    Link,
    Replaced,
    replace_everywhere,
    take_back,
    undisturbed,
)
from lightning_cp.models.handle import SwapHandle
from lightning_cp.untraced import untraced

SDPA = "scaled_dot_product_attention"


def swapped_sdpa(handle: SwapHandle) -> list[Replaced]:
    """The function that routes calls through ``handle`` while it is active, others to the original."""
    original = F.scaled_dot_product_attention
    link = Link(original)
    held = weakref.ref(
        handle
    )  # what is global must not keep a model alive that is part of a circle

    @untraced
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
        return _in_memory_as_theirs(handle.attention(q, k, v, spec), query)

    setattr(scaled_dot_product_attention, LINK, link)
    handle.on_activate(_without_fast_path)
    return [Replaced(F, SDPA, scaled_dot_product_attention, link)]


@undisturbed()
def observe_sdpa(tell: Callable[..., None]) -> Callable[[], None]:
    """Have ``tell(query, key, attn_mask, is_causal, out)`` see the calls; returns what ends that.

    What is compiled is not seen: its calls are no longer made from Python.
    """
    original = F.scaled_dot_product_attention
    link = Link(original)

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
        if not torch.compiler.is_compiling():
            tell(query, key, attn_mask, is_causal, out)
        return out

    setattr(scaled_dot_product_attention, LINK, link)
    replace_everywhere({original: scaled_dot_product_attention})
    replaced = Replaced(F, SDPA, scaled_dot_product_attention, link)
    return lambda: take_back([replaced])


def _check(
    query: torch.Tensor, key: torch.Tensor, attn_mask: torch.Tensor | None, enable_gqa: bool
) -> None:
    if attn_mask is not None:
        raise ConfigError(
            f"a dense attn_mask of shape {tuple(attn_mask.shape)} cannot be sharded. What can be expressed: "
            "is_causal, packed documents (cu_seqlens or segment_ids in the batch) and padding. Call "
            "scaled_dot_product_attention without attn_mask; for a bias by distance (ALiBi), call "
            "context_parallel_attention with AttentionSpec(alibi_slopes=...)."
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


def _in_memory_as_theirs(out_BLHD: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """[B, H, L, D] of the strides that PyTorch's own result has, so that the same views of it exist.

    On CPU it is laid out as the query; the operators of CUDA put heads next to each other.
    """
    if query.device.type == "cpu" and query.is_contiguous():
        return out_BLHD.transpose(1, 2).contiguous()
    return out_BLHD.contiguous().transpose(1, 2)


def is_sdpa(value: object) -> bool:
    """True if it is PyTorch's function, or what has taken its place."""
    if isinstance(value, FunctionType):
        return LINK in vars(value) and value.__name__ == SDPA
    return isinstance(value, BuiltinFunctionType) and value is _builtin()


def _builtin() -> object:
    """PyTorch's own, under all that have taken its place."""
    found: Any = F.scaled_dot_product_attention
    while (link := getattr(found, LINK, None)) is not None:
        found = link.original
    return found


def _without_fast_path() -> Callable[[], None]:
    """``nn.MultiheadAttention`` would not call the function where no gradients are needed."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    return lambda: torch.backends.mha.set_fastpath_enabled(before)
