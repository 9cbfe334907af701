"""Point-to-point transfers of one hop: keys to the ranks that need them, their gradients home.

Every rank posts its transfers in the same order of hops, so messages between two ranks match in
order (NCCL has no tags). A send buffer lives until its transfer has been waited for: overwriting it
earlier would corrupt the receiver's data.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


class Transfer:
    """One hop's send and receive under way."""

    def __init__(
        self, received: torch.Tensor | None, sent: torch.Tensor | None, works: list[dist.Work]
    ) -> None:
        self._received = received
        self._sent = sent
        self._works = works

    def wait(self) -> torch.Tensor | None:
        """Block until both directions are done; what was received, if anything was."""
        for work in self._works:
            work.wait()
        self._works, self._sent = [], None
        return self._received


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
        dest: who receives it.
        receive_shape: shape of what ``source`` sends, or ``None`` to receive nothing.
        source: who sends it.
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
