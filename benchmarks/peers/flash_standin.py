"""flash-attn's functions on CPU, for packages that call them, on the operator of our own CPU kernel.

Signatures are those of flash-attn 2.8.3 (:func:`make_functions`, with any kernel), and so are results, as far
as the packages use them: no windows, no dropout, no caps, and the causal diagonal at the bottom right. A
causal call with more keys than queries is a full call and a square causal one, as in our kernel, instead of
one with a dense mask; documents of a packed call are a loop; the operator shares K/V heads. flash-attn writes
results directly into given buffers. The operator allocates them instead: that memory is not counted
(:func:`benchmarks.op_counts.memory_hidden`), nor is the time of copying it
(:func:`lightning_cp.bench.timers.off_the_clock`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from benchmarks.op_counts import memory_hidden
from lightning_cp.bench.methods import AttentionCase
from lightning_cp.bench.timers import off_the_clock
from lightning_cp.kernels.merge import merge
from lightning_cp.kernels.per_tile import with_unit_strides
from lightning_cp.kernels.protocol import QKV, Output, accumulate_dtype

_ATEN = torch.ops.aten
Pair = tuple[Tensor, Tensor]
Packed = tuple[Tensor, Tensor, int, int]
"""Boundaries of the documents of queries and keys, and the longest of each."""


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


def differentiate(merged: Output, inputs: QKV, into: QKV, causal: bool, scale: float) -> None:
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


def copy(into: Sequence[Tensor], results: Sequence[Tensor]) -> None:
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


def _backward(merged: Output, inputs: QKV, causal: bool, scale: float) -> QKV:
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


INTERFACE = "flash_attn.flash_attn_interface"


class StandIn(ModuleType):
    """A module of the stand-in, distinct from flash-attn's own."""


def install() -> None:
    """Make ``import flash_attn`` find the stand-in, in this process."""
    modules = make_package("2.8.3", [*FUNCTIONS, flash_attn_func])
    vars(modules["flash_attn"]).update(flash_attn_func=flash_attn_func)
    sys.modules.update(modules)


def make_module(name: str, functions: Iterable[Any]) -> ModuleType:
    """Return a module of functions, or of custom operators of PyTorch."""
    module = StandIn(name)
    module.__spec__ = ModuleSpec(name, None)
    for function in functions:
        setattr(module, getattr(function, "_init_fn", function).__name__, function)
    return module


def make_package(version: str, functions: Iterable[Any]) -> dict[str, ModuleType]:
    """Return flash-attn 2's modules by name."""
    package, interface = make_module("flash_attn", ()), make_module(INTERFACE, functions)
    vars(package).update(__version__=version, __path__=[], flash_attn_interface=interface)
    return {"flash_attn": package, INTERFACE: interface}


class Call(NamedTuple):
    """Arguments of a call besides its tensors of tokens."""

    causal: bool
    window: tuple[int, int]
    scale: float
    softcap: float
    dropout_p: float
    slopes: Tensor | None
    packed: Packed | None = None
    deterministic: bool = False


class Kernel(NamedTuple):
    """The arithmetic behind flash-attn's functions."""

    forward: Callable[[QKV, Call], Pair]
    backward: Callable[[Output, QKV, QKV, Call], None]
    """Fills the third argument with dq, dk and dv."""


# fmt: off
def make_functions(kernel: Kernel) -> list[Callable[..., Any]]:
    """Return the functions of flash-attn 2.8.3, which packages call, on ``kernel``."""

    def _flash_attn_forward(
        q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool,
        window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Tensor | None,
        return_softmax: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        window = window_size_left, window_size_right
        call = Call(causal, window, softmax_scale, softcap, dropout_p, alibi_slopes)
        return (*kernel.forward(QKV(q, k, v), call), *unused_results())

    def _flash_attn_varlen_forward(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1,
        window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
        return_softmax: bool = False, block_table: Tensor | None = None, leftpad_k: Tensor | None = None,
        seqused_k: Tensor | None = None, zero_tensors: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        window = window_size_left, window_size_right
        packed = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        call = Call(causal, window, softmax_scale, softcap, dropout_p, alibi_slopes, packed)
        return (*kernel.forward(QKV(q, k, v), call), *unused_results())

    def _flash_attn_backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None,
        dk: Tensor | None, dv: Tensor | None, dropout_p: float, softmax_scale: float, causal: bool,
        window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Tensor | None,
        deterministic: bool, rng_state: Tensor | None = None,
    ) -> Tensor:
        window, rest = (window_size_left, window_size_right), (None, deterministic)
        call = Call(causal, window, softmax_scale, softcap, dropout_p, alibi_slopes, *rest)
        merged, inputs = Output(dout, out, softmax_lse), QKV(q, k, v)
        return _differentiate(kernel, merged, inputs, (dq, dk, dv), call)

    def _flash_attn_varlen_backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None,
        dk: Tensor | None, dv: Tensor | None, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
        window_size_right: int, softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
        rng_state: Tensor | None = None, zero_tensors: bool = False,
    ) -> Tensor:
        packed = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        window, rest = (window_size_left, window_size_right), (packed, deterministic)
        call = Call(causal, window, softmax_scale, softcap, dropout_p, alibi_slopes, *rest)
        merged, inputs = Output(dout, out, softmax_lse), QKV(q, k, v)
        return _differentiate(kernel, merged, inputs, (dq, dk, dv), call)

    return [
        _flash_attn_forward, _flash_attn_varlen_forward, _flash_attn_backward, _flash_attn_varlen_backward,
    ]
