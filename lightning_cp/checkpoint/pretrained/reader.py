"""Reader of boxes of tensors with a bounded buffer, straight into their memory where possible.

PyTorch's ``HuggingFaceStorageReader`` maps each file and copies slices of it. Mapped pages count as the
process's memory, up to a whole file, and a slice is made whole before it is copied. Here bytes are read
(``preadv``) into the parameter's own memory, many rows of columns with one call, which discards the bytes
between them. Converted values, and those for other devices, pass through a buffer. ``CheckedStorageReader``
puts our checks and this reader behind PyTorch's interface, for code that calls ``dcp.load`` itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from lightning_cp.checkpoint.pretrained.files import (
    TensorEntry,
    file_state,
    open_regular,
    open_weight_files,
)
from lightning_cp.errors import CheckpointError
from lightning_cp.watchdog.phase import sign_of_life

# Positions of a box of a tensor in its file: rows of the same length at equal distances.


@dataclass(frozen=True)
class ElementRun:
    """Elements that are contiguous in the file within each row, and in the box (C order) altogether."""

    start: int
    """Index of the first one in the tensor."""
    count: int
    length: int
    """Length of each row."""
    step: int
    """Distance between starts of rows, in the tensor."""
    at: int
    """Index of the first one in the box."""

    @property
    def numel(self) -> int:
        return self.count * self.length

    def cut(self, most: int) -> Iterator[ElementRun]:
        """The same elements in order, in parts of at most ``most`` elements."""
        each = max(1, most // self.length)
        for row in range(0, self.count, each):
            count = min(each, self.count - row)
            start, at = self.start + row * self.step, self.at + row * self.length
            if count * self.length <= most:
                yield ElementRun(start, count, self.length, self.step, at)
                continue
            for begin in range(0, self.length, most):
                length = min(most, self.length - begin)
                yield ElementRun(start + begin, 1, length, length, at + begin)


def runs_of_box(
    offsets: Sequence[int], lengths: Sequence[int], shape: Sequence[int]
) -> Iterator[ElementRun]:
    """The runs of the box at ``offsets`` with these ``lengths``, in a tensor of ``shape`` in C order."""
    if not prod(lengths):
        return
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    last = max((dim for dim in range(len(shape)) if lengths[dim] != shape[dim]), default=0)
    first = last - 1  # a full dimension keeps the distance of rows
    while first > 0 and lengths[first] == shape[first]:
        first -= 1
    first = max(0, first)
    length, count = prod(lengths[last:]), prod(lengths[first:last])
    step = strides[last - 1] if last else length
    begin = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    for number, outer in enumerate(product(*(range(n) for n in lengths[:first]))):
        skipped = sum(i * stride for i, stride in zip(outer, strides, strict=False))
        yield ElementRun(begin + skipped, count, length, step, number * count * length)


DIRECT_BYTES = 16 * 2**20
"""Bytes read in place between two calls of ``done``."""
BUFFER_BYTES = 2**20
"""Bytes in the buffer at a time; few enough to stay in a core's cache between being filled and read."""
READ_THROUGH_BYTES = 24 * 2**10
"""Bytes between two rows that are read rather than skipped; a call costs about as much."""
MAX_VIEWS = 1024
"""Limit of memory views per call: ``IOV_MAX`` of Linux and macOS."""


