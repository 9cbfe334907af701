"""Ulysses' exchange: trade sequence for heads, and back.

``U`` ranks of a group, each with ``L`` tokens of all heads, end up with ``U*L`` tokens of some
heads. Messages are token-first ([tokens, batch, heads, head dim]), so that what arrives from the
ranks in order *is* the longer sequence: no permutation on the receiving side.

A message has sections, one after the other along its heads: queries, say, then keys and values. The
tensors of a section have the same heads and lie in it head by head (K of head 0, V of head 0, K of head 1,
...), so that a range of heads is one slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from lightning_cp.named_ranges import named

HeadRanges = Sequence[tuple[int, int]]
"""(first, past-last) head of each rank of the group; ranges may overlap (shared K/V heads)."""


class Section(NamedTuple):
    """Part of a message: some tensors of equal heads, and which of these each rank of the group has."""

    ranges: HeadRanges
    tensors: int = 1

    def width(self, rank: int) -> int:
        """Heads of all tensors that a rank has."""
        first, last = self.ranges[rank]
        return self.tensors * (last - first)

    @property
    def num_heads(self) -> int:
        """Of one tensor, over all ranks."""
        return self.ranges[-1][1]

    @property
    def is_even(self) -> bool:
        """Whether the ranks' heads are equally many, and nobody else's."""
        each = self.ranges[0][1]
        return all(heads == (at * each, (at + 1) * each) for at, heads in enumerate(self.ranges))


class Pending:
    """An all-to-all under way; the send buffer lives here until it has been waited for."""

    def __init__(
        self,
        received: torch.Tensor,
        sent: torch.Tensor | None,
        work: dist.Work | None,
        finish: Callable[[torch.Tensor], tuple[torch.Tensor, ...]],
    ) -> None:
        self._received: torch.Tensor | None = received
        self._sent = sent
        self._work = work
        self._finish = finish

    def wait(self) -> tuple[torch.Tensor, ...]:
        """What was received, in order; once."""
        assert self._received is not None
        if self._work is not None:
            with named("all-to-all wait"):
                self._work.wait()
        received, self._received, self._sent, self._work = self._received, None, None, None
        with named("copies"):
            return self._finish(received)


def scatter_heads(
    tensors: Sequence[Sequence[torch.Tensor]],
    sections: Sequence[Section],
    rank: int,
    group: dist.ProcessGroup,
) -> Pending:
    """Start sending each rank its heads of our tokens.

    Args:
        tensors: of each section, [B, L, heads, D]; all of one dtype.
        sections: how they make up a message.
        rank: ours in the group.
        group: the ranks.

    Returns:
        A transfer of one tensor ``[U*L, B, heads of rank, D]`` per section: the tokens of all ranks in order.
    """
    first = tensors[0][0]
    batch, tokens, _, dim = first.shape
    sizes = _sizes(sections, tokens * batch * dim)
    send = first.new_empty(sum(sizes))
    with named("copies"):
        for span, message in _messages(send, sections, sizes, (tokens, batch, dim)):
            parts = _parts(message, sections, span)
            for section, part, xs in zip(sections, parts, tensors, strict=True):
                for index, x_BLHD in enumerate(xs):
                    part[..., index :: section.tensors, :] = _by_rank(x_BLHD, section, span)
    widths = [section.width(rank) for section in sections]
    received = first.new_empty(len(sizes) * tokens, batch, sum(widths), dim)
    work = _start(received, send, [sizes[rank]] * len(sizes), sizes, group)
    return Pending(received, send, work, lambda whole: whole.split(widths, dim=2))


def gather_heads(
    tensors: Sequence[list[torch.Tensor]],
    sections: Sequence[Section],
    rank: int,
    group: dist.ProcessGroup,
    dtype: torch.dtype | None = None,
) -> Pending:
    """Start sending every rank its tokens of our heads; the adjoint of :func:`scatter_heads`.

    Args:
        tensors: of each section, ``[U*L, B, heads of rank, D]``. The lists are emptied: what only they hold
            is freed before memory is taken for what comes.
        sections: how they make up a message.
        rank: ours in the group.
        group: the ranks.
        dtype: to send them in; their own by default.

    Returns:
        A transfer of every tensor of every section, ``[B, L, heads, D]``. Contributions to a head that
        several ranks hold are summed.
    """
    with named("copies"):
        send = _as_one(tensors, dtype or tensors[0][0].dtype)
    total, batch, _, dim = send.shape
    tokens = total // len(sections[0].ranges)
    sizes = _sizes(sections, tokens * batch * dim)
    received = send.new_empty(sum(sizes))
    work = _start(received, send, sizes, [sizes[rank]] * len(sizes), group)
    shape = (tokens, batch, dim)
    return Pending(received, send, work, lambda whole: _to_tokens(whole, sections, sizes, shape))


def _to_tokens(
    received: torch.Tensor,
    sections: Sequence[Section],
    sizes: Sequence[int],
    shape: tuple[int, int, int],
) -> tuple[torch.Tensor, ...]:
    """The tensors of all sections from the messages of all ranks; ``shape`` is tokens, batch, dim."""
    tokens, batch, dim = shape
    gathered = [
        [received.new_empty(batch, tokens, section.num_heads, dim) for _ in range(section.tensors)]
        for section in sections
    ]
    filled = [0] * len(sections)  # heads below hold a value: ranges are sorted, overlaps add up
    for span, message in _messages(received, sections, sizes, shape):
        parts = _parts(message, sections, span)
        for at, (section, part) in enumerate(zip(sections, parts, strict=True)):
            shared = max(0, filled[at] - section.ranges[span[0]][0])
            for index, x_BLHD in enumerate(gathered[at]):
                own, came = _by_rank(x_BLHD, section, span), part[..., index :: section.tensors, :]
                own[..., shared:, :] = came[..., shared:, :]
                if shared:
                    own[..., :shared, :] += came[..., :shared, :]
            filled[at] = section.ranges[span[1] - 1][1]
    return tuple(x for xs in gathered for x in xs)


def _sizes(sections: Sequence[Section], per_head: int) -> list[int]:
    """Entries of the message that has the heads of each rank."""
    ranks = range(len(sections[0].ranges))
    return [per_head * sum(section.width(rank) for section in sections) for rank in ranks]


def _as_one(tensors: Sequence[list[torch.Tensor]], dtype: torch.dtype) -> torch.Tensor:
    """A message [U*L, B, heads, D] of all sections, in contiguous memory; empties the lists."""
    if [len(xs) for xs in tensors] == [1]:
        return tensors[0].pop().to(dtype).contiguous()
    widths = [sum(x.shape[2] for x in xs) for xs in tensors]
    total, batch, _, dim = tensors[0][0].shape
    message = tensors[0][0].new_empty(total, batch, sum(widths), dim, dtype=dtype)
    for part, xs in zip(message.split(widths, dim=2), tensors, strict=True):
        for index, x in enumerate(xs):
            part[:, :, index :: len(xs)] = x
    for xs in tensors:
        xs.clear()
    return message


def _messages(
    buffer: torch.Tensor,
    sections: Sequence[Section],
    sizes: Sequence[int],
    shape: tuple[int, int, int],
) -> Iterator[tuple[tuple[int, int], torch.Tensor]]:
    """Spans of ranks, with their messages ``[ranks, tokens, batch, heads, D]``.

    All ranks at once where all have as many heads of their own; else one by one.
    """
    tokens, batch, dim = shape
    widths = [sum(section.width(rank) for section in sections) for rank in range(len(sizes))]
    if all(section.is_even for section in sections):
        yield (0, len(sizes)), buffer.view(len(sizes), tokens, batch, widths[0], dim)
        return
    for rank, message in enumerate(buffer.split(list(sizes))):
        yield (rank, rank + 1), message.view(1, tokens, batch, widths[rank], dim)


def _parts(
    message: torch.Tensor, sections: Sequence[Section], span: tuple[int, int]
) -> tuple[torch.Tensor, ...]:
    """The sections of the messages of a span of ranks."""
    return message.split([section.width(span[0]) for section in sections], dim=3)


def _by_rank(x_BLHD: torch.Tensor, section: Section, span: tuple[int, int]) -> torch.Tensor:
    """A view of the heads of a span of ranks: ``[ranks, L, B, heads of a rank, D]``."""
    first, last = section.ranges[span[0]][0], section.ranges[span[1] - 1][1]
    heads = x_BLHD[:, :, first:last].unflatten(2, (span[1] - span[0], -1))
    return heads.permute(2, 1, 0, 3, 4)


def _start(
    received: torch.Tensor,
    send: torch.Tensor,
    received_sizes: list[int],
    sent_sizes: list[int],
    group: dist.ProcessGroup,
) -> dist.Work | None:
    with named("all-to-all post"):
        return dist.all_to_all_single(
            received.view(-1), send.view(-1), received_sizes, sent_sizes, group=group, async_op=True
        )
