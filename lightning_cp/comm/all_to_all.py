"""Ulysses' exchange: trade sequence for heads, and back.

``U`` ranks of a group, each with ``L`` tokens of all heads, end up with ``U*L`` tokens of some
heads. Messages are token-first ([tokens, batch, heads, head dim]), so that what arrives from the
ranks in order *is* the longer sequence: no permutation on the receiving side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lightning_cp.named_ranges import named

HeadRanges = Sequence[tuple[int, int]]
"""(first, past-last) head of each rank of the group; ranges may overlap (shared K/V heads)."""


@dataclass
class Pending:
    """An all-to-all under way; the send buffer lives here until it has been waited for."""

    received: torch.Tensor
    _sent: torch.Tensor | None
    _work: dist.Work | None

    def wait(self) -> torch.Tensor:
        """The flat received buffer, complete."""
        if self._work is not None:
            with named("all-to-all wait"):
                self._work.wait()
        self._work = self._sent = None
        return self.received


def scatter_heads(
    x_BLHD: torch.Tensor, ranges: HeadRanges, rank: int, group: dist.ProcessGroup
) -> Pending:
    """Start sending each rank its heads of our tokens.

    Returns:
        A transfer whose buffer is ``[U*L, B, heads of rank, D]``: the tokens of all ranks in order.
    """
    batch, tokens, _, dim = x_BLHD.shape
    sizes = [tokens * batch * (last - first) * dim for first, last in ranges]
    send = x_BLHD.new_empty(sum(sizes))
    for (first, last), piece in zip(ranges, send.split(sizes), strict=True):
        piece.view(tokens, batch, last - first, dim).copy_(x_BLHD[:, :, first:last].transpose(0, 1))
    heads = ranges[rank][1] - ranges[rank][0]
    received = x_BLHD.new_empty(len(ranges) * tokens, batch, heads, dim)
    return _start(received, send, [sizes[rank]] * len(ranges), sizes, group)


def gather_heads(
    x_LBHD: torch.Tensor, ranges: HeadRanges, rank: int, num_heads: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Send every rank its tokens of our heads; the adjoint of :func:`scatter_heads`.

    Args:
        x_LBHD: ``[U*L, B, heads of rank, D]``.

    Returns:
        ``[B, L, num_heads, D]``. Contributions to a head that several ranks hold are summed.
    """
    total, batch, heads, dim = x_LBHD.shape
    tokens = total // len(ranges)
    sizes = [tokens * batch * (last - first) * dim for first, last in ranges]
    received = x_LBHD.new_empty(sum(sizes))
    sent = [tokens * batch * heads * dim] * len(ranges)
    pieces = _start(received, x_LBHD.contiguous(), sizes, sent, group).wait().split(sizes)
    gathered = x_LBHD.new_empty(batch, tokens, num_heads, dim)
    filled = 0  # heads below this one hold a value already: ranges are sorted, overlaps add up
    for (first, last), piece in zip(ranges, pieces, strict=True):
        part = piece.view(tokens, batch, last - first, dim).transpose(0, 1)
        fresh = max(first, filled)
        gathered[:, :, first:fresh] += part[:, :, : fresh - first]
        gathered[:, :, fresh:last] = part[:, :, fresh - first :]
        filled = last
    return gathered


def _start(
    received: torch.Tensor,
    send: torch.Tensor,
    received_sizes: list[int],
    sent_sizes: list[int],
    group: dist.ProcessGroup,
) -> Pending:
    with named("all-to-all post"):
        work = dist.all_to_all_single(
            received.view(-1), send.view(-1), received_sizes, sent_sizes, group=group, async_op=True
        )
    return Pending(received, send, work)
