"""Ulysses' all-to-all, which trades sequence for heads, and its adjoint.

``U`` ranks of a group, each with ``L`` tokens of all heads, end up with ``U*L`` tokens of some
heads. Messages are token-first ([tokens, batch, heads, head dim]), so that what arrives from the
ranks in order *is* the longer sequence: no permutation on the receiving side.

A message has sections along its entries, such as queries, then keys and values. The tensors of a section
have the same heads, of any widths, and lie in it head by head (K of head 0, V of head 0, K of head 1, ...),
so that a range of heads is one slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from lightning_cp.comm.waits import wait_for
from lightning_cp.utils.tracing import profile_range

HeadRanges = Sequence[tuple[int, int]]
"""(first, past-last) head of each rank of the group; ranges may overlap (shared K/V heads)."""


class _Section(NamedTuple):
    """Part of a message: tensors with the same heads, and the heads of each rank of the group."""

    ranges: HeadRanges
    dims: tuple[int, ...]
    """Entries per head of each tensor."""

    @classmethod
    def of(cls, ranges: HeadRanges, tensors: Sequence[torch.Tensor]) -> _Section:
        """Make the section of tensors [..., heads, D]."""
        return cls(ranges, tuple(x.shape[-1] for x in tensors))

    def shape(self, rank: int) -> tuple[int, int]:
        """Heads of a rank, and entries per head in all tensors."""
        first, last = self.ranges[rank]
        return last - first, sum(self.dims)

    def entries(self, rank: int) -> int:
        """Entries per token of a rank."""
        heads, dim = self.shape(rank)
        return heads * dim

    @property
    def num_heads(self) -> int:
        """Heads of one tensor over all ranks."""
        return self.ranges[-1][1]

    @property
    def is_even(self) -> bool:
        """True if all ranks have equally many heads, and no two ranks share one."""
        each = self.ranges[0][1]
        return all(heads == (at * each, (at + 1) * each) for at, heads in enumerate(self.ranges))


class AllToAll:
    """An all-to-all in flight; holds the send buffer until ``wait``."""

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
        """Block until the all-to-all is done and return the received tensors, in order. Call once."""
        assert self._received is not None
        if self._work is not None:
            with profile_range("all-to-all wait"):
                wait_for(self._work)
        received, self._received, self._sent, self._work = self._received, None, None, None
        with profile_range("copies"):
            return self._finish(received)


def scatter_heads(
    tensors: Sequence[Sequence[torch.Tensor]],
    ranges: Sequence[HeadRanges],
    rank: int,
    group: dist.ProcessGroup,
) -> AllToAll:
    """Start sending each rank its heads of this rank's tokens.

    Args:
        tensors: of each section, [B, L, heads, D], D of any width; all of one dtype.
        ranges: of each section, the heads of each rank.
        rank: this rank in the group.
        group: the ranks.

    Returns:
        A transfer of one tensor ``[U*L, B, heads of rank, D]`` per section: the tokens of all ranks in order,
        D being the widths of all tensors of the section.
    """
    first = tensors[0][0]
    batch, tokens = first.shape[:2]
    sections = [_Section.of(each, xs) for each, xs in zip(ranges, tensors, strict=True)]
    sizes = _message_sizes(sections, tokens * batch)
    send = first.new_empty(sum(sizes))
    with profile_range("copies"):
        for span, message in _messages(send, sections, sizes, (tokens, batch)):
            parts = _tensor_views(message, sections, span[0])
            for section, places, xs in zip(sections, parts, tensors, strict=True):
                for place, x_BLHD in zip(places, xs, strict=True):
                    place.copy_(_heads_by_rank(x_BLHD, section, span))
    received = first.new_empty(len(sizes) * tokens, batch, _num_entries(sections, rank))
    work = _post(received, send, [sizes[rank]] * len(sizes), sizes, group)
    return AllToAll(received, send, work, lambda whole: _section_views(whole, sections, rank))


def gather_heads(
    tensors: Sequence[list[torch.Tensor]],
    ranges: Sequence[HeadRanges],
    rank: int,
    group: dist.ProcessGroup,
    dtype: torch.dtype | None = None,
) -> AllToAll:
    """Start sending each rank its tokens of this rank's heads; the adjoint of :func:`scatter_heads`.

    Args:
        tensors: of each section, ``[U*L, B, heads of rank, D]``. The lists are emptied, which frees
            their tensors before the receive buffer is allocated.
        ranges: of each section, the heads of each rank.
        rank: this rank in the group.
        group: the ranks.
        dtype: of the message; by default that of the tensors.

    Returns:
        A transfer of every tensor of every section, ``[B, L, heads, D]``. Contributions to a head that
        several ranks hold are summed.
    """
    sections = [_Section.of(each, xs) for each, xs in zip(ranges, tensors, strict=True)]
    with profile_range("copies"):
        send = _pack(tensors, sections, rank, dtype or tensors[0][0].dtype)
    total, batch, _ = send.shape
    shape = (total // len(ranges[0]), batch)
    sizes = _message_sizes(sections, shape[0] * batch)
    received = send.new_empty(sum(sizes))
    work = _post(received, send, sizes, [sizes[rank]] * len(sizes), group)
    return AllToAll(
        received, send, work, lambda whole: _unpack_tokens(whole, sections, sizes, shape)
    )


def _unpack_tokens(
    received: torch.Tensor,
    sections: Sequence[_Section],
    sizes: Sequence[int],
    shape: tuple[int, int],
) -> tuple[torch.Tensor, ...]:
    """Unpack the tensors of all sections from the messages of all ranks; ``shape`` is (tokens, batch)."""
    tokens, batch = shape
    gathered = [
        [received.new_empty(batch, tokens, section.num_heads, dim) for dim in section.dims]
        for section in sections
    ]
    filled = [0] * len(sections)  # heads below hold a value: ranges are sorted, overlaps add up
    for span, message in _messages(received, sections, sizes, shape):
        parts = _tensor_views(message, sections, span[0])
        for at, (section, part) in enumerate(zip(sections, parts, strict=True)):
            shared = max(0, filled[at] - section.ranges[span[0]][0])
            for came, x_BLHD in zip(part, gathered[at], strict=True):
                own = _heads_by_rank(x_BLHD, section, span)
                own[..., shared:, :] = came[..., shared:, :]
                if shared:
                    own[..., :shared, :] += came[..., :shared, :]
            filled[at] = section.ranges[span[1] - 1][1]
    return tuple(x for xs in gathered for x in xs)


def _message_sizes(sections: Sequence[_Section], rows: int) -> list[int]:
    """Entries of the message with the heads of each rank; ``rows`` counts the tokens of all batch rows."""
    return [rows * _num_entries(sections, rank) for rank in range(len(sections[0].ranges))]


def _num_entries(sections: Sequence[_Section], rank: int) -> int:
    """Entries per token of a rank in all sections."""
    return sum(section.entries(rank) for section in sections)


def _pack(
    tensors: Sequence[list[torch.Tensor]],
    sections: Sequence[_Section],
    rank: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Pack all sections into one contiguous message [U*L, B, entries]; empties the lists."""
    if [len(xs) for xs in tensors] == [1]:
        return tensors[0].pop().to(dtype).contiguous().flatten(2)
    total, batch = tensors[0][0].shape[:2]
    message = tensors[0][0].new_empty(total, batch, _num_entries(sections, rank), dtype=dtype)
    for places, xs in zip(_tensor_views(message, sections, rank), tensors, strict=True):
        for place, x in zip(places, xs, strict=True):
            place.copy_(x)
    for xs in tensors:
        xs.clear()
    return message


