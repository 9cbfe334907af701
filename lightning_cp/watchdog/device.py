"""Progress of a rank's device, which still works when the host has enqueued everything and waits.

The host records an event behind each attention call and each group of gradients. The watcher's thread asks
which events are complete. Neither waits for the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import torch

MAX_EVENTS = 4096
"""Largest number of events in flight. CUDA holds about a thousand launches; then the host waits."""

Mark = TypeVar("Mark")


class DeviceEvent(Protocol):
    """A point in the device's work; ``torch.cuda.Event`` is one."""

    def record(self) -> Any:
        """Put the event behind the work that was enqueued so far."""
        ...

    def query(self) -> bool:
        """Return True once the device has done that work."""
        ...


class DeviceQueue(Generic[Mark]):
    """Events of one device that are not complete yet. Any thread may record; one thread asks.

    Args:
        name: the device, as in ``cuda:1``.
        make_event: makes an event.
        may_record: returns False while events must not be recorded.
    """

    def __init__(
        self,
        name: str,
        make_event: Callable[[], DeviceEvent],
        may_record: Callable[[], bool] = lambda: True,
    ) -> None:
        self.name = name
        self.completed = 0
        """Number of events that are complete."""
        self.reached: Mark | None = None
        """Mark of the last one of them."""
        self._make_event, self._may_record = make_event, may_record
        self._pending: deque[tuple[DeviceEvent, Mark]] = deque()
        # Used again: the asking thread must not destroy an event, which CUDA does on that thread's device.
        self._unused: list[DeviceEvent] = []
        self._failed = False

    @property
    def is_busy(self) -> bool:
        """True if an event is not complete, as far as ``poll`` knows."""
        return bool(self._pending)

    def record(self, mark: Mark) -> None:
        """Record an event behind the work that was enqueued so far, and remember its mark."""
        if len(self._pending) >= MAX_EVENTS or self._failed or not self._may_record():
            return
        try:
            event = self._unused.pop()
        except IndexError:
            event = self._make_event()
        event.record()
        self._pending.append((event, mark))

    def poll(self) -> None:
        """Count the events that have become complete."""
        try:
            while self._pending and self._pending[0][0].query():
                event, self.reached = self._pending.popleft()
                self.completed += 1
                self._unused.append(event)
        except RuntimeError:  # of an earlier kernel: the main thread's next call raises it
            self._failed = True
            self._pending.clear()


def device_queue(device: torch.device) -> DeviceQueue[Any] | None:
    """Return a queue for a device that works apart from its host; ``None`` for the CPU."""
    if device.type != "cuda":
        return None
    return DeviceQueue(str(device), torch.cuda.Event, _is_not_captured)


def _is_not_captured() -> bool:
    """Return True unless a CUDA graph is captured, of which an event would become a part."""
    return not torch.cuda.is_current_stream_capturing()
