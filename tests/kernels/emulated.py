"""The CUDA operators' documented behaviour, in dense PyTorch, under their real names on CPU.

There is no CPU kernel for them, so one is registered here: calls go through PyTorch's own
dispatcher, which checks every argument against the operator's schema. What is emulated is what a
caller can get wrong: bottom-right alignment, how FlashAttention 2 normalises window sizes
(``mha_fwd`` and ``set_params_fprop``), +inf for a query without keys, lse read as dense memory, lse
[B, H, L, 1] of cuDNN and its refusal of a single key.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.library import _scoped_library

from lightning_cp.kernels.api import accumulate_dtype

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
    q_len: int, k_len: int, is_causal: bool, left: int | None, right: int | None
) -> torch.Tensor:
    """bool [queries, keys] of FlashAttention 2 for its arguments."""
    left, right = -1 if left is None else left, -1 if right is None else right
    left, right = -1 if left >= k_len else left, -1 if right >= k_len else right
    if is_causal and q_len > 1:
        right = 0
    ahead = torch.arange(k_len).unsqueeze(0) - torch.arange(q_len).unsqueeze(1) - (k_len - q_len)
    if left < 0 and right < 0:
        return torch.zeros_like(ahead, dtype=torch.bool)
    left, right = k_len if left < 0 else left, k_len if right < 0 else right
    return (ahead < -left) | (ahead > right)


def flash_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: None,
    cum_seq_k: None,
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
    _check_dense(query, key, value)
    assert (max_q, max_k) == (query.shape[1], key.shape[1])
    assert cum_seq_q is cum_seq_k is None
    assert dropout_p == 0
    assert not return_debug_mask
    assert not any(later.values())
    hidden = flash_hides(max_q, max_k, is_causal, window_size_left, window_size_right)
    out, lse = _attend(query, key, value, hidden, scale)
    state = torch.empty(2, dtype=torch.uint64)
    return out, lse, state, torch.empty(0), torch.empty(0)


def flash_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: None,
    cum_seq_k: None,
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
    _check_dense(query, key, value, grad_out, out)
    assert logsumexp.is_contiguous()
    assert not bool((logsumexp == -torch.inf).any())
    hidden = flash_hides(max_q, max_k, is_causal, window_size_left, window_size_right)
    return _differentiate(grad_out, query, key, value, out, logsumexp, hidden, scale)


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
    q: torch.Tensor, k: torch.Tensor, hidden: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = accumulate_dtype(q.dtype)
    keys = k.to(dtype).repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", q.to(dtype), keys) * scale
    return scores.masked_fill(hidden, -torch.inf), keys


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    scores, _ = _scores(q, k, hidden, scale)
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
) -> Results:
    scores, keys = _scores(q, k, hidden, scale)
    values = v.to(scores.dtype).repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    wide = dout.to(scores.dtype)
    weights = torch.exp(scores - lse.unsqueeze(-1))
    delta = (wide * out).sum(-1).transpose(1, 2).unsqueeze(-1)
    dscores = weights * (torch.einsum("bihd,bjhd->bhij", wide, values) - delta) * scale
    dq = torch.einsum("bhij,bjhd->bihd", dscores, keys)
    dk = torch.einsum("bhij,bihd->bjhd", dscores, q.to(scores.dtype))
    dv = torch.einsum("bhij,bihd->bjhd", weights, wide)
    dk, dv = (x.unflatten(2, (k.shape[2], -1)).sum(3) for x in (dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
