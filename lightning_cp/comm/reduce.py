"""Sums of small tensors over a group, and what all of it take from its first rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

MESSAGE = 4 * 2**20
"""Bytes of a message that several small tensors share."""


def all_sum(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of ``x`` over the ranks of ``group``, equal on every rank; ``x`` is left as it is.

    Args:
        x: [...], the same shape and dtype on all ranks, on the device that the group's messages travel from.
        group: every rank of it comes here.
    """
    total = x.detach().clone()
    dist.all_reduce(total, group=group)
    return total


def all_max(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The largest ``x`` of the ranks of ``group``, element by element; ``x`` is left as it is.

    Args:
        x: [...], the same shape and dtype on all ranks, on the device that the group's messages travel from.
        group: every rank of it comes here.
    """
    largest = x.detach().clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest


def from_first(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite tensors by those of the group's first rank: in place, small ones in one message.

    Args:
        tensors: of any shapes and dtypes, the same on all ranks and in the same order; no ``DTensor``.
        group: every rank of it comes here.
    """
    if group.size() == 1:
        return
    waiting: list[torch.Tensor] = []
    held = 0
    for x in tensors:
        held += x.nbytes
        if held > MESSAGE:
            _overwrite(waiting, group)
            waiting, held = [], x.nbytes
        waiting.append(x.detach())
    _overwrite(waiting, group)


def _overwrite(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """In one message, as bytes: backends do not know all dtypes."""
    kept = [x for x in tensors if x.numel()]
    if not kept:
        return
    own = [x.contiguous().view(-1).view(torch.uint8) for x in kept]
    sent = torch.cat(own) if len(own) > 1 else own[0]
    dist.broadcast(sent, dist.get_global_rank(group, 0), group=group)
    for x, part in zip(kept, sent.split([one.numel() for one in own]), strict=True):
        if part.data_ptr() != x.data_ptr():
            aligned = part.clone() if len(own) > 1 else part
            x.copy_(aligned.view(x.dtype).view(x.shape))


def summed_later(x: torch.Tensor, group: dist.ProcessGroup) -> torch.futures.Future[Any]:
    """Add ``x`` over the ranks of ``group`` in place, while this rank goes on; gives ``[x]``.

    Args:
        x: [...], contiguous, the same shape and dtype on all ranks; left alone until the future is done.
        group: every rank of it comes here.
    """
    work = dist.all_reduce(x, group=group, async_op=True)
    assert work is not None
    return work.get_future()
