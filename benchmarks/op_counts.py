"""Counts of a step's sent bytes, kernel calls and live memory, at PyTorch's dispatcher: no call escapes.

Counting slows a step down, so it needs a separate pass, which is not timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from benchmarks.step_memory import PeakBytes

KERNELS = ("flash_attention", "flash_attn")
"""Parts of the names of attention operators, forward and backward."""
SILENT = frozenset({"recv_", "wait_tensor", "_wrap_tensor_autograd"})
"""Operations of torch.distributed that send nothing; a receive is another rank's send."""

_hidden = 0


@contextmanager
def memory_hidden() -> Iterator[None]:
    """Count no memory in the block: temporaries of a stand-in that the real function does not have."""
    global _hidden
    _hidden += 1
    try:
        yield
    finally:
        _hidden -= 1


class Counts(PeakBytes):
    """The operations of a block, forward or backward, in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = 0
        """Calls of attention operators."""
        self.data = 0
        """Bytes of floating-point numbers that this rank sent: attention's data. The share of a collective
        that a rank keeps is not sent."""
        self.control = 0
        """Bytes of integers that this rank sent, by which ranks agree on a call, whatever the operation."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if DTensor in types:
            return (
                NotImplemented  # which comes back with the tensors inside it, and what these send
            )
        name = func._schema.name.split("::")[1]
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(name, args)
        elif any(part in name for part in KERNELS):
            self.kernels += 1
        if _hidden:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        tensors = (x for x in tree_leaves(args) if isinstance(x, torch.Tensor))
        if any(x.is_floating_point() for x in tensors):
            self.data += sent_by(name, args)
        else:
            self.control += sent_by(name, args)


def sent_by(name: str, args: tuple[Any, ...]) -> int:
    """Return the bytes that one operation of torch.distributed sends to other ranks.

    Raises:
        NotImplementedError: an unknown operation.
    """
    if name in SILENT:
        return 0
    if name == "send":
        return _bytes(args[0])
    if name == "allgather_":
        return _bytes(args[1]) * (_group(args[2]).size() - 1)
    if (
        name == "allreduce_"
    ):  # as around a ring: everybody's share to its sum, and the sum to everybody
        ranks = _group(args[1]).size()
        return 2 * _bytes(args[0]) * (ranks - 1) // ranks
    if name == "_allgather_base_":
        return _bytes([args[1]]) * (_group(args[2]).size() - 1)
    if name == "all_gather_into_tensor":
        return _bytes([args[0]]) * (args[1] - 1)
    if name in ("alltoall_base_", "all_to_all_single"):
        # (received, sent, group, their sizes, our sizes) and (sent, their sizes, our sizes, group)
        sent, sizes, group = (
            (args[1], args[4], args[2]) if name == "alltoall_base_" else (args[0], args[2], args[3])
        )
        return _to_others(sent, sizes, _group(group))
    if (
        name == "broadcast_"
    ):  # (tensors, group, source): a message for each other rank, however they travel
        group = _group(args[1])
        return _bytes(args[0]) * (group.size() - 1) * (group.rank() == args[2])
    if name == "_reduce_scatter_base_":
        return _to_others(args[1], [], _group(args[2]))
    raise NotImplementedError(f"counting does not know what torch.distributed's {name} sends.")


def _to_others(sent: torch.Tensor, sizes: list[int], group: dist.ProcessGroup) -> int:
    """Return the bytes of all parts except this rank's own; parts are equal where no sizes are given."""
    if not sizes:
        return _bytes([sent]) // group.size() * (group.size() - 1)
    of_entry = _bytes([sent]) // max(sum(sizes), 1)
    return (sum(sizes) - sizes[group.rank()]) * of_entry


def _group(given: Any) -> dist.ProcessGroup:
    """Return the group that the dispatcher passes by name or boxed."""
    if isinstance(given, str):
        return _resolve_process_group(GroupName(given))
    return dist.ProcessGroup.unbox(given)


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)
