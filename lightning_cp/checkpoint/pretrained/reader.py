"""Reading boxes of tensors with a bounded buffer, straight into their place where that is possible.

PyTorch's ``HuggingFaceStorageReader`` maps each file and copies slices of it. Mapped pages count as the
process's memory while they last, up to a whole file, and a slice is made whole before it is copied. Here
bytes are read (``preadv``) into the parameter's own memory if they lie side by side in both, and otherwise
pass through a buffer of a fixed size.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_cp.checkpoint.pretrained.header import Entry, open_regular
from lightning_cp.errors import CheckpointError
from lightning_cp.faults.signs import sign_of_life

STRAIGHT = 16 * 2**20
"""Bytes read at a time into their place: between two calls of ``done``."""
BUFFER = 2**20
"""Bytes that pass through a buffer at a time; it stays in a core's cache between being filled and read."""
SEEK = 32 * 2**10
"""Bytes that are rather skipped than read along; about what a system call costs."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and lengths."""


class SliceReader:
    """Open files of a checkpoint, one at a time, and one buffer.

    Args:
        done: called with the number of bytes that were just read.
    """

    def __init__(self, done: Callable[[int], None] = lambda count: None) -> None:
        self._done = done
        self._buffer: torch.Tensor | None = None
        self._file: Path | None = None
        self._fd = -1

    def __enter__(self) -> SliceReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file and give the buffer back."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._file, self._buffer = -1, None, None

    def read(self, entry: Entry, offsets: Sequence[int], into: torch.Tensor) -> None:
        """Fill ``into``, on any device, with the box of ``entry`` at ``offsets`` that has its shape.

        Raises:
            CheckpointError: the file ends before, or cannot be read.
        """
        if not into.numel():
            return
        self._open(entry.file)
        box = (tuple(offsets), tuple(into.shape))
        straight = into.device.type == "cpu" and into.dtype == entry.dtype
        for offset, lengths, place in pieces(box, entry.shape, entry.dtype.itemsize, straight):
            part = into[place]
            start = entry.start + _first(offset, entry.shape) * entry.dtype.itemsize
            span = _span(lengths, entry.shape) * entry.dtype.itemsize
            if straight and part.is_contiguous() and span == part.numel() * part.element_size():
                self._fill(entry, start, part)
                continue
            buffer = self._scratch(span)
            self._fill(entry, start, buffer)
            found = buffer.view(entry.dtype).as_strided(lengths, _strides(entry.shape))
            part.copy_(found)

    def _open(self, file: Path) -> None:
        if self._file == file:
            return
        if self._fd >= 0:
            os.close(self._fd)
            self._fd, self._file = -1, None
        with open_regular(file) as stream:
            self._fd = os.dup(stream.fileno())
        self._file = file

    def _scratch(self, size: int) -> torch.Tensor:
        if self._buffer is None or self._buffer.numel() < size:
            self._buffer = torch.empty(max(size, BUFFER), dtype=torch.uint8)
        return self._buffer[:size]

    def _fill(self, entry: Entry, start: int, into: torch.Tensor) -> None:
        """Fill contiguous memory with the file's bytes from ``start`` on."""
        held: Any = into.reshape(-1).view(torch.uint8).numpy()
        memory = memoryview(held)
        at = 0
        while at < len(memory):
            try:
                got = os.preadv(self._fd, [memory[at : at + STRAIGHT]], start + at)
            except OSError as error:
                raise CheckpointError(
                    f"{entry.file.name} cannot be read at {entry.name!r}: {error.strerror}."
                ) from None
            if not got:
                raise CheckpointError(
                    f"{entry.file.name} ends within {entry.name!r}, though it was whole before: something "
                    "changes it while it is read."
                )
            at += got
            self._done(got)
            sign_of_life()


def pieces(
    box: Box, shape: Sequence[int], itemsize: int, straight: bool
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[slice, ...]]]:
    """Cut a box into ones that are read at once: (offsets, lengths, where in the box).

    Args:
        box: of a tensor of ``shape``.
        shape: in the file, in C order.
        itemsize: bytes of an element.
        straight: what lies side by side needs no buffer, however long it is.
    """
    stack = [(box[0], box[1], tuple(0 for _ in box[1]))]
    while stack:
        offsets, lengths, at = stack.pop()
        span = _span(lengths, shape) * itemsize
        held = torch.Size(lengths).numel() * itemsize
        fits = span == held and straight
        if fits or (span <= BUFFER and (span == held or _cheap(lengths, shape, itemsize))):
            yield (
                offsets,
                lengths,
                tuple(
                    slice(start, start + length) for start, length in zip(at, lengths, strict=True)
                ),
            )
            continue
        stack += reversed(_halves(offsets, lengths, at, shape, itemsize))


def _cheap(lengths: Sequence[int], shape: Sequence[int], itemsize: int) -> bool:
    """Whether what lies between the rows of a box is better read along."""
    last = max(dim for dim in range(len(shape)) if lengths[dim] != shape[dim])
    row = torch.Size(shape[last:]).numel() * itemsize
    return row - torch.Size(lengths[last:]).numel() * itemsize <= SEEK


def _halves(
    offsets: tuple[int, ...],
    lengths: tuple[int, ...],
    at: tuple[int, ...],
    shape: Sequence[int],
    itemsize: int,
) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """The box cut along its first dimension of more than one, into steps of about a buffer."""
    dim = next(dim for dim, length in enumerate(lengths) if length > 1)
    row = torch.Size(shape[dim + 1 :]).numel() * itemsize
    far = not _tight(lengths, shape) and not _cheap(lengths, shape, itemsize)
    step = 1 if far else max(1, min(lengths[dim] - 1, BUFFER // max(1, row)))
    found = []
    for start in range(0, lengths[dim], step):
        size = min(step, lengths[dim] - start)
        found.append(
            tuple(
                (*values[:dim], new, *values[dim + 1 :])
                for values, new in (
                    (offsets, offsets[dim] + start),
                    (lengths, size),
                    (at, at[dim] + start),
                )
            )
        )
    return found


def _tight(lengths: Sequence[int], shape: Sequence[int]) -> bool:
    return _span(lengths, shape) == torch.Size(lengths).numel()


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(torch.Size(shape[dim + 1 :]).numel() for dim in range(len(shape)))


def _first(offsets: Sequence[int], shape: Sequence[int]) -> int:
    """The place of a box's first element in the tensor."""
    return sum(x * y for x, y in zip(offsets, _strides(shape), strict=True))


def _span(lengths: Sequence[int], shape: Sequence[int]) -> int:
    """Elements from a box's first to its last one."""
    return 1 + sum((x - 1) * y for x, y in zip(lengths, _strides(shape), strict=True))
