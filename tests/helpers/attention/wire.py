"""Counting what a rank sends, at PyTorch's dispatcher, where no call escapes."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_cp.layout import Traffic

ALL_GATHER = "_allgather_base_"
REDUCE_SCATTER = "reduce_scatter"
"""On CPU an all-to-all in which a rank sends itself nothing; the parts are added where they arrive."""


class Message(NamedTuple):
    """One operation of torch.distributed.

    Args:
        op: its name: ``alltoall_base_``, ``send``, ``recv_``, ``allreduce_``, ...
        sent: bytes that leave this rank; the share that it keeps of an all-to-all is not sent.
        received: bytes that come from other ranks.
    """

    op: str
    sent: int
    received: int


class Wire(TorchDispatchMode):
    """Records every operation of torch.distributed in the block, forward or backward.

    Args:
        ulysses_rank: which share of an all-to-all stays here.
    """

    def __init__(self, ulysses_rank: int = 0) -> None:
        super().__init__()
        self.messages: list[Message] = []
        self._ulysses_rank = ulysses_rank

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            self.messages.append(self._message(func._schema.name.split("::")[1], args))
        return func(*args, **(kwargs or {}))

    def _message(self, op: str, args: tuple[Any, ...]) -> Message:
        if op == "alltoall_base_" and not args[4][dist.ProcessGroup.unbox(args[2]).rank()]:
            received, sent = (_bytes([x]) for x in args[:2])
            return Message(REDUCE_SCATTER, sent, received)
        if op == ALL_GATHER:
            ranks, own = dist.ProcessGroup.unbox(args[2]).size(), _bytes([args[1]])
            return Message(op, own * (ranks - 1), _bytes([args[0]]) - own)
        if op == "alltoall_base_":
            received, sent, _, received_sizes, sent_sizes = args[:5]
            return Message(
                op,
                (sum(sent_sizes) - sent_sizes[self._ulysses_rank]) * sent.element_size(),
                (sum(received_sizes) - received_sizes[self._ulysses_rank])
                * received.element_size(),
            )
        if op == "send":
            return Message(op, _bytes(args[0]), 0)
        if op == "recv_":
            return Message(op, 0, _bytes(args[0]))
        return Message(op, 0, 0)

    @property
    def counts(self) -> dict[str, int]:
        """How often each operation was called."""
        return dict(Counter(message.op for message in self.messages))

    @property
    def traffic(self) -> Traffic:
        """What was sent, in the planner's terms."""
        kinds = ("alltoall_base_", "send", ALL_GATHER, REDUCE_SCATTER)  # Traffic's order
        return Traffic(*(number for kind in kinds for number in self._of(kind)))

    def _of(self, op: str) -> tuple[int, int]:
        sent = [message.sent for message in self.messages if message.op == op]
        return len(sent), sum(sent)

    @property
    def received(self) -> int:
        """Bytes that came from other ranks."""
        return sum(message.received for message in self.messages)


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)
