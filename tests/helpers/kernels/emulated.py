"""The CUDA operators' documented behaviour, in dense PyTorch, under their real names on CPU.

There is no CPU kernel for them, so one is registered here: calls go through PyTorch's own
dispatcher, which checks every argument against the operator's schema. What is emulated is what a
caller can get wrong: bottom-right alignment, how FlashAttention 2 normalises window sizes
(``mha_fwd``, ``mha_varlen_fwd`` and ``set_params_fprop``: packed sequences by the longest one, not by
their own length), +inf for a query without keys, lse read as dense memory, packed tokens [T, H, D]
with lse [H, T] and int32 ``cu_seqlens``, lse [B, H, L, 1] of cuDNN and its refusal of a single key.
Packed results that no sequence covers are left NaN: the operators leave memory as they found it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.library import _scoped_library

from lightning_cp.kernels.protocol import accumulate_dtype

Results = tuple[torch.Tensor, ...]


@contextmanager
def cuda_operators_on_cpu() -> Iterator[None]:
    """Within it, the flash and cuDNN operators run on CPU tensors."""
    with _scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", flash_forward, "CPU")
        library.impl("_flash_attention_backward", flash_backward, "CPU")
        library.impl("_scaled_dot_product_cudnn_attention", cudnn_forward, "CPU")
        library.impl("_scaled_dot_product_cudnn_attention_backward", cudnn_backward, "CPU")
        yield


def flash_hides(
    q_len: int,
    k_len: int,
    is_causal: bool,
    left: int | None,
    right: int | None,
    longest: tuple[int, int] | None = None,
) -> torch.Tensor:
    """bool [queries, keys] of FlashAttention 2 for its arguments; ``longest`` (q, k) of a pack."""
    max_q, max_k = longest or (q_len, k_len)
    left, right = -1 if left is None else left, -1 if right is None else right
    left, right = -1 if left >= max_k else left, -1 if right >= max_k else right
    if is_causal and max_q > 1:
        right = 0
    if left < 0 and right < 0:
        return torch.zeros(q_len, k_len, dtype=torch.bool)
    return window_hides(q_len, k_len, max_k if left < 0 else left, max_k if right < 0 else right)


def window_hides(q_len: int, k_len: int, left: int, right: int) -> torch.Tensor:
    """bool [queries, keys] outside a window that is aligned at the bottom right."""
    ahead = torch.arange(k_len).unsqueeze(0) - torch.arange(q_len).unsqueeze(1) - (k_len - q_len)
    return (ahead < -left) | (ahead > right)


@dataclass(frozen=True)
class FlashMaskArguments:
    """What both flash operators take to say who sees whom."""

    is_causal: bool
    left: int | None
    right: int | None
    hides: Callable[..., torch.Tensor] = flash_hides


def flash_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **later: object,
) -> Results:
    assert dropout_p == 0
    assert not return_debug_mask
    assert not any(later.values())
    mask = FlashMaskArguments(is_causal, window_size_left, window_size_right)
    sizes = cum_seq_q, cum_seq_k, max_q, max_k
    state = torch.empty(2, dtype=torch.uint64)
    out, lse = attend_all(query, key, value, sizes, mask, scale)
    return out, lse, state, torch.empty(0), torch.empty(0)


def flash_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: torch.Tensor,
    unused: torch.Tensor,
    *,
    scale: float,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Results:
    assert dropout_p == 0
    mask = FlashMaskArguments(is_causal, window_size_left, window_size_right)
    sizes = cum_seq_q, cum_seq_k, max_q, max_k
    return differentiate_all(grad_out, query, key, value, out, logsumexp, sizes, mask, scale)


Sizes = tuple[torch.Tensor | None, torch.Tensor | None, int, int]
"""cu_seqlens of queries and keys (``None``: dense), and the longest of each."""


def attend_all(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sizes: Sizes,
    mask: FlashMaskArguments,
    scale: float,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashAttention 2 forward, dense or packed: ``out`` like q, ``lse`` [B, H, L] or [H, T]."""
    _check_dense(q, k, v)
    assert q.shape[-1] == k.shape[-1] == v.shape[-1], "the operator takes one head dim"
    hides, longest = _hides(mask), sizes[2:]
    if sizes[0] is None:
        assert longest == (q.shape[1], k.shape[1])
        return _attend(q, k, v, hides(*longest, longest), scale, softcap)
    out, lse = torch.full_like(q, torch.nan), q.new_full(q.shape[1::-1], torch.nan)
    lse = lse.to(accumulate_dtype(q.dtype))
    for queries, keys in _sequences(q, k, sizes):
        one_q, one_k, one_v = (x.unsqueeze(0) for x in (q[queries], k[keys], v[keys]))
        hidden = hides(one_q.shape[1], one_k.shape[1], longest)
        a, b = _attend(one_q, one_k, one_v, hidden, scale, softcap)
        out[queries], lse[:, queries] = a[0], b[0]
    return out, lse


