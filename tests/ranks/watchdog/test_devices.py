"""The watch of ranks with GPUs, by stand-ins: from its start to its stop."""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any
from unittest.mock import patch

import torch

from lightning_cp.comm import waits
from lightning_cp.config import StrategyConfig
from lightning_cp.watchdog import watch
from lightning_cp.watchdog.device import DeviceQueue
from lightning_cp.watchdog.phase import DevicePosition, Phase, PhasePosition, Position
from lightning_cp.watchdog.watch import SWITCH, RunWatch
from tests.helpers.pool import run_ranks


class Done:
    """An event of a device that does at once what it is given."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True


def watched(rank: int, world_size: int, folder: str) -> list[Any]:
    """What this rank reads of the other's device, and its limit of a step."""
    queue: DeviceQueue[Any] = DeviceQueue(f"cuda:{rank}", Done)
    devices: list[torch.device] = []

    def made_for(device: torch.device) -> DeviceQueue[Any]:
        devices.append(device)
        return queue

    run, place = RunWatch(Position()), PhasePosition(8 + rank, 1, Phase.FORWARD)
    with (
        patch.dict(os.environ, {SWITCH: "1"}),
        patch.object(tempfile, "tempdir", folder),
        patch.object(watch, "device_queue", made_for),
    ):
        given: dict[str, Any] = {"device": torch.device("cuda", rank), "handles_sigterm": True}
        run.begin(StrategyConfig(), "127.0.0.1", None, **given)
        try:
            assert (devices, len(waits.marks)) == ([torch.device("cuda", rank)], 1)
            run.position.begin_micro_batch(after=7 + rank)
            assert run._watcher is not None
            other, until = run._watcher._slots[1 - rank], time.monotonic() + 20
            while other.read_device().place.step != 9 - rank and time.monotonic() < until:
                time.sleep(0.05)
            found = other.read_device()
            limit = run._limit(place, False)
            torch.distributed.barrier()
        finally:
            run.stop()
    assert (run.position.device, waits.marks) == (None, ())
    return [found, limit]


def test_each_rank_can_read_the_other_s_device(tmp_path: Any) -> None:
    found = run_ranks(2, watched, str(tmp_path))
    for rank, (device, limit) in enumerate(found):
        assert device == DevicePosition(PhasePosition(9 - rank, 1, Phase.FORWARD), 1)
        assert limit == 360.0
