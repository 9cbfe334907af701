"""Reductions of small tensors over a group, and broadcasts from its first rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_cp.utils.tensors import to_list

MESSAGE_BYTES = 4 * 2**20
"""Most bytes of a message that several small tensors share."""


def all_sum(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum of ``x`` over the ranks of ``group``, equal on every rank; does not change ``x``.

    Args:
        x: [...], the same shape and dtype on all ranks, on the device that the group's messages travel from.
        group: all of its ranks call this together.
    """
    total = x.detach().clone()
    dist.all_reduce(total, group=group)
    return total


def all_mean(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the mean of ``x`` over the ranks of ``group``, equal on every rank; does not change ``x``.

    Args:
        x: [...], the same shape and dtype on all ranks, on the device that the group's messages travel from.
        group: all of its ranks call this together.
    """
    total = x.detach().clone()
    divisor = prescale(total, group.size())
    dist.all_reduce(total, group=group)
    return total / divisor


def prescale(x: torch.Tensor, size: int) -> float:
    """Prepare ``x`` in place for a sum over ``size`` ranks; return the number to divide that sum by.

    A sum of float16 overflows above 65,504, so these are divided first: by a power of two, which rounds only
    numbers below 6e-5.
    """
    if x.dtype != torch.float16:
        return size
    power = 1 << (size - 1).bit_length()
    x.div_(power)
    return size / power


def all_max(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the elementwise maximum of ``x`` over the ranks of ``group``; does not change ``x``.

    Args:
        x: [...], the same shape and dtype on all ranks, on the device that the group's messages travel from.
        group: all of its ranks call this together.
    """
    largest = x.detach().clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest


def any_rank(flags: Sequence[bool], group: dist.ProcessGroup) -> list[bool]:
    """Return for each flag whether it is set on any rank of ``group``.

    Args:
        flags: as many on all ranks.
        group: a control group; all of its ranks call this together.
    """
    return to_list(all_max(torch.tensor(flags, dtype=torch.int32), group).bool())


def broadcast_tensors(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite tensors in place by those of the group's first rank; small ones share a message.

    Args:
        tensors: of any shapes and dtypes, the same on all ranks and in the same order; no ``DTensor``.
        group: all of its ranks call this together.
    """
    if group.size() == 1:
        return
    waiting: list[torch.Tensor] = []
    held = 0
    for x in tensors:
        held += x.nbytes
        if held > MESSAGE_BYTES:
            _broadcast_as_bytes(waiting, group)
            waiting, held = [], x.nbytes
        waiting.append(x.detach())
    _broadcast_as_bytes(waiting, group)


def _broadcast_as_bytes(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Broadcast in one message, as bytes: backends do not support all dtypes."""
    nonempty = [x for x in tensors if x.numel()]
    if not nonempty:
        return
    own = [x.contiguous().view(-1).view(torch.uint8) for x in nonempty]
    sent = torch.cat(own) if len(own) > 1 else own[0]
    dist.broadcast(sent, dist.get_global_rank(group, 0), group=group)
    for x, part in zip(nonempty, sent.split([one.numel() for one in own]), strict=True):
        if part.data_ptr() != x.data_ptr():
            aligned = part.clone() if len(own) > 1 else part
            x.copy_(aligned.view(x.dtype).view(x.shape))


def start_all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> torch.futures.Future[Any]:
    """Start summing ``x`` over the ranks of ``group`` in place; the future holds ``[x]``.

    Args:
        x: [...], contiguous, the same shape and dtype on all ranks; in use until the future is done.
        group: all of its ranks call this together.
    """
    work = dist.all_reduce(x, group=group, async_op=True)
    assert work is not None
    return work.get_future()


def broadcast_integer(value: int, group: dist.ProcessGroup) -> int:
    """Return the first rank's ``value``; the group's backend moves CPU tensors."""
    shared = torch.tensor([value], dtype=torch.int64)
    dist.broadcast(shared, group=group, group_src=0)
    return int(shared)