class SliceReader:
    """Reads from the files of a checkpoint, with one open file at a time and one buffer.

    Args:
        done: called with the number of bytes of the box that were read.
        look: called with the values that were read, in their final memory, in one dimension.
    """

    def __init__(
        self,
        done: Callable[[int], None] = lambda count: None,
        look: Callable[[torch.Tensor], None] = lambda values: None,
    ) -> None:
        self._done, self._look = done, look
        self._buffer: torch.Tensor | None = None
        self._unused = bytearray(READ_THROUGH_BYTES)
        self._file: Path | None = None
        self._fd = -1

    def __enter__(self) -> SliceReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file and free the buffer."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._file, self._buffer = -1, None, None

    def read(self, entry: TensorEntry, offsets: Sequence[int], into: torch.Tensor) -> None:
        """Fill ``into``, on any device, with the box of ``entry`` at ``offsets`` that has its shape.

        Raises:
            CheckpointError: the file is too short, or cannot be read.
        """
        self._open(entry)
        size = entry.dtype.itemsize
        straight = into.device.type == "cpu" and into.dtype == entry.dtype
        for corner, part in _contiguous(into):
            place = [x + y for x, y in zip(offsets, corner, strict=True)]
            for rows in runs_of_box(place, part.shape, entry.shape):
                for some in rows.cut((DIRECT_BYTES if straight else BUFFER_BYTES) // size):
                    target = part.view(-1)[some.at : some.at + some.numel]
                    self._rows(entry, some, target, straight)
                    self._look(target)
                    self._done(some.numel * size)
                    sign_of_life()

    def _rows(
        self, entry: TensorEntry, rows: ElementRun, target: torch.Tensor, straight: bool
    ) -> None:
        if straight:
            self._fill(entry, rows, _memory(target))
            return
        if self._buffer is None:
            self._buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8)
        packed = self._buffer[: rows.numel * entry.dtype.itemsize]
        self._fill(entry, rows, _memory(packed))
        target.copy_(packed.view(entry.dtype))

    def _fill(self, entry: TensorEntry, rows: ElementRun, memory: memoryview) -> None:
        """Read rows from the file into ``memory``, contiguously."""
        item = entry.dtype.itemsize
        size, step, start = rows.length * item, rows.step * item, entry.start + rows.start * item
        unused = memoryview(self._unused)[: step - size]
        at_once = MAX_VIEWS // 2 if step - size <= READ_THROUGH_BYTES else 1
        for first in range(0, rows.count, at_once):
            last = min(first + at_once, rows.count)
            some = [memory[row * size : (row + 1) * size] for row in range(first, last)]
            begin = start + first * step
            views = [view for part in some for view in (part, unused)][:-1]
            if self._pread(entry, views, begin) == (len(some) - 1) * step + size:
                continue
            for number, part in enumerate(some):  # a short read may end anywhere
                self._fill_one(entry, begin + number * step, part)

    def _fill_one(self, entry: TensorEntry, start: int, into: memoryview) -> None:
        at = 0
        while at < len(into):
            got = self._pread(entry, [into[at:]], start + at)
            if not got:
                raise CheckpointError(
                    f"{entry.file.name} ends within {entry.name!r}, though it was whole before: something "
                    "changes it while it is read. Load it again when nothing writes there."
                )
            at += got

    def _pread(self, entry: TensorEntry, views: list[memoryview], start: int) -> int:
        try:
            return os.preadv(self._fd, views, start)
        except OSError as error:
            raise CheckpointError(
                f"{entry.file.name} cannot be read at {entry.name!r}: {error.strerror}. "
                "Look at its disk, or take another copy of the checkpoint."
            ) from None

    def _open(self, entry: TensorEntry) -> None:
        if self._file == entry.file:
            return
        if self._fd >= 0:
            os.close(self._fd)
            self._fd, self._file = -1, None
        with open_regular(entry.file) as stream:
            self._fd = os.dup(stream.fileno())
        if file_state(self._fd) != entry.state:
            raise CheckpointError(
                f"{entry.file.name} is not the file any more whose header was checked: something replaced "
                "or changed it since. Load it again when nothing writes there."
            )
        self._file = entry.file


def _contiguous(x: torch.Tensor) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Contiguous parts of a tensor, each with the index of its first element."""
    if x.is_contiguous():
        yield (0,) * x.dim(), x
        return
    dim = next(dim for dim, length in enumerate(x.shape) if length > 1)
    for i in range(x.shape[dim]):
        for corner, part in _contiguous(x.narrow(dim, i, 1)):
            yield (*corner[:dim], i, *corner[dim + 1 :]), part


def _memory(x: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor."""
    held: Any = x.reshape(-1).view(torch.uint8).numpy()
    return memoryview(held)


class CheckedStorageReader(HuggingFaceStorageReader):
    """PyTorch's reader of safetensors files, which also follows the index, refuses bad files and maps none.

    ``torch.distributed.checkpoint.load(state_dict, storage_reader=CheckedStorageReader(path))``

    Args:
        path: as for ``load_pretrained``.

    Raises:
        CheckpointError: see ``open_weight_files``.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._checkpoint = open_weight_files(path)
        super().__init__(str(self._checkpoint.path))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Names, shapes and dtypes of the checked headers."""
        entries = self._checkpoint.entries
        described = {
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=entry.dtype),
                size=torch.Size(entry.shape),
                chunks=[
                    ChunkStorageMetadata(
                        torch.Size([0] * len(entry.shape)), torch.Size(entry.shape)
                    )
                ],
            )
            for name, entry in entries.items()
        }
        stored = {
            MetadataIndex(name, torch.Size([0] * len(entry.shape))): entry
            for name, entry in entries.items()
        }
        return Metadata(
            state_dict_metadata=described,  # type: ignore[arg-type]
            storage_data=stored,
            storage_meta=StorageMeta(load_id=self.load_id),
        )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read every item straight into the tensor that the planner names."""
        entries = self._checkpoint.entries
        items = sorted(
            plan.items, key=lambda x: (_at(entries[x.storage_index.fqn]), tuple(x.storage_offsets))
        )
        with torch.no_grad(), SliceReader() as reader:
            for item in items:
                target = planner.resolve_tensor(item).detach()
                reader.read(entries[item.storage_index.fqn], tuple(item.storage_offsets), target)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _at(entry: Any) -> tuple[str, int]:
    return entry.file.name, entry.start
