"""One rank's batch for all ranks of a group: any object, its tensors as plain bytes.

The rest is pickled, which is as safe as the process group itself: all of it comes from ranks of this run.
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
class Parcel:
    """A packed object."""

    rest: bytes
    """Pickled, with a place for every tensor."""
    tensors: list[torch.Tensor]


def pack(value: Any) -> Parcel:
    """Take an object apart; nothing is sent yet.

    Raises:
        Exception: whatever pickle raises for what cannot be sent.
    """
    buffer = io.BytesIO()
    packer = _Packer(buffer)
    packer.dump(value)
    return Parcel(buffer.getvalue(), packer.tensors)


def broadcast_parcel(parcel: Parcel | None, group: dist.ProcessGroup) -> Any:
    """The objects that the first rank of the group packed, made again on this rank, with tensors on the CPU.

    Args:
        parcel: given on the first rank, ``None`` on the others.
        group: a group whose backend moves CPU tensors.
    """
    sizes = torch.zeros(2, dtype=torch.int64)
    data = torch.empty(0, dtype=torch.uint8)
    if parcel is not None:
        parts = [_bytes_of(x) for x in parcel.tensors]
        data = torch.cat([torch.frombuffer(bytearray(parcel.rest), dtype=torch.uint8), *parts])
        sizes = torch.tensor([len(parcel.rest), data.numel()])
    dist.broadcast(sizes, group=group, group_src=0)
    rest, total = sizes.tolist()
    if parcel is None:
        data = torch.empty(total, dtype=torch.uint8)
    dist.broadcast(data, group=group, group_src=0)
    return _Unpacker(data, rest).load()


class _Packer(pickle.Pickler):
    """Leaves the tensors out: pickled, a view would take all of its storage along."""

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
    """Puts them back: places are met in the order in which the tensors lie in the data."""

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
    """uint8 [bytes]: the values of a tensor on the CPU; its own memory if it lies there in one piece."""
    return x.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1).view(torch.uint8)
