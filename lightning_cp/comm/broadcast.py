"""One rank's number for all ranks of a group."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist


def broadcast_integer(value: int, group: dist.ProcessGroup) -> int:
    """The first rank's ``value``; the group's backend moves CPU tensors."""
    shared = torch.tensor([value], dtype=torch.int64)
    dist.broadcast(shared, group=group, group_src=0)
    return int(shared)


def broadcast_values(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Give every rank the values that the group's first one has, in place; all have the same shapes."""
    for x in tensors:
        values = x.contiguous()
        dist.broadcast(values, group=group, group_src=0)
        if values is not x:
            x.copy_(values)
