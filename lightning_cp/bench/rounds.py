"""What one rank does to measure some ways together: check each, count what it does, then time them in rounds.

Repeats go round over the ways, so that noise hits all alike; rank 0 computes the case alone in the same
rounds. A peer that raises may leave messages behind, and others waiting for it: this rank notes who it was
and ends, and whoever has started the ranks starts them again without that way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from lightning_cp.bench.case import Case
from lightning_cp.bench.clock import Samples, measure
from lightning_cp.bench.counts import Counts
from lightning_cp.bench.together import obstacle_of_any
from lightning_cp.bench.ways import OneProcess, Ours, Sharded, Step

COUNTED = 2
"""Passes that are counted and not timed; they warm up too."""
Results = tuple[torch.Tensor, ...]
"""out, dq, dk and dv [B, L, heads, D]."""


@dataclass(frozen=True)
class Found:
    """What one rank measured of one way."""

    samples: Samples
    counts: dict[str, int]
    """Bytes sent, and those of agreements; kernel calls, peak bytes, tokens of padding."""
    error: float


def measure_rank(
    case: Case, ways: Sequence[Sharded], repeats: int, notes: Path
) -> tuple[Samples, list[Found | str]]:
    """This rank's part: one process's time (rank 0 only), and of each way what was found, or an obstacle.

    Args:
        case: what is computed.
        ways: on every rank the same.
        repeats: timed rounds.
        notes: an empty folder, where :func:`failed_way` finds which peer it was that raised.
    """
    whole = [x.detach() for x in case.inputs(case.tokens)]
    whole.append(torch.randn_like(whole[0]))
    alone = OneProcess().step(case)
    wanted = _reference(whole, alone)
    obstacles = [_obstacle(way, case, notes) for way in ways]
    runs = [
        _Run(way, case, whole, notes)
        for way, obstacle in zip(ways, obstacles, strict=True)
        if obstacle is None
    ]
    for _ in range(COUNTED):
        for run in runs:
            run.count(wanted)
    del whole, wanted
    steps = [alone if dist.get_rank() == 0 else _nothing, *(run.step for run in runs)]
    samples = _time(steps, repeats, case.device_type)
    found = iter([run.found(of_run) for run, of_run in zip(runs, samples[1:], strict=True)])
    return samples[0], [next(found) if text is None else text for text in obstacles]


def failed_way(notes: Path) -> tuple[str, str] | None:
    """The name of the peer that has raised first, and what; ``None`` if none has."""
    note = notes / _NOTE
    if not note.exists():
        return None
    name, _, told = note.read_text().partition("\n")
    return name, told


_NOTE = "failed"


@contextmanager
def _blaming(way: Sharded, notes: Path) -> Iterator[None]:
    """Note that a peer has raised, unless another rank has: what follows is due to that. Ours may not."""
    try:
        yield
    except Exception as error:
        if not isinstance(way, Ours) and not (notes / _NOTE).exists():
            told = f"rank {dist.get_rank()} fails: {type(error).__name__}: {error}"
            (notes / _NOTE).write_text(f"{way.name}\n{told.splitlines()[0]}")
        raise


def _obstacle(way: Sharded, case: Case, notes: Path) -> str | None:
    """The first rank's that has one: if one cannot compute the case, nobody may begin."""
    with _blaming(way, notes):
        return obstacle_of_any(way, case)


def _time(steps: Sequence[Step], repeats: int, device_type: str) -> list[Samples]:
    """Of each step, its repeats; each round goes over all steps."""
    samples = [Samples([], []) for _ in steps]
    for _ in range(repeats):
        for step, of_step in zip(steps, samples, strict=True):
            once = measure(step, repeats=1, warm_up=0, device_type=device_type)
            of_step.cpu.extend(once.cpu)
            of_step.wall.extend(once.wall)
    return samples


def _nothing() -> None:
    """What other ranks do while rank 0 computes alone."""


class _Run:
    """One way on this rank, with its shards of the whole inputs."""

    def __init__(
        self, way: Sharded, case: Case, whole: Sequence[torch.Tensor], notes: Path
    ) -> None:
        self._way, self._notes = way, notes
        with _blaming(way, notes):
            self._attend = way.attention(case)
            positions = way.positions(case, dist.get_rank())
        tokens = whole[0].shape[1]
        *self._inputs, self._dout = (_shard(x, positions) for x in whole)
        for x in self._inputs:
            x.requires_grad_()
        self._real = (positions < tokens).to(whole[0].device)
        self._positions = positions.to(whole[0].device)[self._real]
        self._passes: list[Counts] = []
        self._error = 0.0

    def step(self) -> Results:
        """Forward and backward."""
        with _blaming(self._way, self._notes):
            out = self._attend(*self._inputs)
            return (out, *torch.autograd.grad(out, self._inputs, self._dout))

    def count(self, wanted: Results) -> None:
        """Count what a step does, and compare what it returns with one process."""
        with Counts() as counts:
            results = tuple(x.detach() for x in self.step())
        self._passes.append(counts)
        for got, want in zip(results, wanted, strict=True):
            distance = (got[:, self._real] - want[:, self._positions]).abs().max()
            self._error = float(np.maximum(self._error, float(distance / want.abs().max())))

    def found(self, samples: Samples) -> Found:
        """Of the counted passes and of the timed ones."""
        last = self._passes[-1]
        numbers = {
            "sent": last.data,
            "control": last.control,
            "kernels": last.kernels,
            # A transfer may hold its buffer a moment longer than it has to, in one pass or the other.
            "peak": min(counts.peak for counts in self._passes),
            "padding": int((~self._real).sum()),
        }
        return Found(samples, numbers, self._error)


def _shard(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Local tokens; padding is 0, the gradient of its output too."""
    tokens = x.shape[1]
    local = x[:, positions.clamp(max=tokens - 1).to(x.device)]
    local[:, (positions >= tokens).to(x.device)] = 0
    return local


def _reference(whole: Sequence[torch.Tensor], alone: Callable[[], list[torch.Tensor]]) -> Results:
    """out, dq, dk and dv of the whole sequence, computed by rank 0."""
    results = tuple(torch.empty_like(x) for x in (whole[0], *whole[:3]))
    if dist.get_rank() == 0:
        found = [x.detach() for x in alone()]
        documents = len(found) // len(results)
        parts = [found[:documents], *(found[documents + at :: 3] for at in range(3))]
        for result, pieces in zip(results, parts, strict=True):
            torch.cat(pieces, dim=1, out=result)
    for result in results:
        dist.broadcast(result, 0)
    return results
