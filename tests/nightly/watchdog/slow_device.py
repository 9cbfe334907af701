"""Two ranks with stand-ins for GPUs, whose hosts wait 14 s in the third step; the limit is 8 s.

python -m tests.nightly.watchdog.slow_device works       # one event a second becomes complete: FIT DONE
python -m tests.nightly.watchdog.slow_device stands      # rank 1's device stops within the backward
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import lightning as L
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_cp import UlyssesRingStrategy
from lightning_cp.consistency import finite
from lightning_cp.watchdog import watch
from lightning_cp.watchdog.device import DeviceQueue

LIMIT, WAITS = 8.0, 14.0


class Device:
    """It does at once what it is given, until it is slowed down."""

    def __init__(self, device: torch.device) -> None:
        self.slow = threading.Event()
        self.recorded = self.done = 0
        self.queue: DeviceQueue[Any] = DeviceQueue(f"cuda:{device.index or 0}", lambda: Event(self))


class Event:
    def __init__(self, device: Device) -> None:
        self._device, self._number = device, 0

    def record(self) -> None:
        self._device.recorded += 1
        self._number = self._device.recorded

    def query(self) -> bool:
        if not self._device.slow.is_set():
            self._device.done = self._device.recorded
        return self._number <= self._device.done


class Model(L.LightningModule):
    """A Llama of one layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32}
        heads: dict[str, Any] = {
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
        self.model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False))

    def training_step(self, batch: Any, index: int) -> Any:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def main(case: str) -> None:
    devices: list[Device] = []

    def queue(device: torch.device) -> DeviceQueue[Any]:
        devices.append(Device(device))
        return devices[-1].queue

    own, calls = finite._test_step, [0]

    def waits(*given: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            synchronise(devices[-1], trainer.global_rank)
        return own(*given)

    def synchronise(device: Device, rank: int) -> None:
        if case == "stands" and rank == 0:
            return  # it has done everything, and votes
        device.done, until = device.recorded - int(WAITS), time.monotonic() + WAITS
        device.slow.set()
        while time.monotonic() < until or case == "stands":
            time.sleep(1)
            device.done += case == "works"
        device.slow.clear()

    watch.device_queue = queue  # type: ignore[assignment]
    finite._test_step = waits
    ids = torch.randint(0, 64, (1, 64), generator=torch.Generator().manual_seed(0))
    loader: Any = torch.utils.data.DataLoader(
        [{"input_ids": ids, "labels": ids}] * 5,  # type: ignore[arg-type]
        batch_size=None,
    )
    strategy = UlyssesRingStrategy(
        mode="ring", step_timeout=LIMIT, first_step_timeout=60, parity_check="off"
    )
    silent: dict[str, Any] = {"logger": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=5,
        enable_checkpointing=False,
        enable_model_summary=False,
        **silent,
    )
    trainer.fit(Model(), loader)
    print(f"FIT DONE {trainer.global_step}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
