"""Timing of a step on all ranks: CPU-seconds and wall time of repeats that the ranks begin together.

On CPU the time of all threads of a process counts, gloo's included: copies and busy waiting are in it, other
jobs on the machine are not. On CUDA wall time is taken between two moments at which all work on the device
is done. Samples of all ranks are gathered on every rank, and combined into figures with their uncertainty.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lightning_cp.bench.methods import AttentionCase, AttentionMethod, Step
from lightning_cp.bench.settings import BenchSettings
from lightning_cp.comm.consensus import World


@dataclass(frozen=True)
class Samples:
    """The times of one rank, one entry per repeat."""

    cpu: list[float]
    """CPU-seconds of the process."""
    wall: list[float]
    """Seconds."""


@dataclass(frozen=True)
class Figure:
    """The reported summary of some repeats."""

    best: float
    """The minimum."""
    spread: float | None
    """(maximum - minimum) / minimum; ``None`` for one repeat."""
    middle: float = 0.0
    """The median."""

    @classmethod
    def of(cls, repeats: Sequence[float]) -> Figure:
        """Summarise one number per repeat."""
        best = min(repeats)
        if len(repeats) == 1:
            return cls(best, None, best)
        spread = (max(repeats) - best) / best if best else 0.0
        return cls(best, spread, statistics.median(repeats))

    @property
    def margin(self) -> float | None:
        """The difference of the repeats in the figure's own unit."""
        return None if self.spread is None else self.best * self.spread


def largest_spread(spreads: Iterable[float | None]) -> float | None:
    """Return the largest spread; ``None`` if one is unknown."""
    every = list(spreads)
    known = [spread for spread in every if spread is not None]
    return max(known) if len(known) == len(every) else None


_taken_off = 0.0


@contextmanager
def off_the_clock() -> Iterator[None]:
    """Exclude this thread's time in the block: work of a stand-in that the real function does not do."""
    global _taken_off
    start = time.thread_time()
    try:
        yield
    finally:
        _taken_off += time.thread_time() - start


def measure(
    step: Callable[[], object], *, repeats: int = 3, warm_up: int = 1, device_type: str = "cpu"
) -> Samples:
    """Time repeats of a step; before each repeat the ranks of the world wait for each other.

    Work inside :func:`off_the_clock` does not count.

    Args:
        step: the same on every rank.
        repeats: measured runs.
        warm_up: runs before them.
        device_type: ``cuda`` waits for the device before and after each run.
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


def cpu_of_all(ranks: Sequence[Samples]) -> Figure:
    """Return CPU-seconds summed over ranks."""
    return Figure.of([sum(repeat) for repeat in zip(*(rank.cpu for rank in ranks), strict=True)])


def device_seconds(ranks: Sequence[Samples], device_type: str) -> Figure:
    """Return the slowest device's seconds; on CPU, which other jobs share, the mean rank's CPU-seconds."""
    if device_type != "cpu":
        return wall_of_slowest(ranks)
    return Figure.of([sum(each) / len(ranks) for each in zip(*(r.cpu for r in ranks), strict=True)])


def wall_of_slowest(ranks: Sequence[Samples]) -> Figure:
    """Return the seconds until the last rank is done."""
    return Figure.of([max(repeat) for repeat in zip(*(rank.wall for rank in ranks), strict=True)])


def _wait(device_type: str) -> None:
    if device_type == "cuda":
        torch.cuda.synchronize()


@dataclass(frozen=True)
class RunSamples:
    """Samples of every rank for the four runs of a call; other libraries have only the whole call."""

    both: list[Samples]
    compute: list[Samples] | None = None
    comm: list[Samples] | None = None
    neither: list[Samples] | None = None


def overlap_figures(both: Figure, runs: RunSamples) -> dict[str, float | None]:
    """Return compute, communication, exposed time and overlap of the four runs.

    A figure is left out where it is smaller than the differences between repeats of a run.
    """
    if runs.compute is None or runs.comm is None or runs.neither is None:
        return {}
    compute = wall_of_slowest(runs.compute)
    comm = excess(wall_of_slowest(runs.comm), wall_of_slowest(runs.neither))
    figures: dict[str, float | None] = {"compute": compute.best, "comm": comm}
    every = (both, compute, *map(wall_of_slowest, (runs.comm, runs.neither)))
    margin = largest_spread(figure.margin for figure in every)
    exposed = both.best - compute.best
    if margin is None or exposed < -margin:  # then they contradict each other
        return figures
    less = min(compute.best, comm)
    if comm > margin:
        figures["exposed"] = exposed
    if less > margin:
        figures["overlap"] = (comm - exposed) / less
    return figures


def excess(figure: Figure, without: Figure) -> float:
    """Return the time that ``figure`` takes more, at least 0."""
    return max(figure.best - without.best, 0.0)


PATIENCE = 60.0
"""Seconds that a rank waits for the others after its attempt failed."""


def measure_on_ranks(step: Step, settings: BenchSettings) -> list[Samples]:
    """Time a step on all ranks, with the settings' repeats; return every rank's samples in rank order."""
    return World().gather(
        measure(
            step,
            repeats=settings.repeats,
            warm_up=settings.warm_up,
            device_type=settings.device_type,
        )
    )


def obstacle_of_any(way: AttentionMethod, case: AttentionCase) -> str | None:
    """Return the first rank's obstacle, if any: when one rank cannot compute the case, none may begin."""
    return next((told for told in World().gather(way.obstacle(case)) if told is not None), None)


def failure_of_any(attempt: Callable[[], object]) -> str | None:
    """Try something on all ranks together; return the first failing rank's error in words, or ``None``.

    Raises:
        Exception: this rank's error, if other ranks do not finish their attempts: they wait for messages of
            this rank, and waiting for them would never end.
    """
    name = next_attempt_name()
    failure: str | None = None
    try:
        attempt()
        all_arrived(name, patience=0.0)
    except Exception as error:
        if not all_arrived(name, PATIENCE):
            raise
        failure = f"fails: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return next((each for each in World().gather(failure) if each is not None), None)


def next_attempt_name() -> str:
    """Return the name of this rank's next attempt; all ranks make the same attempts, so names agree."""
    return f"lightning_cp.bench attempt {_store().add(f'lightning_cp.bench rank {dist.get_rank()}', 1)}"


def all_arrived(name: str, patience: float) -> bool:
    """Record in the store that this rank arrived, without a message that others would have to wait for.

    Args:
        name: the meeting point; a rank arrives there once.
        patience: seconds to wait for the others.

    Returns:
        True if all ranks have arrived.
    """
    store = _store()
    there, deadline = store.add(name, 1), time.monotonic() + patience
    while there < dist.get_world_size() and time.monotonic() < deadline:
        time.sleep(0.01)
        there = store.add(name, 0)
    return there == dist.get_world_size()


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()
