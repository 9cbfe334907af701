"""Stand-ins for the flash-attn packages: their functions as each version declares them, on CPU.

Signatures are those of versions 2.5.8, 2.6.0, 2.6.3, 2.8.3 (torch custom operators from 2.7 on) and of
version 3 in two spellings; the semantics are the emulated ones of
:mod:`tests.helpers.kernels.emulated`, and for version 3 its own rules for windows and for queries without
keys. Gradients go into given buffers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from itertools import count
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.flash_standin import (
    INTERFACE,
    Call,
    Kernel,
    make_functions,
    make_module,
    make_package,
    unused_results,
)
from lightning_cp.kernels import flash_attn
from lightning_cp.kernels.protocol import QKV, Output
from tests.helpers.kernels.emulated import (
    FlashMaskArguments,
    Sizes,
    attend_all,
    differentiate_all,
    window_hides,
)

Buffers = tuple[Tensor | None, ...]
_numbers = count()
deterministic_flags: list[bool] = []
"""What backward was asked for, in order."""


@contextmanager
def installed(version: str) -> Iterator[None]:
    """Within it, a version of flash-attn can be imported: 2.5.8, 2.6.0, 2.6.3, 2.8.3, 3 or 3.old."""
    saved = {name: sys.modules.pop(name) for name in _NAMES if name in sys.modules}
    sys.meta_path.insert(0, _Absent())
    sys.modules.update(_MODULES[version]())
    _forget()
    try:
        yield
    finally:
        sys.meta_path.pop(0)
        for name in _NAMES:
            sys.modules.pop(name, None)
        sys.modules.update(saved)
        _forget()


class _Absent(MetaPathFinder):
    """Nothing of these names is installed, whatever is on this machine."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname.partition(".")[0] in _NAMES:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def _forget() -> None:
    flash_attn.load_flash_attn_2.cache_clear()
    flash_attn.load_flash_attn_3.cache_clear()


_NAMES = ("flash_attn", INTERFACE, "flash_attn_interface")


def flash_3_hides(
    q_len: int,
    k_len: int,
    is_causal: bool,
    left: int | None,
    right: int | None,
    longest: tuple[int, int] | None = None,
) -> Tensor:
    """bool [queries, keys] of FlashAttention 3: a side without a bound is as long as the longest."""
    max_q, max_k = longest or (q_len, k_len)
    assert left is not None
    assert right is not None
    left, right = -1 if left >= max_k - 1 else left, -1 if right >= max_q - 1 else right
    right = 0 if is_causal else right
    if left < 0 and right < 0:
        return torch.zeros(q_len, k_len, dtype=torch.bool)
    causal = left < 0 and right == 0
    left = (k_len if causal else max_k - 1) if left < 0 else left
    return window_hides(q_len, k_len, left, max_q - 1 if right < 0 else right)


def _check_backward(buffers: Buffers, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """All buffers; the packages can make their own, but hand them out in no version alike."""
    checked: list[Tensor] = []
    for buffer, x in zip(buffers, inputs, strict=True):
        assert buffer is not None
        assert buffer.dtype == x.dtype
        assert buffer.shape == x.shape
        assert buffer.stride(-1) == 1
        checked.append(buffer)
    return tuple(checked)


def _forward_2(inputs: QKV, call: Call) -> tuple[Tensor, Tensor]:
    assert call.dropout_p == 0
    assert call.slopes is None
    mask = FlashMaskArguments(call.causal, *call.window)
    sizes = call.packed or _dense(inputs.q, inputs.k)
    return attend_all(*inputs, sizes, mask, call.scale, call.softcap)


def _backward_2(merged: Output, inputs: QKV, into: QKV, call: Call) -> None:
    targets = _check_backward(into, inputs)
    deterministic_flags.append(call.deterministic)
    mask = FlashMaskArguments(call.causal, *call.window)
    sizes = call.packed or _dense(inputs.q, inputs.k)
    dout, out, lse = merged
    parts = differentiate_all(dout, *inputs, out, lse, sizes, mask, call.scale, call.softcap)
    for buffer, part in zip(targets, parts, strict=True):
        buffer.copy_(part)


def _dense(q: Tensor, k: Tensor) -> Sizes:
    return None, None, q.shape[1], k.shape[1]


# fmt: off
def _version_2_6() -> dict[str, ModuleType]:
    """A pair for the window, and eight results."""

    def _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_softmax,
    ):
        assert not return_softmax
        call = Call(causal, window_size, softmax_scale, softcap, dropout_p, alibi_slopes)
        out, lse = _forward_2(QKV(q, k, v), call)
        return (out, q, k, v, out, lse, *unused_results())

    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, return_softmax=False,
        block_table=None, leftpad_k=None, seqused_k=None,
    ):
        packed = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        call = Call(causal, window_size, softmax_scale, softcap, dropout_p, alibi_slopes, packed)
        out, lse = _forward_2(QKV(q, k, v), call)
        return (out, q, k, v, out, lse, *unused_results())

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, rng_state=None,
    ):
        rest = softmax_scale, softcap, dropout_p, alibi_slopes, None, deterministic
        call, merged = Call(causal, window_size, *rest), Output(dout, out, softmax_lse)
        _backward_2(merged, QKV(q, k, v), QKV(dq, dk, dv), call)
        return dq, dk, dv, torch.empty(0)

    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, rng_state=None,
    ):
        packed = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        rest = softmax_scale, softcap, dropout_p, alibi_slopes, packed, deterministic
        call, merged = Call(causal, window_size, *rest), Output(dout, out, softmax_lse)
        _backward_2(merged, QKV(q, k, v), QKV(dq, dk, dv), call)
        return dq, dk, dv, torch.empty(0)

    return make_package("2.6.3", [
        _flash_attn_forward, _flash_attn_varlen_forward,
        _flash_attn_backward, _flash_attn_varlen_backward,
    ])


