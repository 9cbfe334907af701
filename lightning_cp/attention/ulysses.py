"""Ulysses: all-to-all from tokens to heads before attention, and back after it (arXiv 2309.14509).

Between the exchanges, tensors are token-first ([tokens of the ring rank, batch, heads, head dim]): the tokens
of the Ulysses ranks, in order, are the sorted tokens of their ring rank. K and V arrive as a pair, of which a
range of tokens is contiguous memory that the ring sends without a copy. Without Ulysses they stay two
tensors, and are copied into a pair for each message (:mod:`lightning_cp.attention.keys`).
"""

from __future__ import annotations

import torch

from lightning_cp.attention.keys import Keys
from lightning_cp.attention.plan import AttentionPlan
from lightning_cp.comm.all_to_all import AllToAll, gather_heads, scatter_heads
from lightning_cp.kernels.protocol import accumulate_dtype
from lightning_cp.layout.axes import Axis

LOAD_BYTES = 16
"""Bytes of one vectorised load of CUDA kernels."""


def to_heads(
    q_BLHD: torch.Tensor, k_BLKD: torch.Tensor, v_BLKD: torch.Tensor, plan: AttentionPlan
) -> tuple[torch.Tensor, Keys]:
    """Exchange local tokens of all heads for all tokens of this ring rank, of this rank's heads.

    Returns:
        ``q`` [T, B, h, D], and keys and values of the T tokens of the ring rank: the inputs without Ulysses,
        else a pair.
    """
    if plan.heads.ulysses_size == 1:
        q, k, v = [make_loadable(x).transpose(0, 1) for x in (q_BLHD, k_BLKD, v_BLKD)]
        return q, Keys((k, v), q.shape[3])
    group, rank = plan.mesh.group(Axis.ULYSSES), plan.ulysses_rank
    keys = (k_BLKD, v_BLKD)
    if plan.mesh.ring_size == 1:
        message = scatter_heads([(q_BLHD,), keys], plan.message, rank, group)
        q, kv = message.wait()
        return q, Keys((kv,), q.shape[3])
    # A ring sends the pair without a copy, so there it travels in a separate message.
    queries = scatter_heads([(q_BLHD,)], plan.message[:1], rank, group)
    pairs = scatter_heads([keys], plan.message[1:], rank, group)
    return queries.wait()[0], Keys(pairs.wait(), q_BLHD.shape[3])


def make_loadable(x_BLHD: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy if some operator cannot read its memory.

    These are tensors with heads repeated by a stride of 0, and on CUDA slices whose rows do not begin at
    multiples of 16 bytes, the size of a vectorised load.
    """
    row, strides = x_BLHD.shape[-1] * x_BLHD.itemsize, x_BLHD.stride()
    if not x_BLHD.is_cuda and 0 not in strides:
        return x_BLHD
    steps = [n for n, size in zip(strides[:-1], x_BLHD.shape, strict=False) if size > 1]
    copied = 0 in (*steps, strides[-1])
    if x_BLHD.is_cuda and row % LOAD_BYTES == 0:
        copied |= any(n * x_BLHD.itemsize % LOAD_BYTES for n in (x_BLHD.storage_offset(), *steps))
    return x_BLHD.clone(memory_format=torch.contiguous_format) if copied else x_BLHD


def q_to_heads(x_BLHD: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
    """Exchange a tensor shaped like q: [B, L, H, D] -> [T, B, h, D]."""
    if plan.heads.ulysses_size == 1:
        return x_BLHD.transpose(0, 1)
    group = plan.mesh.group(Axis.ULYSSES)
    return scatter_heads([(x_BLHD,)], plan.message[:1], plan.ulysses_rank, group).wait()[0]


def q_to_tokens(x_TBHD: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
    """Exchange a tensor shaped like q: [T, B, h, D] -> [B, L, H, D]."""
    if plan.heads.ulysses_size == 1:
        return x_TBHD.transpose(0, 1)
    group = plan.mesh.group(Axis.ULYSSES)
    (x_BLHD,) = gather_heads([[x_TBHD]], plan.message[:1], plan.ulysses_rank, group).wait()
    return x_BLHD


class GradientsToTokens:
    """Exchange of dq [T, B, h, D], dk and dv [T, B, k, D] to dq [B, L, H, D], dk and dv [B, L, K, D].

    One message, unless ranks share some K/V head: its partial gradients travel in the accumulation dtype,
    and their sum is rounded once. The list of gradients is emptied, to free their memory early.
    """

    def __init__(
        self, gradients: list[torch.Tensor], plan: AttentionPlan, dtype: torch.dtype
    ) -> None:
        self._dtype = dtype
        self._pending: list[AllToAll] = []
        self._local: list[torch.Tensor] = []
        if plan.heads.ulysses_size == 1:
            self._local = [gradients.pop(0).transpose(0, 1).to(dtype) for _ in range(3)]
            return
        to = (plan.ulysses_rank, plan.mesh.group(Axis.ULYSSES))
        queries, keys, wide = gradients[:1], gradients[1:], accumulate_dtype(dtype)
        gradients.clear()
        if not plan.heads.shares_kv or dtype == wide:
            self._pending = [gather_heads([queries, keys], plan.message, *to, dtype)]
            return
        self._pending = [
            gather_heads([queries], plan.message[:1], *to, dtype),
            gather_heads([keys], plan.message[1:], *to, wide),
        ]

    def wait(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return dq, dk and dv in the dtype of the inputs."""
        results = self._local
        for pending in self._pending:
            results += pending.wait()
        dq, dk, dv = [x.to(self._dtype) for x in results]
        return dq, dk, dv
