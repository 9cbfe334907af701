"""Differentiable collectives of tensor parallelism: each rank has a part of every layer.

A *replicated* activation is whole on all ranks of a group; so are its gradient and every parameter that it
alone flows through. Of a *sharded* activation each rank has its part of the last dimension.

| function | forward | backward |
|---|---|---|
| ``copy_to_tp_region`` (replicated -> input of sharded layers) | nothing | sum over ranks |
| ``reduce_from_tp_region`` (partial sums -> replicated) | sum over ranks | nothing |
| ``gather_from_tp_region`` (sharded -> replicated, used alike) | all-gather | own part |
| ``gather_for_tp_shards`` (sharded -> whole, ranks use different parts) | all-gather | sum, own part |
| ``scatter_to_tp_region`` (replicated -> sharded) | own part | all-gather |
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lightning_cp.comm.all_gather import all_gather
from lightning_cp.utils.tracing import profile_range


def copy_to_tp_region(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Pass a replicated activation to sharded layers; its gradient is summed over the ranks.

    Args:
        x: [...], the same on all ranks.
        group: the ranks that share the layers.

    Returns:
        x, whose gradient [...] is summed over the ranks.
    """
    return _CopyToRegion.apply(x, group)  # type: ignore[no-any-return]


def reduce_from_tp_region(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum the outputs of the ranks' layers; the result is replicated.

    Args:
        x: [...], a part of the sum; the same shape on all ranks.
        group: the ranks that share the layers.

    Returns:
        The sum [...], in the dtype of ``x``.
    """
    return _ReduceFromRegion.apply(x, group)  # type: ignore[no-any-return]


def gather_from_tp_region(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather ``[..., n] -> [..., n * ranks]`` for computation that is the same on all ranks.

    Args:
        x: [..., n], this rank's part of the last dimension; the same shape on all ranks.
        group: the ranks that share the layers, in the order of their parts.
    """
    return _GatherFromRegion.apply(x, group)  # type: ignore[no-any-return]


def gather_for_tp_shards(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather ``[..., n] -> [..., n * ranks]`` for ranks that use different parts of it.

    Args:
        x: [..., n], this rank's part of the last dimension; the same shape on all ranks.
        group: the ranks that share the layers, in the order of their parts.
    """
    return torch.cat(all_gather(x, group), dim=-1)


def scatter_to_tp_region(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Cut ``[..., n * ranks] -> [..., n]``: this rank's part of a replicated activation.

    Args:
        x: [..., n * ranks], the same on all ranks.
        group: the ranks that share the layers, in the order of their parts.
    """
    return _ScatterToRegion.apply(x, group)  # type: ignore[no-any-return]


class _CopyToRegion(torch.autograd.Function):
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
        return _all_reduce(gradients[0], ctx.group), None


class _ReduceFromRegion(torch.autograd.Function):
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
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class _GatherFromRegion(torch.autograd.Function):
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
        return _gather(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _own_part(gradients[0], ctx.group), None


class _ScatterToRegion(torch.autograd.Function):
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
        return _own_part(x, group).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _gather(gradients[0], ctx.group), None


def _gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(group.size())]
    with profile_range("tensor-parallel all-gather"):
        dist.all_gather(parts, x, group=group)
    return torch.cat(parts, dim=-1)


def _own_part(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    size = x.shape[-1] // group.size()
    return x.narrow(-1, group.rank() * size, size)


def _all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total = x.detach().clone(memory_format=torch.contiguous_format)
    with profile_range("tensor-parallel sum"):
        dist.all_reduce(total, group=group)
    return total
