"""A stand-in for a GPU, to whose events the watch listens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lightning_cp.consistency import step_vote
from lightning_cp.watchdog import watch
from lightning_cp.watchdog.device import DeviceQueue


class Device:
    """A device that does at once what it is given, until it is stopped."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.recorded = self.done = 0

    def install(self, at_end_of_step: Callable[[], None]) -> None:
        """Have the watch of this process follow the device.

        Args:
            at_end_of_step: called on the main thread where the host would wait for its GPU.
        """
        own = step_vote._test_step

        def test_step(*given: Any) -> Any:
            at_end_of_step()
            return own(*given)

        watch.device_queue = self._queue  # type: ignore[assignment]
        step_vote._test_step = test_step

    def stop(self, left: int = 0) -> None:
        """Do nothing from now on; the last ``left`` events are not complete either."""
        self.done = self.recorded - left
        self.stopped.set()

    def wait(self) -> None:
        """Wait, as a host does for its GPU."""
        while self.stopped.is_set():
            time.sleep(0.1)

    def _queue(self, _: torch.device) -> DeviceQueue[Any]:
        return DeviceQueue(f"cuda:{dist.get_rank()}", lambda: DeviceEvent(self))


class DeviceEvent:
    """A point in the device's work."""

    def __init__(self, device: Device) -> None:
        self._device, self._number = device, 0

    def record(self) -> None:
        """Put it behind the work that was given so far."""
        self._device.recorded += 1
        self._number = self._device.recorded

    def query(self) -> bool:
        """True once that work is done."""
        if not self._device.stopped.is_set():
            self._device.done = self._device.recorded
        return self._number <= self._device.done
