"""Ulysses: before attention, tokens are traded for heads; after it, back (arXiv 2309.14509).

Inside, tensors are token-first ([tokens of the ring rank, batch, heads, head dim]): the tokens of
the Ulysses ranks, in order, are the sorted tokens of their ring rank. K and V arrive as a pair, of which a
range of tokens is contiguous memory that the ring sends as it is. Without Ulysses they stay as they were
given, and are copied into a pair for each message (:mod:`lightning_cp.attention.keys`).
"""

from __future__ import annotations

import torch

from lightning_cp.attention.keys import Keys
from lightning_cp.attention.plan import AttentionPlan
from lightning_cp.comm.all_to_all import Pending, gather_heads, scatter_heads
from lightning_cp.kernels.api import accumulate_dtype
from lightning_cp.mesh import Axis

LOAD = 16
"""Bytes that CUDA kernels load at once."""


def to_heads(
    q_BLHD: torch.Tensor, k_BLKD: torch.Tensor, v_BLKD: torch.Tensor, plan: AttentionPlan
) -> tuple[torch.Tensor, Keys]:
    """All tokens of this ring rank, for this rank's heads.

    Returns:
        ``q`` [T, B, h, D], and keys and values of T tokens, T being those of the ring rank: what was given,
        or what came as a pair.
    """
    if plan.heads.ulysses_size == 1:
        q, k, v = (loadable(x).transpose(0, 1) for x in (q_BLHD, k_BLKD, v_BLKD))
        return q, Keys((k, v), q.shape[3])
    group, rank = plan.mesh.group(Axis.ULYSSES), plan.ulysses_rank
    keys = (k_BLKD, v_BLKD)
    if plan.mesh.ring_size == 1:
        message = scatter_heads([(q_BLHD,), keys], plan.message, rank, group)
        q, kv = message.wait()
        return q, Keys((kv,), q.shape[3])
    # A ring sends the pair as it lies in memory, so there it has a message of its own.
    queries = scatter_heads([(q_BLHD,)], plan.message[:1], rank, group)
    pairs = scatter_heads([keys], plan.message[1:], rank, group)
    return queries.wait()[0], Keys(pairs.wait(), q_BLHD.shape[3])


def loadable(x_BLHD: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of one that not every operator takes as it lies.

    That is one whose heads were repeated by a stride of 0, and on CUDA a slice whose rows do not begin at
    multiples of 16 bytes, which kernels load at once.
    """
    row, strides = x_BLHD.shape[-1] * x_BLHD.itemsize, x_BLHD.stride()
    steps = [n for n, size in zip(strides[:-1], x_BLHD.shape, strict=False) if size > 1]
    odd = any(n * x_BLHD.itemsize % LOAD for n in (x_BLHD.storage_offset(), *steps))
    copied = 0 in (*steps, strides[-1]) or (x_BLHD.is_cuda and row % LOAD == 0 and odd)
    return x_BLHD.clone(memory_format=torch.contiguous_format) if copied else x_BLHD


def q_to_heads(x_BLHD: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
    """Something shaped like q: [B, L, H, D] -> [T, B, h, D]."""
    if plan.heads.ulysses_size == 1:
        return x_BLHD.transpose(0, 1)
    group = plan.mesh.group(Axis.ULYSSES)
    return scatter_heads([(x_BLHD,)], plan.message[:1], plan.ulysses_rank, group).wait()[0]


def q_to_tokens(x_TBHD: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
    """Something shaped like q: [T, B, h, D] -> [B, L, H, D]."""
    if plan.heads.ulysses_size == 1:
        return x_TBHD.transpose(0, 1)
    group = plan.mesh.group(Axis.ULYSSES)
    (x_BLHD,) = gather_heads([[x_TBHD]], plan.message[:1], plan.ulysses_rank, group).wait()
    return x_BLHD


class GradientsToTokens:
    """dq [B, L, H, D], dk and dv [B, L, K, D] from dq [T, B, h, D], dk and dv [T, B, k, D].

    In one message, unless some K/V head is shared by ranks: its partial gradients travel in the accumulation
    dtype, and their sum is rounded once. The list is emptied, to free what only it holds.
    """

    def __init__(
        self, gradients: list[torch.Tensor], plan: AttentionPlan, dtype: torch.dtype
    ) -> None:
        self._dtype = dtype
        self._pending: list[Pending] = []
        if plan.heads.ulysses_size == 1:
            self._here = [gradients.pop(0).transpose(0, 1).to(dtype) for _ in range(3)]
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
        """The three, in the dtype of the inputs."""
        here = [x for pending in self._pending for x in pending.wait()] or self._here
        dq, dk, dv = (x.to(self._dtype) for x in here)
        return dq, dk, dv
