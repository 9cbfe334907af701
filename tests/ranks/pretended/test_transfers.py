"""Batches travel to the device once, in parts; whole where a transform on the device has to see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_cp import ContextParallelCallback
from tests.helpers.pool import run_ranks
from tests.helpers.pretended.device import PretendedDevice
from tests.helpers.pretended.runs import PretendedAccelerator
from tests.helpers.strategies.small import LENGTH, RING, Batch, Small, samples, trainer_of

pytestmark = pytest.mark.filterwarnings("ignore:GPU available but not used")
ROWS, STEPS = 2, 3
Seen = list[tuple[str, int]]


class Noting(Small):
    """Notes the device and the length of what its hooks and steps see."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Seen = []
        self.losses: list[torch.Tensor] = []

    def note(self, batch: Batch) -> Batch:
        """Note a batch, and change it: the loss shows whether a hook was called, and once."""
        ids = batch["input_ids"]
        self.seen.append((ids.device.type, ids.shape[1]))
        return {**batch, "input_ids": (ids + 1) % 48}

    def logits(self, batch: Batch) -> torch.Tensor:
        ids = batch["input_ids"]
        positions = batch.get("position_ids")
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
        return self.model(ids, positions)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        self.step = batch["input_ids"].device.type, batch["input_ids"].shape[1]
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].detach())


class After(Noting):
    """Transforms on the device."""

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        return self.note(batch)


class Before(Noting):
    """Transforms on the host, which need no device."""

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        return self.note(batch)


class Transfer(Noting):
    """Moves batches by itself."""

    def transfer_batch_to_device(
        self, batch: Batch, device: torch.device, dataloader_idx: int
    ) -> Batch:
        return self.note(super().transfer_batch_to_device(batch, device, dataloader_idx))


class Data(pl.LightningDataModule):
    """Transforms of the data."""

    def __init__(self, module: Noting) -> None:
        super().__init__()
        self.module = module

    def train_dataloader(self) -> Any:
        return rows()

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        return self.module.note(batch)


class Sharding(ContextParallelCallback):
    """Changes a batch before it shards it."""

    def shard_batch(self, batch: Any, *, needs_labels: bool) -> Any:
        assert self.module is not None
        return super().shard_batch(self.module.note(batch), needs_labels=needs_labels)

    module: Noting | None = None


def rows() -> DataLoader[Any]:
    return DataLoader(samples(STEPS * ROWS), batch_size=ROWS)  # type: ignore[arg-type]


def on_device() -> DataLoader[Any]:
    """Batches that are on the device when the loop gets them."""
    there = [{n: x.to("cuda") for n, x in batch.items()} for batch in rows()]
    return DataLoader(there, batch_size=None)  # type: ignore[arg-type]


def train(
    rank: int, world_size: int, kind: str, *, pretended: bool
) -> tuple[list[float], Seen, tuple[str, int], int]:
    """Losses, what was seen, what the step saw, and bytes to the device in the last step."""
    torch.set_default_dtype(torch.float64)
    modules: dict[str, Callable[[], Noting]] = {
        "after": After,
        "before": Before,
        "transfer": Transfer,
    }
    module = modules.get(kind, Noting)()
    callback = Sharding()
    callback.module = module
    how: dict[str, Any] = {"callbacks": [callback]} if kind == "callback" and pretended else {}
    settings = {**RING, "data_parallel": "zero1", "process_group_backend": "gloo"}
    if not pretended:
        trainer = trainer_of(1, None)
        if kind in ("callback", "data"):
            module.on_before_batch_transfer = lambda batch, _: module.note(batch)  # type: ignore[method-assign]
        trainer.fit(module, rows())
        return [float(x) for x in module.losses], module.seen, module.step, 0
    device = PretendedDevice(rank)
    with device.use():
        module.to(device.device)
        settings["parity_check"] = "off"
        trainer = trainer_of(world_size, settings, accelerator=PretendedAccelerator(), **how)
        device.phase = "fit"
        if kind == "data":
            trainer.fit(module, datamodule=Data(module))
        else:
            trainer.fit(module, on_device() if kind == "on device" else rows())
        losses = [float(x) for x in module.losses]
    return losses, module.seen, module.step, device.copied["fit", "to device"]


@pytest.mark.quick("plain-", "after-cuda", "data-cuda", "on device-")
@pytest.mark.parametrize(
    ("kind", "device"),
    [
        ("plain", ""),
        ("before", "cpu"),
        ("after", "cuda"),
        ("transfer", "cuda"),
        ("data", "cuda"),
        ("callback", "cuda"),
        ("on device", ""),
    ],
)
def test_transforms_see_whole_batches_where_they_saw_them(kind: str, device: str) -> None:
    ((want, *_),) = run_ranks(1, train, "plain" if kind == "on device" else kind, pretended=False)
    whole_bytes = STEPS * 2 * ROWS * LENGTH * 8
    part = -(-LENGTH // 4) * 2  # of zigzag on a ring of two
    for losses, seen, step, sent in run_ranks(2, train, kind, pretended=True):
        torch.testing.assert_close(losses, want, rtol=1e-9, atol=1e-11)
        assert seen == ([(device, LENGTH)] * STEPS if device else [])
        assert step == ("cuda", part)
        if device == "cuda" or kind == "on device":
            assert sent >= whole_bytes
        else:  # ids and labels of this rank, and positions, which are the same in both rows
            wanted = STEPS * (2 * ROWS + 1) * part * 8
            assert wanted <= sent < wanted + 100  # a few numbers beside them
