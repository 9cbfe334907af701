"""A step measured on every rank, and every rank's samples on all of them."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist

from lightning_cp.bench.clock import Samples, measure
from lightning_cp.bench.settings import Settings
from lightning_cp.bench.ways import Step

T = TypeVar("T")


def together(step: Step, settings: Settings) -> list[Samples]:
    """Run a step on all ranks, as often as the settings say; what each of them needed, in rank order."""
    return from_all(
        measure(
            step,
            repeats=settings.repeats,
            warm_up=settings.warm_up,
            device_type=settings.device_type,
        )
    )


def from_all(value: T) -> list[T]:
    """Every rank's value, in rank order."""
    every: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every