# fmt: on


def unused_results() -> Pair:
    """Return the softmax and the state of random numbers, without their memory counted."""
    with memory_hidden():
        return torch.empty(0), torch.empty(2, dtype=torch.int64)


def _differentiate(
    kernel: Kernel,
    merged: Output,
    inputs: QKV,
    buffers: Sequence[Tensor | None],
    call: Call,
) -> Tensor:
    dq, dk, dv = buffers
    assert dq is not None
    assert dk is not None
    assert dv is not None
    kernel.backward(merged, inputs, QKV(dq, dk, dv), call)
    return unused_results()[0]


def _run_forward(inputs: QKV, call: Call) -> Pair:
    """Return ``out`` like q, and ``lse`` [B, H, L], or [H, T] of packed documents."""
    _check_supported(call)
    inputs = QKV(*with_unit_strides(*inputs))
    if call.packed is None:
        return attend(inputs, call.causal, call.scale)
    documents = _documents(call.packed)
    if len(documents) == 1:
        out, lse = attend(_rows(inputs, *documents[0]), call.causal, call.scale)
        return out[0], lse[0]
    q = inputs.q
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=accumulate_dtype(q.dtype))
    with memory_hidden():
        for own, keys in documents:
            found = attend(_rows(inputs, own, keys), call.causal, call.scale)
            copy((out[own], lse[:, own]), (found[0][0], found[1][0]))
    return out, lse


def _run_backward(merged: Output, inputs: QKV, into: QKV, call: Call) -> None:
    _check_supported(call)
    dout, out = with_unit_strides(merged.dout, merged.out)
    inputs, lse = QKV(*with_unit_strides(*inputs)), merged.lse
    if call.packed is None:
        differentiate(Output(dout, out, lse), inputs, into, call.causal, call.scale)
        return
    for own, keys in _documents(call.packed):
        part = Output(dout[None, own], out[None, own], lse[None, :, own])
        rows = (_rows(inputs, own, keys), _rows(into, own, keys))
        differentiate(part, *rows, call.causal, call.scale)


FUNCTIONS = make_functions(Kernel(_run_forward, _run_backward))
flash_attn_forward, flash_attn_varlen_forward = FUNCTIONS[:2]
flash_attn_backward, flash_attn_varlen_backward = FUNCTIONS[2:]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor:
    """Return differentiable attention of q, k, v [B, L, H, D]."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    _check_supported(Call(causal, window_size, scale, softcap, dropout_p, alibi_slopes))
    return _FlashAttnFunc.apply(q, k, v, causal, scale)  # type: ignore[no-any-return]


class _FlashAttnFunc(torch.autograd.Function):
    """Saves q, k, v, out and lse, and allocates gradients, as flash-attn does."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        q, k, v = inputs = QKV(*with_unit_strides(q, k, v))
        out, lse = attend(inputs, causal, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal, ctx.scale = causal, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        gradients = QKV(torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
        (dout,) = with_unit_strides(dout)
        differentiate(Output(dout, out, lse), QKV(q, k, v), gradients, ctx.causal, ctx.scale)
        return (*gradients, None, None)


def _rows(inputs: QKV, queries: slice, keys: slice) -> QKV:
    """Return one document of packed tensors [T, heads, D] as a batch of one."""
    return QKV(inputs.q[None, queries], inputs.k[None, keys], inputs.v[None, keys])


def _documents(packed: Packed) -> list[tuple[slice, slice]]:
    """Return (queries, keys) of each document; an empty call of the operator would kill the process."""
    ends_q, ends_k = packed[0].tolist(), packed[1].tolist()
    spans = zip(ends_q[:-1], ends_q[1:], ends_k[:-1], ends_k[1:], strict=True)
    found = [(slice(a, b), slice(c, d)) for a, b, c, d in spans if b > a]
    if any(keys.stop == keys.start for _, keys in found):
        raise NotImplementedError("queries without keys")
    return found


def _check_supported(call: Call) -> None:
    if call.dropout_p or call.window != (-1, -1) or call.softcap or call.slopes is not None:
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
