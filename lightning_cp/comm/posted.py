"""Messages of any sizes between the ranks of a group, under way while this rank goes on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from lightning_cp.named_ranges import named


class Posted:
    """A message under way; what is sent lives here until it has been waited for."""

    def __init__(
        self, received: torch.Tensor, sent: torch.Tensor | None, work: dist.Work | None
    ) -> None:
        self._received, self._sent, self._work = received, sent, work

    def wait(self) -> torch.Tensor:
        """The received tensor."""
        if self._work is not None:
            with named("message wait"):
                self._work.wait()
        self._sent = self._work = None
        return self._received


def post_all_to_all(
    send: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> Posted:
    """Begin to give each rank of the group its entries; all ranks call it together.

    Args:
        send: [sum of sent], for each rank in the order of the group.
        sent: entries for each rank.
        received: entries from each rank.
        group: the ranks.

    Returns:
        A message [sum of received], of each rank in order.
    """
    into = send.new_empty(sum(received))
    with named("message post"):
        work = dist.all_to_all_single(
            into, send, list(received), list(sent), group=group, async_op=True
        )
    return Posted(into, send, work)


def post_broadcast(x: torch.Tensor, source: int, group: dist.ProcessGroup) -> Posted:
    """Begin to give all ranks of the group what one has.

    Args:
        x: [n], sent, or overwritten where it is received.
        source: whose, as a place in the group.
        group: the ranks.
    """
    with named("message post"):
        work = dist.broadcast(x, group=group, group_src=source, async_op=True)
    return Posted(x, None, work)