def differentiate_all(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sizes: Sizes,
    mask: FlashMaskArguments,
    scale: float,
    softcap: float = 0.0,
) -> Results:
    """FlashAttention 2 backward, dense or packed."""
    _check_dense(q, k, v, dout, out)
    assert len({x.shape[-1] for x in (q, k, v, dout, out)}) == 1
    assert lse.is_contiguous()
    assert not bool((lse == -torch.inf).any())
    hides, longest = _hides(mask), sizes[2:]
    if sizes[0] is None:
        assert longest == (q.shape[1], k.shape[1])
        hidden = hides(*longest, longest)
        return _differentiate(dout, q, k, v, out, lse, hidden, scale, softcap)
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k, v))
    assert lse.shape == q.shape[1::-1]
    for queries, keys in _sequences(q, k, sizes):
        one_dout, one_q, one_out = (x[queries].unsqueeze(0) for x in (dout, q, out))
        one_k, one_v = (x[keys].unsqueeze(0) for x in (k, v))
        one_lse = lse[:, queries].unsqueeze(0)
        hidden = hides(one_q.shape[1], one_k.shape[1], longest)
        a, b, c = _differentiate(
            one_dout, one_q, one_k, one_v, one_out, one_lse, hidden, scale, softcap
        )
        dq[queries], dk[keys], dv[keys] = a[0], b[0], c[0]
    return dq, dk, dv


def _hides(mask: FlashMaskArguments) -> Callable[[int, int, tuple[int, int]], torch.Tensor]:
    return lambda q_len, k_len, longest: mask.hides(
        q_len, k_len, mask.is_causal, mask.left, mask.right, longest
    )


def _sequences(q: torch.Tensor, k: torch.Tensor, sizes: Sizes) -> list[tuple[slice, slice]]:
    """Queries and keys of each packed sequence; checks what the operators check, and rely on."""
    parts: list[list[slice]] = []
    for x, cu_seqlens, longest in zip((q, k), sizes[:2], sizes[2:], strict=True):
        assert cu_seqlens is not None
        assert x.dim() == 3
        assert cu_seqlens.dtype == torch.int32
        assert cu_seqlens.is_contiguous()
        ends = cu_seqlens.tolist()
        assert ends[0] == 0
        assert ends[-1] <= len(x)
        assert all(start < end <= start + longest for start, end in pairwise(ends))
        parts.append([slice(start, end) for start, end in pairwise(ends)])
    return list(zip(*parts, strict=True))


def cudnn_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float,
) -> Results:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    _check_dense(q, k, v)
    assert k.shape[1] != 1
    assert compute_log_sumexp
    out, lse = _attend(q, k, v, _top_left(q, k, is_causal), scale)
    sizes = q.shape[1], k.shape[1]
    empty = torch.empty(0)
    return out.transpose(1, 2), lse.unsqueeze(-1), empty, empty, *sizes, empty, empty, empty  # type: ignore[return-value]


def cudnn_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    attn_bias: None,
    cum_seq_q: None,
    cum_seq_k: None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float,
) -> Results:
    dout, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    _check_dense(dout, q, k, v, o)
    assert logsumexp.shape == (*query.shape[:3], 1)
    hidden = _top_left(q, k, is_causal)
    parts = _differentiate(dout, q, k, v, o, logsumexp.squeeze(-1), hidden, scale)
    return tuple(part.transpose(1, 2) for part in parts)


def _top_left(q: torch.Tensor, k: torch.Tensor, is_causal: bool) -> torch.Tensor:
    full = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    return full.triu(1) if is_causal else ~full


def _check_dense(*tensors: torch.Tensor) -> None:
    for x in tensors:
        assert x.stride(-1) == 1
        assert all(x.shape)
        assert x.shape[-1] % 8 == 0


def _scores(
    q: torch.Tensor, k: torch.Tensor, hidden: torch.Tensor, scale: float, softcap: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores, their derivative by the uncapped ones, and the keys of each query head."""
    dtype = accumulate_dtype(q.dtype)
    keys = k.to(dtype).repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", q.to(dtype), keys) * scale
    slope = torch.ones_like(scores)
    if softcap:
        bent = torch.tanh(scores / softcap)
        scores, slope = softcap * bent, 1 - bent**2
    return scores.masked_fill(hidden, -torch.inf), slope, keys


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    hidden: torch.Tensor,
    scale: float,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    scores, _, _ = _scores(q, k, hidden, scale, softcap)
    values = v.to(scores.dtype).repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    lse = scores.logsumexp(-1)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    weights = torch.exp(scores - lse.unsqueeze(-1))
    return torch.einsum("bhij,bjhd->bihd", weights, values).to(q.dtype), lse


def _differentiate(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    hidden: torch.Tensor,
    scale: float,
    softcap: float = 0.0,
) -> Results:
    scores, slope, keys = _scores(q, k, hidden, scale, softcap)
    values = v.to(scores.dtype).repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    wide = dout.to(scores.dtype)
    weights = torch.exp(scores - lse.unsqueeze(-1))
    delta = (wide * out).sum(-1).transpose(1, 2).unsqueeze(-1)
    dscores = weights * (torch.einsum("bihd,bjhd->bhij", wide, values) - delta) * slope * scale
    dq = torch.einsum("bhij,bjhd->bihd", dscores, keys)
    dk = torch.einsum("bhij,bihd->bjhd", dscores, q.to(scores.dtype))
    dv = torch.einsum("bhij,bihd->bjhd", weights, wide)
    dk, dv = (x.unflatten(2, (k.shape[2], -1)).sum(3) for x in (dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
