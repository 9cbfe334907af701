"""Gathering shards of equal size from every rank of a group, and adding up what goes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lightning_cp.named_ranges import named


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


class PendingShards:
    """A collective under way; its buffers live until it has been waited for."""

    def __init__(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        work: dist.Work | None,
        finish: Callable[[torch.Tensor], torch.Tensor] | None = None,
        name: str = "all-gather",
    ) -> None:
        self._received: torch.Tensor | None = received
        self._sent: torch.Tensor | None = sent
        self._work = work
        self._finish = finish
        self._name = name

    def wait(self) -> torch.Tensor:
        """Block until it is done; what was received, which is then the caller's alone. Call it once."""
        if self._work is not None:
            with named("{} wait", self._name):
                self._work.wait()
        received, self._received = self._received, None
        self._work = self._sent = None
        assert received is not None
        return received if self._finish is None else self._finish(received)


def start_all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> PendingShards:
    """Start gathering ``x`` [T, ...] of every rank: [N*T, ...] in rank order."""
    x = x.contiguous()
    if group.size() == 1:
        return PendingShards(x, x, None)
    received = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    with named("all-gather post"):
        return PendingShards(received, x, gather(received, x, group=group, async_op=True))


def start_reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup) -> PendingShards:
    """Start adding up every rank's ``x`` [N*T, ...]: this rank's [T, ...] of the sum.

    With gloo the shards are exchanged and added in rank order: as many bytes as its own reduce-scatter
    moves, several times faster, and deterministic.
    """
    ranks, name = group.size(), "reduce-scatter"
    x = x.contiguous()
    if ranks == 1:
        return PendingShards(x, x, None)
    if dist.get_backend(group) == dist.Backend.GLOO:
        received = torch.empty_like(x)
        with named("reduce-scatter post"):
            work = dist.all_to_all_single(received, x, group=group, async_op=True)
        return PendingShards(received, x, work, lambda shards: _sum_of_ranks(shards, ranks), name)
    total = x.new_empty(x.shape[0] // ranks, *x.shape[1:])
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    with named("reduce-scatter post"):
        work = scatter(total, x, group=group, async_op=True)
    return PendingShards(total, x, work, name=name)


def _sum_of_ranks(x: torch.Tensor, ranks: int) -> torch.Tensor:
    return x.unflatten(0, (ranks, -1)).sum(0)
