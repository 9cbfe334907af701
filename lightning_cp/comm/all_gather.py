"""Gathering shards of equal size from every rank of a group, differentiably."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, ...]:
    """The tensors of all ranks of ``group``, in rank order; every rank passes the same shape.

    Differentiable: a rank's gradient is the sum, over the ranks, of the gradients of its tensor.
    """
    return _AllGather.apply(x, group)  # type: ignore[no-any-return]


class _AllGather(torch.autograd.Function):
    """Shapes over N ranks.

    ========  ==============================  =============  ==========================
    pass      input                           collective     output
    ========  ==============================  =============  ==========================
    forward   x [...]                         all-gather     N tensors [...]
    backward  N gradients [...]               all-to-all     dx [...], the sum over ranks
    ========  ==============================  =============  ==========================

    The backward adds in rank order, so that it is deterministic (a reduce-scatter need not be).
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        x = x.contiguous()
        shards = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(shards, x, group=group)
        return tuple(shards)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        send = torch.stack([gradient.contiguous() for gradient in gradients])
        received = torch.empty_like(send)
        dist.all_to_all_single(received, send, group=ctx.group)
        return received.sum(0), None
