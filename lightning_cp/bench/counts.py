"""What a step does, counted at PyTorch's dispatcher, where no call escapes: bytes, calls and live memory.

Counting slows a step down, so it is done in a pass of its own, which is not timed.
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

from lightning_cp.bench.peak_bytes import PeakBytes

KERNELS = ("flash_attention", "flash_attn")
"""What the names of attention operators contain, forward and backward."""
SILENT = frozenset({"recv_", "wait_tensor", "_wrap_tensor_autograd"})
"""Operations of torch.distributed that send nothing; a receive is another rank's send."""

_hidden = 0


@contextmanager
def memory_hidden() -> Iterator[None]:
    """Within it no memory is counted: for temporaries of a stand-in that the real function does not have."""
    global _hidden
    _hidden += 1
    try:
        yield
    finally:
        _hidden -= 1


class Counts(PeakBytes):
    """Counts everything of the block, forward or backward, in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = 0
        """Calls of attention operators."""
        self.data = 0
        """Bytes that left this rank of floating-point numbers, which are what attention computes with. The
        share that a rank keeps of a collective is not sent."""
        self.control = 0
        """Likewise, of integers, by which ranks agree on a call, whatever the operation."""

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
    """Bytes that one operation of torch.distributed sends to other ranks.

    Raises:
        NotImplementedError: an operation that is not known.
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
    """All but this rank's own part; parts are equal where no sizes are given."""
    if not sizes:
        return _bytes([sent]) // group.size() * (group.size() - 1)
    of_entry = _bytes([sent]) // max(sum(sizes), 1)
    return (sum(sizes) - sizes[group.rank()]) * of_entry


def _group(given: Any) -> dist.ProcessGroup:
    """As the dispatcher hands it over: by name, or boxed."""
    if isinstance(given, str):
        return _resolve_process_group(GroupName(given))
    return dist.ProcessGroup.unbox(given)


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)
