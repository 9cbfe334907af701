"""One rank's number for all ranks of a group."""

from __future__ import annotations

import torch
import torch.distributed as dist


def broadcast_integer(value: int, group: dist.ProcessGroup) -> int:
    """The first rank's ``value``; the group's backend moves CPU tensors."""
    shared = torch.tensor([value], dtype=torch.int64)
    dist.broadcast(shared, group=group, group_src=0)
    return int(shared)
