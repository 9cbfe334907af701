"""Stand-ins for the flash-attn packages: their functions as each version declares them, on CPU.

Signatures are those of versions 2.5.8, 2.6.3, 2.8.3 (torch custom operators from 2.7 on) and of version 3
in two spellings; the semantics are the emulated ones of :mod:`tests.kernels.emulated`, and for version 3
its own rules for windows and for queries without keys. Gradients go into the buffers that are given.
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

from lightning_cp.kernels import flash_attn
from tests.kernels.emulated import (
    FlashMaskArguments,
    Sizes,
    attend_all,
    differentiate_all,
    window_hides,
)

Window = tuple[int, int]
Buffers = tuple[Tensor | None, ...]
_numbers = count()
deterministic_flags: list[bool] = []
"""What backward was asked for, in order."""


@contextmanager
def installed(version: str) -> Iterator[None]:
    """Within it, a version of flash-attn can be imported: 2.5.8, 2.6.3, 2.8.3, 3 or 3.old."""
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


_INTERFACE = "flash_attn.flash_attn_interface"
_NAMES = ("flash_attn", _INTERFACE, "flash_attn_interface")


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


def _forward_2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sizes: Sizes,
    window: Window,
    causal: bool,
    scale: float,
    softcap: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    assert dropout_p == 0
    return attend_all(q, k, v, sizes, FlashMaskArguments(causal, *window), scale, softcap)


def _backward_2(
    dout: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    buffers: Buffers,
    sizes: Sizes,
    window: Window,
    causal: bool,
    scale: float,
    softcap: float,
    deterministic: bool,
) -> Tensor:
    targets = _check_backward(buffers, inputs)
    deterministic_flags.append(deterministic)
    mask = FlashMaskArguments(causal, *window)
    parts = differentiate_all(dout, *inputs, out, lse, sizes, mask, scale, softcap)
    for buffer, part in zip(targets, parts, strict=True):
        buffer.copy_(part)
    return torch.empty(0)


def _dense(q: Tensor, k: Tensor) -> Sizes:
    return None, None, q.shape[1], k.shape[1]


def _rest(q: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty(0), torch.empty(2, dtype=torch.int64)


# fmt: off
def _version_2_6() -> dict[str, ModuleType]:
    """A pair for the window, and eight results."""

    def _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_softmax,
    ):
        assert alibi_slopes is None
        assert not return_softmax
        out, lse = _forward_2(
            q, k, v, _dense(q, k), window_size, causal, softmax_scale, softcap, dropout_p)
        return (out, q, k, v, out, lse, *_rest(q))

    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, return_softmax=False,
        block_table=None, leftpad_k=None, seqused_k=None,
    ):
        sizes = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        out, lse = _forward_2(
            q, k, v, sizes, window_size, causal, softmax_scale, softcap, dropout_p)
        return (out, q, k, v, out, lse, *_rest(q))

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, rng_state=None,
    ):
        delta = _backward_2(
            dout, (q, k, v), out, softmax_lse, (dq, dk, dv), _dense(q, k), window_size, causal,
            softmax_scale, softcap, deterministic)
        return dq, dk, dv, delta

    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, rng_state=None,
    ):
        sizes = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        delta = _backward_2(
            dout, (q, k, v), out, softmax_lse, (dq, dk, dv), sizes, window_size, causal,
            softmax_scale, softcap, deterministic)
        return dq, dk, dv, delta

    return _package("2.6.3", [
        _flash_attn_forward, _flash_attn_varlen_forward,
        _flash_attn_backward, _flash_attn_varlen_backward,
    ])


def _version_2_5() -> dict[str, ModuleType]:
    """Before soft-capping."""

    def _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size, alibi_slopes, return_softmax,
    ):
        raise AssertionError("called")

    return _package("2.5.8", [_flash_attn_forward])


def _version_2_8() -> dict[str, ModuleType]:
    """Two arguments for the window, four results, and custom operators of torch."""

    def _flash_attn_forward(
        q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool,
        window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Tensor | None,
        return_softmax: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        out, lse = _forward_2(
            q, k, v, _dense(q, k), (window_size_left, window_size_right), causal, softmax_scale,
            softcap, dropout_p)
        return (out, lse, *_rest(q))

    def _flash_attn_varlen_forward(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
        max_seqlen_q: int, max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool,
        window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
        alibi_slopes: Tensor | None = None, return_softmax: bool = False,
        block_table: Tensor | None = None, leftpad_k: Tensor | None = None,
        seqused_k: Tensor | None = None, zero_tensors: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        sizes = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        out, lse = _forward_2(
            q, k, v, sizes, (window_size_left, window_size_right), causal, softmax_scale, softcap,
            dropout_p)
        return (out, lse, *_rest(q))

    def _flash_attn_backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
        dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, dropout_p: float,
        softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int,
        softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
        rng_state: Tensor | None = None,
    ) -> Tensor:
        return _backward_2(
            dout, (q, k, v), out, softmax_lse, (dq, dk, dv), _dense(q, k),
            (window_size_left, window_size_right), causal, softmax_scale, softcap, deterministic)

    def _flash_attn_varlen_backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
        dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float,
        softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int,
        softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
        rng_state: Tensor | None = None, zero_tensors: bool = False,
    ) -> Tensor:
        sizes = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        return _backward_2(
            dout, (q, k, v), out, softmax_lse, (dq, dk, dv), sizes,
            (window_size_left, window_size_right), causal, softmax_scale, softcap, deterministic)

    gradients = ("dq", "dk", "dv")
    return _package("2.8.3", [
        _operator(_flash_attn_forward), _operator(_flash_attn_varlen_forward),
        _operator(_flash_attn_backward, gradients), _operator(_flash_attn_varlen_backward, gradients),
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

    return {"flash_attn_interface": _module(
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
        return (*_forward_3(q, k, v, sizes, causal, window, softmax_scale, softcap), *_rest(q))

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

    return {"flash_attn_interface": _module(
        "flash_attn_interface", [_flash_attn_forward, _flash_attn_backward])}
# fmt: on


_MODULES: dict[str, Callable[[], dict[str, ModuleType]]] = {
    "none": dict,
    "2.5.8": _version_2_5,
    "2.6.3": _version_2_6,
    "2.8.3": _version_2_8,
    "3.old": _version_3_old,
    "3": _version_3,
}


def _operator(function: Callable[..., Any], mutates: tuple[str, ...] = ()) -> object:
    """A custom operator of torch, as flash-attn makes them: keyword calls, a hidden signature."""
    name = f"lightning_cp_tests::{function.__name__}_{next(_numbers)}"
    return torch.library.custom_op(name, function, mutates_args=mutates)


def _module(name: str, functions: list[object]) -> ModuleType:
    module = ModuleType(name)
    for function in functions:
        plain: Any = getattr(function, "_init_fn", function)
        setattr(module, plain.__name__, function)
    return module


def _package(version: str, functions: list[object]) -> dict[str, ModuleType]:
    package = ModuleType("flash_attn")
    package.__version__ = version  # type: ignore[attr-defined]
    package.__path__ = []
    return {"flash_attn": package, _INTERFACE: _module(_INTERFACE, functions)}
