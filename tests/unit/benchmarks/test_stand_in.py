"""The kernel that other implementations get on CPU is right, and what is counted of it is what it does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.op_counts import Counts, memory_hidden, sent_by
from benchmarks.peers import common as shards
from benchmarks.peers import flash_standin as stand_in
from tests.helpers import oracle

HEADS, KV_HEADS, DIM = 4, 2, 8
LIMIT = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}
SETTINGS: dict[str, Any] = {
    "softmax_scale": DIM**-0.5,
    "softcap": 0.0,
    "alibi_slopes": None,
    "dropout_p": 0.0,
    "window_size_left": -1,
    "window_size_right": -1,
}


def random(*sizes: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """q, k, v and dout, of (queries, keys)."""
    torch.manual_seed(sum(sizes))
    queries, keys = sizes
    shapes = ((queries, HEADS), (keys, KV_HEADS), (keys, KV_HEADS), (queries, HEADS))
    return [torch.randn(1, n, heads, DIM, dtype=torch.float64).to(dtype) for n, heads in shapes]


def dense(tensors: list[torch.Tensor], *, causal: bool) -> oracle.Attention:
    """Float64, aligned at the bottom right."""
    q, k, v, dout = tensors
    ahead = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None] - k.shape[1] + q.shape[1]
    seen = (ahead <= 0) if causal else torch.ones_like(ahead, dtype=torch.bool)
    return oracle.attend(q, k, v, dout, seen[None])


def near(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    error = float((found.detach().double() - wanted).abs().max() / wanted.abs().max())
    assert error <= LIMIT[dtype or found.dtype]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("keys", [24, 40])
def test_stand_in_is_dense_attention(causal: bool, dtype: torch.dtype, keys: int) -> None:
    q, k, v, dout = tensors = random(24, keys, dtype=dtype)
    want = dense(tensors, causal=causal)
    how = {**SETTINGS, "causal": causal}
    out, lse, *_ = stand_in.flash_attn_forward(q, k, v, **how, return_softmax=False)
    near(out, want.out)
    near(lse, want.lse, dtype)
    buffers = dq, dk, dv = tuple(torch.full_like(x, torch.nan) for x in (q, k, v))
    stand_in.flash_attn_backward(dout, q, k, v, out, lse, dq, dk, dv, **how, deterministic=False)
    for found, wanted in zip(buffers, (want.dq, want.dk, want.dv), strict=True):
        near(found, wanted)


def test_stand_in_takes_the_merged_results_in_backward() -> None:
    """Of two blocks of keys, with out and lse of both: dq adds up, dk and dv are the blocks'."""
    q, k, v, dout = tensors = random(24, 40)
    want = dense(tensors, causal=True)
    parts = {"causal": slice(16, None), "full": slice(None, 16)}
    dq = torch.zeros_like(q)
    for name, keys in parts.items():
        part_q, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k[:, keys], v[:, keys]))
        how = {**SETTINGS, "causal": name == "causal"}
        stand_in.flash_attn_backward(
            *(dout, q, k[:, keys], v[:, keys], want.out, want.lse, part_q, dk, dv),
            **how,
            deterministic=False,
        )
        dq += part_q
        near(dk, want.dk[:, keys])
        near(dv, want.dv[:, keys])
    near(dq, want.dq)


def test_stand_in_of_packed_documents() -> None:
    """Lengths of queries and keys of each; the last has more keys, as in an all-gather."""
    lengths_q, lengths_k = (5, 16, 3), (5, 16, 11)
    packed = [random(*pair) for pair in zip(lengths_q, lengths_k, strict=True)]
    q, k, v, dout = (torch.cat(parts, dim=1)[0] for parts in zip(*packed, strict=True))
    wants = [dense(tensors, causal=True) for tensors in packed]
    sizes = (shards.boundaries(lengths_q), shards.boundaries(lengths_k), 16, 16)
    how = {**SETTINGS, "causal": True}
    out, lse, *_ = stand_in.flash_attn_varlen_forward(q, k, v, *sizes, **how)
    near(out, torch.cat([want.out for want in wants], dim=1)[0])
    near(lse, torch.cat([want.lse for want in wants], dim=2)[0])
    buffers = dq, dk, dv = tuple(torch.full_like(x, torch.nan) for x in (q, k, v))
    stand_in.flash_attn_varlen_backward(
        *(dout, q, k, v, out, lse, dq, dk, dv, *sizes), **how, deterministic=False
    )
    for found, name in zip(buffers, ("dq", "dk", "dv"), strict=True):
        near(found, torch.cat([getattr(want, name) for want in wants], dim=1)[0])


def test_stand_in_is_differentiable() -> None:
    q, k, v, dout = tensors = random(24, 24)
    for x in (q, k, v):
        x.requires_grad_()
    out = stand_in.flash_attn_func(q, k, v, causal=True)
    want = dense(tensors, causal=True)
    near(out, want.out)
    gradients = torch.autograd.grad(out, [q, k, v], dout)
    for found, wanted in zip(gradients, (want.dq, want.dk, want.dv), strict=True):
        near(found, wanted)


def test_stand_in_refuses_what_it_does_not_do() -> None:
    q, k, v, _ = random(24, 24)
    asked: dict[str, Any]
    for asked in ({"window_size": (4, 0)}, {"dropout_p": 0.1}, {"softcap": 30.0}):
        with pytest.raises(NotImplementedError):
            stand_in.flash_attn_func(q, k, v, **asked)
    with pytest.raises(NotImplementedError, match="fewer keys than queries"):
        stand_in.flash_attn_func(q, k[:, :8], v[:, :8], causal=True)


def test_what_is_counted_of_a_block() -> None:
    q, k, v, _ = random(16, 16)
    with Counts() as counts:
        out = stand_in.flash_attn_func(q, k, v)
        with memory_hidden():
            torch.empty(1 << 20)
    assert counts.kernels == 1
    assert counts.peak == sum(
        8 * numbers for numbers in (out.numel(), HEADS * 16)
    )  # out and lse, float64
    assert counts.data == counts.control == 0
    with pytest.raises(NotImplementedError, match=r"what .*'s new_one sends"):
        sent_by("new_one", ())
