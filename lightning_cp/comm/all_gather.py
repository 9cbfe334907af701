"""Gathering shards of equal size from every rank of a group, and adding up what goes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lightning_cp.layout.tiles import Ranges
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
        with named("copies"):
            return received if self._finish is None else self._finish(received)


def start_all_gather(
    tensors: torch.Tensor | Sequence[torch.Tensor], group: dist.ProcessGroup
) -> PendingShards:
    """Start gathering [T, ...] of every rank: [N*T, ...] in rank order.

    Several tensors [T, B, heads, D], D of any width, travel as one, head by head (head 0 of each, head 1 of
    each, ...). They are written to their place in the result, and sent from there.
    """
    parts = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    x, ranks = parts[0], group.size()
    dims = [part.shape[-1] for part in parts]
    shape = x.shape[1:] if len(parts) == 1 else (*x.shape[1:-1], sum(dims))
    received = x.new_empty(ranks * len(x), *shape)
    own = received.narrow(0, group.rank() * len(x), len(x))
    with named("copies"):
        for place, part in zip(own.split(dims, dim=-1), parts, strict=True):
            place.copy_(part)
    if ranks == 1:
        return PendingShards(received, own, None)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    with named("all-gather post"):
        return PendingShards(received, own, gather(received, own, group=group, async_op=True))


def start_reduce_scatter(
    x: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    order: Ranges | None = None,
) -> PendingShards:
    """Start adding up every rank's ``x`` [N*T, ...]: this rank's [T, ...] of the sum.

    With gloo the other ranks' shards are exchanged and added in rank order: as many bytes as its own
    reduce-scatter moves, several times faster, and deterministic.

    Args:
        x: the shards, which may be given up once this returns.
        group: the ranks.
        order: ranges of the rank order that ``x`` consists of, laid end to end; rank order itself by default.
    """
    ranks, rank, length = group.size(), group.rank(), len(x) // group.size()
    own = rank * length, (rank + 1) * length
    if order is not None and len(order) == 1:
        order = None
    if dist.get_backend(group) == dist.Backend.GLOO or ranks == 1:
        sent, into = (x.new_empty(n * length, *x.shape[1:]) for n in (ranks - 1, 1))
        _put_in_order(x, order, [(0, own[0], sent), (*own, into), (own[1], len(x), sent[own[0] :])])
        return _exchange(sent, into, group)
    whole = x.contiguous() if order is None else torch.empty_like(x)
    if order is not None:
        _put_in_order(x, order, [(0, len(x), whole)])
    total = x.new_empty(length, *x.shape[1:])
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    with named("reduce-scatter post"):
        work = scatter(total, whole, group=group, async_op=True)
    return PendingShards(total, whole, work, name="reduce-scatter")


def _put_in_order(
    x: torch.Tensor, order: Ranges | None, places: Sequence[tuple[int, int, torch.Tensor]]
) -> None:
    """Copy what lies in some ranges of the rank order: (from, to, where)."""
    at = 0
    with named("copies"):
        for start, end in ((0, len(x)),) if order is None else order:
            for first, last, place in places:
                low, high = max(start, first), min(end, last)
                if low < high:
                    place[low - first : high - first] = x[at + low - start : at + high - start]
            at += end - start


def _exchange(sent: torch.Tensor, into: torch.Tensor, group: dist.ProcessGroup) -> PendingShards:
    """Add the shards of the other ranks to this rank's own, which ``into`` holds."""
    ranks, rank, length = group.size(), group.rank(), len(into)
    received = torch.empty_like(sent)
    if ranks == 1:
        return PendingShards(into, sent, None)
    sizes = [length * (other != rank) for other in range(ranks)]
    with named("reduce-scatter post"):
        work = dist.all_to_all_single(
            *(received, sent),
            output_split_sizes=sizes,
            input_split_sizes=sizes,
            group=group,
            async_op=True,
        )
    finish = partial(_add_in_rank_order, into=into, rank=rank)
    return PendingShards(received, sent, work, finish, "reduce-scatter")


def _add_in_rank_order(others: torch.Tensor, *, into: torch.Tensor, rank: int) -> torch.Tensor:
    """``into``, which holds the shard of ``rank``, with the shards of the others before and after it."""
    shards = list(others.split(len(into)))
    shards.insert(rank, into)
    total = shards[0]
    for shard in shards[1:]:
        total += shard
    return total if total is into else into.copy_(total)
