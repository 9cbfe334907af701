"""Broadcast of any object, such as a batch, over a group: its tensors as plain bytes, the rest pickled.

Pickle is as safe here as the process group itself: all data comes from ranks of this run.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

_Place = tuple[int, torch.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class PackedObject:
    """A packed object."""

    rest: bytes
    """The object without its tensors, pickled; each tensor is replaced by its place."""
    tensors: list[torch.Tensor]


def pack(value: Any) -> PackedObject:
    """Split an object into tensors and the pickled rest; sends nothing.

    Raises:
        Exception: any that pickle raises, for an object that cannot be pickled.
    """
    buffer = io.BytesIO()
    packer = _Packer(buffer)
    packer.dump(value)
    return PackedObject(buffer.getvalue(), packer.tensors)


def broadcast_packed(packed: PackedObject | None, group: dist.ProcessGroup) -> Any:
    """Broadcast the packed object of the group's first rank and unpack it, with its tensors on the CPU.

    Args:
        packed: given on the first rank, ``None`` on the others.
        group: a group whose backend moves CPU tensors.
    """
    sizes = torch.zeros(2, dtype=torch.int64)
    data = torch.empty(0, dtype=torch.uint8)
    if packed is not None:
        parts = [_bytes_of(x) for x in packed.tensors]
        data = torch.cat([torch.frombuffer(bytearray(packed.rest), dtype=torch.uint8), *parts])
        sizes = torch.tensor([len(packed.rest), data.numel()])
    dist.broadcast(sizes, group=group, group_src=0)
    rest, total = sizes.tolist()
    if packed is None:
        data = torch.empty(total, dtype=torch.uint8)
    dist.broadcast(data, group=group, group_src=0)
    return _Unpacker(data, rest).load()


class _Packer(pickle.Pickler):
    """Pickler that leaves tensors out, since a pickled view includes all of its storage."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> _Place | None:
        if type(obj) is not torch.Tensor or obj.layout != torch.strided or obj.is_quantized:
            return None
        place = self._places.setdefault(id(obj), len(self.tensors))
        if place == len(self.tensors):
            self.tensors.append(obj)
        return place, obj.dtype, tuple(obj.shape)


class _Unpacker(pickle.Unpickler):
    """Unpickler that inserts the tensors; places occur in the order of the tensors in the data."""

    def __init__(self, data: torch.Tensor, rest: int) -> None:
        super().__init__(io.BytesIO(data[:rest].numpy().tobytes()))
        self._data, self._next = data, rest
        self._tensors: list[torch.Tensor] = []

    def persistent_load(self, pid: _Place) -> torch.Tensor:
        place, dtype, shape = pid
        if place == len(self._tensors):
            empty = torch.empty(shape, dtype=dtype)
            size = empty.numel() * empty.element_size()
            part = self._data[self._next : self._next + size]
            _bytes_of(empty).copy_(part)
            self._tensors.append(empty)
            self._next += size
        return self._tensors[place]


def _bytes_of(x: torch.Tensor) -> torch.Tensor:
    """Values of a tensor as uint8 [bytes] on the CPU; a view if the tensor is contiguous there."""
    return x.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1).view(torch.uint8)
