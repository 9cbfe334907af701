"""A step measured on every rank, and every rank's samples on all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from lightning_cp.bench.case import Case
from lightning_cp.bench.clock import Samples, measure
from lightning_cp.bench.settings import Settings
from lightning_cp.bench.ways import Step, Way

T = TypeVar("T")
PATIENCE = 60.0
"""Seconds that a rank on which something fails gives the others to come back from it."""


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


def obstacle_of_any(way: Way, case: Case) -> str | None:
    """The first rank's that has one: if one cannot compute the case, nobody may begin."""
    return next((told for told in from_all(way.obstacle(case)) if told is not None), None)


def failure_of_any(attempt: Callable[[], object]) -> str | None:
    """Try something on all ranks together; how it fails on the first rank where it does, or ``None``.

    Raises:
        Exception: what this rank's attempt has raised, if others have not come back from theirs: they wait
            for messages of this rank, and to wait for them would be to wait forever.
    """
    name = name_of_attempt()
    failure: str | None = None
    try:
        attempt()
        arrived(name, patience=0.0)
    except Exception as error:
        if not arrived(name, PATIENCE):
            raise
        failure = f"fails: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return next((each for each in from_all(failure) if each is not None), None)


def name_of_attempt() -> str:
    """Of this rank's next one; the same on all ranks, which make the same attempts."""
    return f"lightning_cp.bench attempt {_store().add(f'lightning_cp.bench rank {dist.get_rank()}', 1)}"


def arrived(name: str, patience: float) -> bool:
    """Say that this rank is there, without a message that others would have to wait for.

    Args:
        name: of the place, where a rank comes once.
        patience: seconds to wait for the others.

    Returns:
        Whether all ranks are there.
    """
    store = _store()
    there, deadline = store.add(name, 1), time.monotonic() + patience
    while there < dist.get_world_size() and time.monotonic() < deadline:
        time.sleep(0.01)
        there = store.add(name, 0)
    return there == dist.get_world_size()


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()
