"""Exchanges of tensor-parallel ranks: each has a part of every layer, and all have what is between layers.

An activation that all ranks of a group hold whole is *replicated*: so are its gradient and every parameter
that it alone flows through. One of which each has its own part of the last dimension is *sharded*.

| function | forward | backward |
|---|---|---|
| ``enter`` (replicated -> used by sharded layers) | nothing | sum over ranks |
| ``leave`` (partial sums -> replicated) | sum over ranks | nothing |
| ``gather_last`` (sharded -> replicated, and used alike) | all-gather | own part |
| ``gather_last_for_parts`` (sharded -> whole, each uses another part) | all-gather | sum, own part |
| ``own_last`` (replicated -> sharded) | own part | all-gather |
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lightning_cp.comm.all_gather import all_gather
from lightning_cp.named_ranges import named


def enter(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """A replicated activation for sharded layers, each rank's of which adds to its gradient.

    Args:
        x: [...], the same on all ranks.
        group: those that share the layers.

    Returns:
        x, whose gradient [...] is summed over the ranks.
    """
    return _Enter.apply(x, group)  # type: ignore[no-any-return]


def leave(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of what the ranks' layers have made, replicated.

    Args:
        x: [...], a part of the sum; the same shape on all ranks.
        group: those that share the layers.

    Returns:
        The sum [...], in the dtype of ``x``.
    """
    return _Leave.apply(x, group)  # type: ignore[no-any-return]


def gather_last(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``[..., n] -> [..., n * ranks]``, of which all ranks go on to make the same.

    Args:
        x: [..., n], this rank's part of the last dimension; the same shape on all ranks.
        group: those that share the layers, in the order of their parts.
    """
    return _GatherLast.apply(x, group)  # type: ignore[no-any-return]


def gather_last_for_parts(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``[..., n] -> [..., n * ranks]``, of which each rank uses what it likes.

    Args:
        x: [..., n], this rank's part of the last dimension; the same shape on all ranks.
        group: those that share the layers, in the order of their parts.
    """
    return torch.cat(all_gather(x, group), dim=-1)


def own_last(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``[..., n * ranks] -> [..., n]``: this rank's part of what all ranks have made alike.

    Args:
        x: [..., n * ranks], the same on all ranks.
        group: those that share the layers, in the order of their parts.
    """
    return _OwnLast.apply(x, group)  # type: ignore[no-any-return]


class _Enter(torch.autograd.Function):
    """Shapes over P ranks.

    ========  ====================================  ==========  ================================
    pass      input                                 collective  output
    ========  ====================================  ==========  ================================
    forward   x [...], replicated                   none        x [...]
    backward  d x [...], of this rank's layers      all-reduce  d x [...], the sum, replicated
    ========  ====================================  ==========  ================================
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _summed(gradients[0], ctx.group), None


class _Leave(torch.autograd.Function):
    """Shapes over P ranks.

    ========  ====================================  ==========  ================================
    pass      input                                 collective  output
    ========  ====================================  ==========  ================================
    forward   x [...], a part of a sum              all-reduce  the sum [...], replicated
    backward  d sum [...], replicated               none        d x [...], the same
    ========  ====================================  ==========  ================================
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class _GatherLast(torch.autograd.Function):
    """Shapes over P ranks.

    ========  ====================================  ==========  ================================
    pass      input                                 collective  output
    ========  ====================================  ==========  ================================
    forward   x [..., n], this rank's part          all-gather  [..., n * P], replicated
    backward  d [..., n * P], replicated            none        d x [..., n], this rank's part
    ========  ====================================  ==========  ================================
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _own(gradients[0], ctx.group), None


class _OwnLast(torch.autograd.Function):
    """Shapes over P ranks.

    ========  ====================================  ==========  ================================
    pass      input                                 collective  output
    ========  ====================================  ==========  ================================
    forward   x [..., n * P], replicated            none        [..., n], this rank's part
    backward  d [..., n], this rank's part          all-gather  d x [..., n * P], replicated
    ========  ====================================  ==========  ================================
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _own(x, group).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _gathered(gradients[0], ctx.group), None


def _gathered(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(group.size())]
    with named("tensor-parallel all-gather"):
        dist.all_gather(parts, x, group=group)
    return torch.cat(parts, dim=-1)


def _own(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    size = x.shape[-1] // group.size()
    return x.narrow(-1, group.rank() * size, size)


def _summed(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total = x.detach().clone(memory_format=torch.contiguous_format)
    with named("tensor-parallel sum"):
        dist.all_reduce(total, group=group)
    return total
