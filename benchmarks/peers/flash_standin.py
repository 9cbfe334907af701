"""flash-attn's functions on CPU, for packages that call them, on the operator of our own CPU kernel.

Signatures and results are those of flash-attn 2.8.3, as far as the packages use them: no windows, no
dropout, no caps, and the causal diagonal at the bottom right. A causal call with more keys than queries is a
full call and a square causal one, as in our kernel, instead of one with a dense mask; documents of a packed
call are a loop; the operator shares K/V heads. flash-attn writes results directly into given buffers. The
operator allocates them instead: that memory is not counted (:func:`benchmarks.op_counts.memory_hidden`), nor
is the time of copying it (:func:`lightning_cp.bench.timers.off_the_clock`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from benchmarks.op_counts import memory_hidden
from lightning_cp.bench.methods import AttentionCase
from lightning_cp.bench.timers import off_the_clock
from lightning_cp.kernels.merge import merge
from lightning_cp.kernels.per_tile import with_unit_strides
from lightning_cp.kernels.protocol import QKV, Merged, accumulate_dtype

_ATEN = torch.ops.aten
Pair = tuple[torch.Tensor, torch.Tensor]


def attend(inputs: QKV, causal: bool, scale: float) -> Pair:
    """Return ``out`` [B, L, H, D] and ``lse`` [B, H, L]; a causal diagonal ends at the bottom right.

    Raises:
        NotImplementedError: causal with fewer keys than queries.
    """
    ahead = _ahead(inputs) if causal else 0
    if not ahead:
        return _forward(inputs, causal, scale)
    out, lse = _forward(_keys(inputs, slice(ahead)), False, scale)
    with memory_hidden():
        wide = out.to(lse.dtype)  # half precision is merged in float32, and rounded once
        merge(wide, lse, *_forward(_keys(inputs, slice(ahead, None)), True, scale))
        if wide is not out:
            out.copy_(wide)
    return out, lse


def differentiate(merged: Merged, inputs: QKV, into: QKV, causal: bool, scale: float) -> None:
    """Fill ``into`` with dq, dk and dv.

    Raises:
        NotImplementedError: causal with fewer keys than queries.
    """
    ahead = _ahead(inputs) if causal else 0
    late, early = slice(ahead, None), slice(ahead)
    with memory_hidden():
        copy(_keys(into, late), _backward(merged, _keys(inputs, late), causal, scale))
        if not ahead:
            return
        part = _backward(merged, _keys(inputs, early), False, scale)
        into.q.add_(part.q)
        copy(_keys(into, early)[1:], part[1:])


def copy(into: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
    """Copy results into the buffers that flash-attn would have written."""
    with off_the_clock():
        for buffer, result in zip(into, results, strict=True):
            buffer.copy_(result)


def _forward(inputs: QKV, causal: bool, scale: float) -> Pair:
    q, k, v = (x.transpose(1, 2) for x in inputs)
    out, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu.default(
        q, k, v, 0.0, causal, scale=scale
    )
    return out.transpose(1, 2), lse


def _backward(merged: Merged, inputs: QKV, causal: bool, scale: float) -> QKV:
    q, k, v = (x.transpose(1, 2) for x in inputs)
    dout, out = merged.dout.transpose(1, 2), merged.out.transpose(1, 2)
    gradients = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default(
        dout, q, k, v, out, merged.lse, 0.0, causal, scale=scale
    )
    return QKV(*(x.transpose(1, 2) for x in gradients))


def _keys(inputs: QKV, part: slice) -> QKV:
    return QKV(inputs.q, inputs.k[:, part], inputs.v[:, part])


def _ahead(inputs: QKV) -> int:
    """Return the number of keys that every query sees."""
    ahead = inputs.k.shape[1] - inputs.q.shape[1]
    if ahead < 0:
        raise NotImplementedError("causal attention with fewer keys than queries")
    return ahead


VERSION = "2.8.3"


class StandIn(ModuleType):
    """A module of the stand-in, distinct from flash-attn's own."""


def install() -> None:
    """Make ``import flash_attn`` find the stand-in, in this process."""
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
    """Return ``out`` like q [B, L, H, D] and ``lse`` [B, H, L]."""
    _check_supported(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
    return (*attend(QKV(*with_unit_strides(q, k, v)), causal, softmax_scale), None, None)


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
    """Return ``out`` like q [T, H, D] and ``lse`` [H, T]."""
    _check_supported(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
    inputs = QKV(*with_unit_strides(q, k, v))
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
    _check_supported(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
    dout, out = with_unit_strides(dout, out)
    inputs, into = QKV(*with_unit_strides(q, k, v)), QKV(dq, dk, dv)
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
    _check_supported(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
    inputs, into = QKV(*with_unit_strides(q, k, v)), QKV(dq, dk, dv)
    dout, out = with_unit_strides(dout, out)
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
    """Return differentiable attention of q, k, v [B, L, H, D]."""
    _check_supported(dropout_p, *window_size, softcap, alibi_slopes)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return _FlashAttnFunc.apply(q, k, v, causal, scale)  # type: ignore[no-any-return]


class _FlashAttnFunc(torch.autograd.Function):
    """Saves q, k, v, out and lse, and allocates gradients, as flash-attn does."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> torch.Tensor:
        q, k, v = inputs = QKV(*with_unit_strides(q, k, v))
        out, lse = attend(inputs, causal, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal, ctx.scale = causal, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        gradients = QKV(torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
        (dout,) = with_unit_strides(dout)
        differentiate(Merged(dout, out, lse), QKV(q, k, v), gradients, ctx.causal, ctx.scale)
        return (*gradients, None, None)


def _rows(inputs: QKV, queries: slice, keys: slice) -> QKV:
    """Return one document of packed tensors [T, heads, D] as a batch of one."""
    return QKV(inputs.q[None, queries], inputs.k[None, keys], inputs.v[None, keys])


def _documents(cu_q: torch.Tensor, cu_k: torch.Tensor) -> list[tuple[slice, slice]]:
    """Return (queries, keys) of each document; an empty call of the operator would kill the process."""
    ends_q, ends_k = cu_q.tolist(), cu_k.tolist()
    spans = zip(ends_q[:-1], ends_q[1:], ends_k[:-1], ends_k[1:], strict=True)
    found = [(slice(a, b), slice(c, d)) for a, b, c, d in spans if b > a]
    if any(keys.stop == keys.start for _, keys in found):
        raise NotImplementedError("queries without keys")
    return found


def _check_supported(
    dropout_p: float, left: int, right: int, softcap: float, slopes: torch.Tensor | None
) -> None:
    if dropout_p or (left, right) != (-1, -1) or softcap or slopes is not None:
        raise NotImplementedError("dropout, windows, caps and slopes")


def missing_flash_attn(case: AttentionCase) -> str | None:
    """Return the reason why flash-attn is missing for this case, or ``None``."""
    if case.device_type == "cpu" or find_spec("flash_attn") is not None:
        return None
    return f"needs flash-attn on {case.device_type}: pip install flash-attn"


def provide_flash_attn(case: AttentionCase) -> None:
    """Make packages import flash-attn: the real one on CUDA, the stand-in on CPU."""
    if case.device_type == "cpu" and not isinstance(sys.modules.get("flash_attn"), StandIn):
        install()
