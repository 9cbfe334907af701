"""Intercepting ``torch.nn.functional.scaled_dot_product_attention``, in any import style.

Every loaded module that holds a reference to the function gets ours instead, so that
``from torch.nn.functional import scaled_dot_product_attention`` is seen too. A ``TorchFunctionMode``
would not do: it is thread-local, and recomputation on CUDA runs in autograd's own thread.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F

from lightning_cp.attention.spec import AttentionSpec
from lightning_cp.errors import ConfigError
from lightning_cp.models.handle import SwapHandle
from lightning_cp.untraced import untraced

SDPA = "scaled_dot_product_attention"


def swap_sdpa(handle: SwapHandle) -> None:
    """Route calls through ``handle`` while it is active; others go to the original function."""
    original = F.scaled_dot_product_attention
    link = _Link(original)
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

    setattr(scaled_dot_product_attention, _LINK, link)
    _replace(original, scaled_dot_product_attention)
    handle.on_activate(_without_fast_path)
    take_back = weakref.finalize(handle, _take_back, scaled_dot_product_attention, link)
    take_back.atexit = False
    handle.on_undo(take_back)


def observe_sdpa(tell: Callable[..., None]) -> Callable[[], None]:
    """Have ``tell(query, key, attn_mask, is_causal, out)`` see the calls; returns what ends that.

    What is compiled is not seen: its calls are no longer made from Python.
    """
    original = F.scaled_dot_product_attention
    link = _Link(original)

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

    setattr(scaled_dot_product_attention, _LINK, link)
    _replace(original, scaled_dot_product_attention)
    return lambda: _take_back(scaled_dot_product_attention, link)


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
            f"got query {tuple(query.shape)}."
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
            f"query has {query.shape[1]} heads and key {key.shape[1]}: pass enable_gqa=True for "
            "grouped heads."
        )


def _in_memory_as_theirs(out_BLHD: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """[B, H, L, D] of the strides that PyTorch's own result has, so that the same views of it exist.

    On CPU it is laid out as the query; the operators of CUDA put heads next to each other.
    """
    if query.device.type == "cpu" and query.is_contiguous():
        return out_BLHD.transpose(1, 2).contiguous()
    return out_BLHD.contiguous().transpose(1, 2)


_LINK = "_lightning_cp_link"


def is_sdpa(value: object) -> bool:
    """Whether it is PyTorch's function, or what has taken its place."""
    if isinstance(value, FunctionType):
        return _LINK in vars(value)
    return isinstance(value, BuiltinFunctionType) and value is _builtin()


def _builtin() -> object:
    """PyTorch's own, under all that have taken its place."""
    found: Any = F.scaled_dot_product_attention
    while (link := getattr(found, _LINK, None)) is not None:
        found = link.original
    return found


@dataclass
class _Link:
    """What a replacement hands over to: the function that it replaced."""

    original: Callable[..., torch.Tensor]


def _replace(old: Callable[..., Any], new: Callable[..., Any]) -> None:
    """Put ``new`` into every loaded module's globals that are ``old``."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict):
            for name in [name for name, value in list(names.items()) if value is old]:
                setattr(module, name, new)


def _take_back(ours: Callable[..., Any], link: _Link) -> None:
    """Restore the original; where another swap came later, have that one hand over to it."""
    _replace(ours, link.original)
    later: _Link | None = getattr(F.scaled_dot_product_attention, _LINK, None)
    while later is not None:
        if later.original is ours:
            later.original = link.original
        later = getattr(later.original, _LINK, None)


def _without_fast_path() -> Callable[[], None]:
    """``nn.MultiheadAttention`` would not call the function where no gradients are needed."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    return lambda: torch.backends.mha.set_fastpath_enabled(before)
