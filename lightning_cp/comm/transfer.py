"""Point-to-point transfers of one hop (keys out, gradients home), and asynchronous messages of any sizes.

Every rank posts its transfers in the same order of hops, so messages between two ranks match in
order (NCCL has no tags). A send buffer lives until ``wait``: overwriting it earlier would corrupt the
receiver's data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lightning_cp.comm.waits import wait_for
from lightning_cp.utils.tracing import profile_range


@dataclass
class Transfer:
    """A hop's send and receive in flight."""

    received: torch.Tensor | None
    sent: torch.Tensor | None
    works: list[dist.Work]

    def wait(self) -> torch.Tensor | None:
        """Block until both directions are done and return the received tensor, if there is one."""
        if self.works:
            wait_for(*self.works)
        self.works, self.sent = [], None
        return self.received


def start_transfer(
    send: torch.Tensor | None,
    dest: int,
    receive_shape: Sequence[int] | None,
    source: int,
    like: torch.Tensor,
    group: dist.ProcessGroup,
) -> Transfer:
    """Post a send to ``dest`` and a receive from ``source`` (ranks of ``group``), either optional.

    Args:
        send: a contiguous tensor, or ``None`` to send nothing.
        dest: the receiver.
        receive_shape: shape of what ``source`` sends, or ``None`` to receive nothing.
        source: the sender.
        like: gives the received tensor its dtype and device.
        group: the ring's process group.
    """
    ops: list[dist.P2POp] = []
    received: torch.Tensor | None = None
    if send is not None:
        ops.append(dist.P2POp(dist.isend, send, group=group, group_peer=dest))
    if receive_shape is not None:
        received = like.new_empty(tuple(receive_shape))
        ops.append(dist.P2POp(dist.irecv, received, group=group, group_peer=source))
    works = dist.batch_isend_irecv(ops) if ops else []
    return Transfer(received, send, works)


class PendingMessage:
    """A message in flight; holds the send buffer until ``wait``."""

    def __init__(
        self, received: torch.Tensor, sent: torch.Tensor | None, work: dist.Work | None
    ) -> None:
        self._received, self._sent, self._work = received, sent, work

    def wait(self) -> torch.Tensor:
        """Block until the message has arrived and return it."""
        if self._work is not None:
            with profile_range("message wait"):
                wait_for(self._work)
        self._sent = self._work = None
        return self._received


def post_all_to_all(
    send: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> PendingMessage:
    """Start sending each rank of the group its entries; all ranks call it together.

    Args:
        send: [sum of sent], for each rank in the order of the group.
        sent: entries for each rank.
        received: entries from each rank.
        group: the ranks.

    Returns:
        A message [sum of received], of each rank in order.
    """
    into = send.new_empty(sum(received))
    with profile_range("message post"):
        work = dist.all_to_all_single(
            into, send, list(received), list(sent), group=group, async_op=True
        )
    return PendingMessage(into, send, work)


def post_broadcast(x: torch.Tensor, source: int, group: dist.ProcessGroup) -> PendingMessage:
    """Start broadcasting ``x`` of one rank to the group.

    Args:
        x: [n], sent by ``source`` and overwritten on the other ranks.
        source: the sender, as a rank of the group.
        group: the ranks.
    """
    with profile_range("message post"):
        work = dist.broadcast(x, group=group, group_src=source, async_op=True)
    return PendingMessage(x, None, work)