def _version_2_6_0() -> dict[str, ModuleType]:
    """A block table that must be given."""
    modules = _version_2_6()
    interface = modules[INTERFACE]
    later = interface._flash_attn_varlen_forward

    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, return_softmax, block_table,
    ):
        assert block_table is None
        return later(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
            causal, window_size, softcap, alibi_slopes, return_softmax,
        )

    vars(interface)["_flash_attn_varlen_forward"] = _flash_attn_varlen_forward
    vars(modules["flash_attn"])["__version__"] = "2.6.0"
    return modules


def _version_2_5() -> dict[str, ModuleType]:
    """Before soft-capping."""

    def _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size, alibi_slopes, return_softmax,
    ):
        raise AssertionError("called")

    return make_package("2.5.8", [_flash_attn_forward])


def _version_2_8() -> dict[str, ModuleType]:
    """Two arguments for the window, four results, and custom operators of torch."""
    functions = make_functions(Kernel(_forward_2, _backward_2))
    return make_package("2.8.3", [
        _operator(function, ("dq", "dk", "dv") if "backward" in function.__name__ else ())
        for function in functions
    ])


def _forward_3(q, k, v, sizes, causal, window, softmax_scale, softcap):
    mask = FlashMaskArguments(causal, *window, hides=flash_3_hides)
    sizes = _dense(q, k) if sizes[0] is None else sizes
    out, lse = attend_all(q, k, v, sizes, mask, softmax_scale, softcap)
    return out, lse.masked_fill(lse == torch.inf, -torch.inf)


def _backward_3(
    dout, q, k, v, out, lse, sizes, dq, dk, dv, causal, window, softmax_scale, softcap, deterministic,
):
    _check_backward((dq, dk, dv), (q, k, v))
    deterministic_flags.append(deterministic)
    mask = FlashMaskArguments(causal, *window, hides=flash_3_hides)
    sizes = _dense(q, k) if sizes[0] is None else sizes
    parts = differentiate_all(dout, q, k, v, out, lse, sizes, mask, softmax_scale, softcap)
    for buffer, part in zip((dq, dk, dv), parts, strict=True):
        buffer.copy_(part)


def _version_3_old() -> dict[str, ModuleType]:
    """Positional arguments without defaults, a pair for the window, ``causal`` in backward."""

    def _flash_attn_forward(
        q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q,
        seqused_k, max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos,
        rotary_sin, seqlens_rotary, q_descale, k_descale, v_descale, softmax_scale, causal,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
        scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0,
    ):
        assert seqused_k is out is page_table is None
        sizes = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        return (*_forward_3(q, k, v, sizes, causal, window_size, softmax_scale, softcap), None, None)

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q,
        max_seqlen_k, dq, dk, dv, softmax_scale, causal, window_size=(-1, -1), softcap=0.0,
        deterministic=False, sm_margin=0,
    ):
        sizes = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        _backward_3(
            dout, q, k, v, out, softmax_lse, sizes, dq, dk, dv, causal, window_size, softmax_scale,
            softcap, deterministic)
        return dq, dk, dv, None

    return {"flash_attn_interface": make_module(
        "flash_attn_interface", [_flash_attn_forward, _flash_attn_backward])}


def _version_3() -> dict[str, ModuleType]:
    """Two arguments for the window, and ``is_causal`` in backward."""

    def _flash_attn_forward(
        q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None,
        cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
        page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None,
        seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
        causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0,
        rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0,
    ):
        sizes = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        window = window_size_left, window_size_right
        return (*_forward_3(q, k, v, sizes, causal, window, softmax_scale, softcap), *unused_results())

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None,
        sequed_k=None, max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None,
        softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0,
        deterministic=False, sm_margin=0,
    ):
        sizes = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        window = window_size_left, window_size_right
        _backward_3(
            dout, q, k, v, out, softmax_lse, sizes, dq, dk, dv, is_causal, window, softmax_scale,
            softcap, deterministic)

    return {"flash_attn_interface": make_module(
        "flash_attn_interface", [_flash_attn_forward, _flash_attn_backward])}
# fmt: on


_MODULES: dict[str, Callable[[], dict[str, ModuleType]]] = {
    "none": dict,
    "2.5.8": _version_2_5,
    "2.6.0": _version_2_6_0,
    "2.6.3": _version_2_6,
    "2.8.3": _version_2_8,
    "3.old": _version_3_old,
    "3": _version_3,
}


def _operator(function: Callable[..., Any], mutates: tuple[str, ...] = ()) -> object:
    """A custom operator of torch, as flash-attn makes them: keyword calls, a hidden signature."""
    name = f"lightning_cp_tests::{function.__name__}_{next(_numbers)}"
    return torch.library.custom_op(name, function, mutates_args=mutates)
