"""Streams of a pretended device: a copy beside the computing stream happens as late as a GPU may do it.

What a copy writes is NaN, or the largest byte, until the computing stream waits for its event. A copy that
could begin before its memory is ready, or whose memory on the device is freed before it has ended, raises
``EarlyError``. Each stream has a clock, so a step's time shows what is hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves

from tests.helpers.pretended.device import PretendedDevice, PretendedTensor, Wait, memory_of


class EarlyError(RuntimeError):
    """A copy, or the end of its memory, could come too early."""


class WeakMemory:
    """Memory of a tensor, which this does not keep alive."""

    def __init__(self, x: torch.Tensor) -> None:
        self._storage = x.untyped_storage()._weak_ref()  # type: ignore[attr-defined]
        self._like = x.dtype, x.storage_offset(), x.size(), x.stride()
        self.nbytes = x.nbytes

    @property
    def is_alive(self) -> bool:
        """True if something refers to it."""
        return not torch.UntypedStorage._expired(self._storage)  # type: ignore[attr-defined]

    def tensor(self) -> torch.Tensor:
        """The memory as a plain tensor.

        Raises:
            EarlyError: it is gone.
        """
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage)  # type: ignore[attr-defined]
        if storage is None:
            raise EarlyError("memory of the device was freed before its copy had ended")
        dtype, *place = self._like
        return torch.empty(0, dtype=dtype).set_(storage, *place)

    def __del__(self) -> None:
        torch.UntypedStorage._free_weak_ref(self._storage)  # type: ignore[attr-defined]


@dataclass
class Copy:
    """A copy that was begun; the host's memory stays, as PyTorch's allocator of pinned memory sees to."""

    host: torch.Tensor
    device: WeakMemory
    to_device: bool

    def run(self) -> None:
        """Move the values."""
        there = self.device.tensor()
        if self.to_device:
            there.copy_(self.host)
        else:
            self.host.copy_(there)


class Event:
    """A place in a stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.stream: Stream | None = None
        self.place, self.time = 0, 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Record what the stream has been given so far."""
        self.stream = stream or StreamedDevice.streams().current
        self.place, self.time = self.stream.given, self.stream.clock

    def synchronize(self) -> None:
        """Let the host wait."""
        if self.stream is not None:
            self.stream.run(self.place)

    def query(self) -> bool:
        """Do all that was asked for, as a device does while the host polls."""
        self.synchronize()
        return True


class Stream:
    """A queue of copies, or the computing stream, which does everything at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.given = self.done = 0
        self.clock = 0.0
        self.waited = -1
        """The last operator of the computing stream that this one comes after."""
        self._copies: list[Copy] = []

    def post(self, copy: Copy, seconds: float) -> None:
        """Give it a copy."""
        self._copies.append(copy)
        self.given += 1
        self.clock += seconds

    def run(self, place: int) -> None:
        """Do what was given up to a place."""
        while self.done < place:
            self.done += 1
            self._copies.pop(0).run()

    def wait_stream(self, other: Stream) -> None:
        """Come after what another stream has been given."""
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        """Come after an event."""
        assert event.stream is not None
        event.stream.run(event.place)
        self.clock = max(self.clock, event.time)
        streams = StreamedDevice.streams()
        if event.stream is streams.computing:
            self.waited = event.place

    def record_event(self) -> Event:
        """The place up to here."""
        event = Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Let the host wait."""
        self.run(self.given)


class Streams:
    """The streams of a device.

    Args:
        bytes_per_second: of copies between host and device.
        waits: the device's, of the host.
    """

    def __init__(self, bytes_per_second: float, waits: list[Wait]) -> None:
        self.waits = waits
        self.computing = self.current = Stream()
        self.bytes_per_second = bytes_per_second
        self.fetched: list[WeakMemory] = []
        """What was copied to the device on a stream of its own."""
        self._used: dict[int, int] = {}
        """The last operator of the computing stream that used a memory, by address."""

    def compute(self, seconds: float) -> None:
        """Keep the computing stream busy."""
        self.computing.clock += seconds

    @property
    def num_fetched(self) -> int:
        """Copies on the device that are still there."""
        return sum(one.is_alive for one in self.fetched)

    def note(self, tensors: Any) -> None:
        """Note an operator of the computing stream."""
        self.computing.given = self.computing.done = self.computing.given + 1
        for x in tree_leaves(tensors):
            if isinstance(x, PretendedTensor):
                self._used[x.untyped_storage().data_ptr()] = self.computing.given

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Begin a copy on the current stream.

        Raises:
            EarlyError: it does not come after what used its memory on the device.
        """
        to_device = isinstance(into, PretendedTensor)
        here, host = (into, source) if to_device else (source, into)
        used = self._used.get(here.untyped_storage().data_ptr(), 0)
        if self.current.waited < used:
            raise EarlyError("a copy may begin while its memory on the device is still in use")
        memory = WeakMemory(here)
        if to_device:
            self.fetched.append(memory)
        _spoil(memory_of(into) if to_device else into)
        self.current.post(Copy(host, memory, to_device), into.nbytes / self.bytes_per_second)


class StreamedDevice(PretendedDevice):
    """A pretended device whose copies run on streams."""

    _streams: Streams | None = None

    @classmethod
    def streams(cls) -> Streams:
        """The streams of the device in use."""
        assert cls._streams is not None
        return cls._streams

    @contextmanager
    def with_streams(self, bytes_per_second: float) -> Iterator[Streams]:
        """A block in which the device, with these streams, exists."""
        streams = Streams(bytes_per_second, self.waits)

        @contextmanager
        def on(stream: Stream) -> Iterator[None]:
            before, streams.current = streams.current, stream
            try:
                yield
            finally:
                streams.current = before

        functions: dict[str, Any] = {
            "Stream": Stream,
            "Event": Event,
            "stream": on,
            "current_stream": lambda *_: streams.current,
            "default_stream": lambda *_: streams.computing,
        }
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(StreamedDevice, "_streams", streams))
            stack.enter_context(self.use())
            for name, instead in functions.items():
                stack.enter_context(mock.patch.object(torch.cuda, name, instead))
            yield streams

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator, or give a copy to the stream that is current."""
        streams = self._streams
        if streams is None:
            return super().run(func, args, kwargs)
        crosses = func._schema.name == "aten::copy_" and (
            isinstance(args[0], PretendedTensor) != isinstance(args[1], PretendedTensor)
        )
        if crosses and streams.current is not streams.computing:
            self._note_waits(func._schema.name, args, kwargs)
            streams.copy(*args[:2])
            return args[0]
        result = super().run(func, args, kwargs)
        if crosses:
            streams.compute(args[0].nbytes / streams.bytes_per_second)
        if not func.is_view:
            streams.note((args, kwargs, result))
        return result


def _spoil(x: torch.Tensor) -> None:
    """Overwrite what a copy will write."""
    if x.is_floating_point():
        x.fill_(float("nan"))
    else:
        x.view(torch.uint8).fill_(255)
