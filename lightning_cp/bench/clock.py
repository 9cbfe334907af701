"""How long a step takes: CPU-seconds and wall time of repeats that all ranks begin together.

On CPU the time of all threads of a process is counted, gloo's included, so copies and waiting that burns
cycles are in it, and other jobs on the machine are not. On CUDA wall time is between two events' moments,
each after all work on the device is done.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Samples:
    """Of one rank, one entry per repeat."""

    cpu: list[float]
    """CPU-seconds of the process."""
    wall: list[float]
    """Seconds."""


@dataclass(frozen=True)
class Figure:
    """What is reported of some repeats."""

    best: float
    """The least."""
    spread: float | None
    """(most - least) / least; ``None`` of one repeat, of which nothing is known."""
    middle: float = 0.0
    """The median."""

    @classmethod
    def of(cls, repeats: Sequence[float]) -> Figure:
        """Of one number per repeat."""
        best = min(repeats)
        if len(repeats) == 1:
            return cls(best, None, best)
        spread = (max(repeats) - best) / best if best else 0.0
        return cls(best, spread, statistics.median(repeats))

    @property
    def margin(self) -> float | None:
        """By how much the repeats differ, as the figure itself."""
        return None if self.spread is None else self.best * self.spread


def widest(spreads: Iterable[float | None]) -> float | None:
    """The largest; ``None`` if one is not known."""
    every = list(spreads)
    known = [spread for spread in every if spread is not None]
    return max(known) if len(known) == len(every) else None


_taken_off = 0.0


@contextmanager
def off_the_clock() -> Iterator[None]:
    """What this thread does within is not measured: what a stand-in does that the real function does not."""
    global _taken_off
    start = time.thread_time()
    try:
        yield
    finally:
        _taken_off += time.thread_time() - start


def measure(
    step: Callable[[], object], *, repeats: int = 3, warm_up: int = 1, device_type: str = "cpu"
) -> Samples:
    """Run a step some times; before each, the ranks of the world wait for each other.

    What is done :func:`off_the_clock` does not count.

    Args:
        step: on every rank the same.
        repeats: counted runs.
        warm_up: runs before them.
        device_type: ``cuda`` waits for the device before and after.
    """
    samples = Samples([], [])
    for index in range(warm_up + repeats):
        _wait(device_type)
        if dist.is_initialized():
            dist.barrier()
            _wait(device_type)
        off, cpu, wall = _taken_off, time.process_time(), time.perf_counter()
        step()
        _wait(device_type)
        if index >= warm_up:
            off = _taken_off - off
            samples.cpu.append(time.process_time() - cpu - off)
            samples.wall.append(time.perf_counter() - wall - off)
    return samples


def cpu_together(ranks: Sequence[Samples]) -> Figure:
    """CPU-seconds summed over ranks."""
    return Figure.of([sum(repeat) for repeat in zip(*(rank.cpu for rank in ranks), strict=True)])


def cpu_of_slowest(ranks: Sequence[Samples]) -> Figure:
    """CPU-seconds of the rank that needs most."""
    return Figure.of([max(repeat) for repeat in zip(*(rank.cpu for rank in ranks), strict=True)])


def busy(ranks: Sequence[Samples], device_type: str) -> Figure:
    """What computing takes a device: the slowest; on CPU, which others may use meanwhile, the mean rank's
    CPU-seconds."""
    if device_type != "cpu":
        return wall_of_slowest(ranks)
    return Figure.of([sum(each) / len(ranks) for each in zip(*(r.cpu for r in ranks), strict=True)])


def wall_of_slowest(ranks: Sequence[Samples]) -> Figure:
    """Seconds until the last rank is done."""
    return Figure.of([max(repeat) for repeat in zip(*(rank.wall for rank in ranks), strict=True)])


def _wait(device_type: str) -> None:
    if device_type == "cuda":
        torch.cuda.synchronize()