def _messages(
    buffer: torch.Tensor,
    sections: Sequence[_Section],
    sizes: Sequence[int],
    shape: tuple[int, int],
) -> Iterator[tuple[tuple[int, int], torch.Tensor]]:
    """Yield spans of ranks with their messages ``[ranks, tokens, batch, entries]``.

    One span of all ranks where they have equally many heads and share none, else one span per rank.
    """
    if all(section.is_even for section in sections):
        yield (0, len(sizes)), buffer.view(len(sizes), *shape, _num_entries(sections, 0))
        return
    for rank, message in enumerate(buffer.split(list(sizes))):
        yield (rank, rank + 1), message.view(1, *shape, _num_entries(sections, rank))


def _section_views(
    message: torch.Tensor, sections: Sequence[_Section], rank: int
) -> tuple[torch.Tensor, ...]:
    """Views [..., heads, D] of the sections of a rank's message, D being the widths of all tensors."""
    parts = message.split([section.entries(rank) for section in sections], dim=-1)
    return tuple(
        part.unflatten(-1, section.shape(rank))
        for section, part in zip(sections, parts, strict=True)
    )


def _tensor_views(
    message: torch.Tensor, sections: Sequence[_Section], rank: int
) -> tuple[tuple[torch.Tensor, ...], ...]:
    """Views [..., heads, D] of the tensors of each section of a rank's message."""
    wholes = _section_views(message, sections, rank)
    return tuple(
        whole.split(section.dims, dim=-1) for section, whole in zip(sections, wholes, strict=True)
    )


def _heads_by_rank(x_BLHD: torch.Tensor, section: _Section, span: tuple[int, int]) -> torch.Tensor:
    """A view of the heads of a span of ranks: ``[ranks, L, B, heads of a rank, D]``."""
    first, last = section.ranges[span[0]][0], section.ranges[span[1] - 1][1]
    heads = x_BLHD[:, :, first:last].unflatten(2, (span[1] - span[0], -1))
    return heads.permute(2, 1, 0, 3, 4)


def _post(
    received: torch.Tensor,
    send: torch.Tensor,
    received_sizes: list[int],
    sent_sizes: list[int],
    group: dist.ProcessGroup,
) -> dist.Work | None:
    with profile_range("all-to-all post"):
        return dist.all_to_all_single(
            received.view(-1), send.view(-1), received_sizes, sent_sizes, group=group, async_op=True
        )
