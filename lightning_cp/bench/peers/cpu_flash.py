"""The CPU flash operator with flash-attn's meaning: its diagonal at the bottom right, results into buffers.

flash-attn writes its results where they belong at once. What the operator allocates instead is not counted
(:func:`lightning_cp.bench.counts.memory_hidden`), and copying it takes no time
(:func:`lightning_cp.bench.clock.off_the_clock`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_cp.bench.clock import off_the_clock
from lightning_cp.bench.counts import memory_hidden
from lightning_cp.kernels.merge import merge
from lightning_cp.kernels.protocol import QKV, Merged

_ATEN = torch.ops.aten
Pair = tuple[torch.Tensor, torch.Tensor]


def attend(inputs: QKV, causal: bool, scale: float) -> Pair:
    """[B, L, H, D] and [B, H, L]; a causal diagonal ends at the bottom right.

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
    """Put results where flash-attn would have written them."""
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
    """Keys that every query sees."""
    ahead = inputs.k.shape[1] - inputs.q.shape[1]
    if ahead < 0:
        raise NotImplementedError("causal attention with fewer keys than queries")
    return ahead
