"""flash-attn's functions on CPU, for packages that call them: the operator that our own CPU kernel calls.

Signatures and results are those of flash-attn 2.8.3, as far as the packages use them: no windows, no
dropout, no caps. A causal call with more keys than queries is a full call and a square causal one, as in
our kernel, instead of one with a dense mask; documents of a packed call are a loop; K/V heads are shared by
the operator. See :mod:`lightning_cp.bench.peers.cpu_flash`.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from lightning_cp.bench.counts import memory_hidden
from lightning_cp.bench.peers.cpu_flash import attend, copy, differentiate
from lightning_cp.kernels.api import accumulate_dtype
from lightning_cp.kernels.call_per_tile import unit_strides
from lightning_cp.kernels.protocol import QKV, Merged

VERSION = "2.8.3"


class StandIn(ModuleType):
    """A module that is not flash-attn's own."""


def install() -> None:
    """Let ``import flash_attn`` find the stand-in, in this process."""
    package, interface = StandIn("flash_attn"), StandIn("flash_attn.flash_attn_interface")
    functions = {
        "_flash_attn_forward": flash_attn_forward,
        "_flash_attn_backward": flash_attn_backward,
        "_flash_attn_varlen_forward": flash_attn_varlen_forward,
        "_flash_attn_varlen_backward": flash_attn_varlen_backward,
        "flash_attn_func": flash_attn_func,
    }
    vars(interface).update(functions)
    vars(package).update(
        __version__=VERSION,
        __path__=[],
        flash_attn_interface=interface,
        flash_attn_func=flash_attn_func,
    )
    for module in (package, interface):
        module.__spec__ = ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module


def flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    return_softmax: bool,
) -> tuple[torch.Tensor, torch.Tensor, None, None]:
    """``out`` like q [B, L, H, D] and ``lse`` [B, H, L]."""
    _refuse(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
    return (*attend(QKV(*unit_strides(q, k, v)), causal, softmax_scale), None, None)


def flash_attn_varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False,
    block_table: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, None, None]:
    """``out`` like q [T, H, D] and ``lse`` [H, T]."""
    _refuse(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
    inputs = QKV(*unit_strides(q, k, v))
    documents = _documents(cu_seqlens_q, cu_seqlens_k)
    if len(documents) == 1:
        out, lse = attend(_rows(inputs, *documents[0]), causal, softmax_scale)
        return out[0], lse[0], None, None
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=accumulate_dtype(q.dtype))
    with memory_hidden():
        for own, keys in documents:
            found = attend(_rows(inputs, own, keys), causal, softmax_scale)
            copy((out[own], lse[:, own]), (found[0][0], found[1][0]))
    return out, lse, None, None


def flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
) -> None:
    """Fill dq, dk and dv, given the merged ``out`` and ``lse``."""
    _refuse(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
    dout, out = unit_strides(dout, out)
    inputs, into = QKV(*unit_strides(q, k, v)), QKV(dq, dk, dv)
    differentiate(Merged(dout, out, softmax_lse), inputs, into, causal, softmax_scale)


def flash_attn_varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
    zero_tensors: bool = False,
) -> None:
    """Fill dq, dk and dv of every document."""
    _refuse(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
    inputs, into = QKV(*unit_strides(q, k, v)), QKV(dq, dk, dv)
    dout, out = unit_strides(dout, out)
    for own, keys in _documents(cu_seqlens_q, cu_seqlens_k):
        merged = Merged(dout[None, own], out[None, own], softmax_lse[None, :, own])
        rows = (_rows(inputs, own, keys), _rows(into, own, keys))
        differentiate(merged, *rows, causal, softmax_scale)


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor:
    """Differentiable attention of q, k, v [B, L, H, D]."""
    _refuse(dropout_p, *window_size, softcap, alibi_slopes)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return _FlashAttnFunc.apply(q, k, v, causal, scale)  # type: ignore[no-any-return]


class _FlashAttnFunc(torch.autograd.Function):
    """Saves q, k, v, out and lse, and allocates gradients, as flash-attn does."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> torch.Tensor:
        q, k, v = inputs = QKV(*unit_strides(q, k, v))
        out, lse = attend(inputs, causal, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal, ctx.scale = causal, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        gradients = QKV(torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
        (dout,) = unit_strides(dout)
        differentiate(Merged(dout, out, lse), QKV(q, k, v), gradients, ctx.causal, ctx.scale)
        return (*gradients, None, None)


def _rows(inputs: QKV, queries: slice, keys: slice) -> QKV:
    """One document of packed tensors [T, heads, D], as a batch of one."""
    return QKV(inputs.q[None, queries], inputs.k[None, keys], inputs.v[None, keys])


def _documents(cu_q: torch.Tensor, cu_k: torch.Tensor) -> list[tuple[slice, slice]]:
    """Queries and keys of each; an empty call of the operator would kill the process."""
    ends_q, ends_k = cu_q.tolist(), cu_k.tolist()
    spans = zip(ends_q[:-1], ends_q[1:], ends_k[:-1], ends_k[1:], strict=True)
    found = [(slice(a, b), slice(c, d)) for a, b, c, d in spans if b > a]
    if any(keys.stop == keys.start for _, keys in found):
        raise NotImplementedError("queries without keys")
    return found


def _refuse(
    dropout_p: float, left: int, right: int, softcap: float, slopes: torch.Tensor | None
) -> None:
    if dropout_p or (left, right) != (-1, -1) or softcap or slopes is not None:
        raise NotImplementedError("dropout, windows, caps and slopes")
