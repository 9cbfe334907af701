"""Speed of messages along each axis of the mesh, with the functions that attention uses.

All groups of an axis are busy at once, as in training. Figures are of the slowest rank. A rank's rate is the
bytes that *it sends to others* per second, while it receives as many: the bytes that ``layout/cost.py``
counts. An all-reduce sends twice its share of the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lightning_cp.bench.methods import Step
from lightning_cp.bench.settings import BenchSettings
from lightning_cp.bench.timers import cpu_of_all, measure_on_ranks, wall_of_slowest
from lightning_cp.comm.all_gather import start_all_gather, start_reduce_scatter
from lightning_cp.comm.all_to_all import scatter_heads
from lightning_cp.comm.reduce import all_sum
from lightning_cp.comm.transfer import start_transfer
from lightning_cp.layout.axes import Axis, Flat
from lightning_cp.mesh import ContextParallelMesh

HEAD_DIM = 64
ENTRY = 4
"""Bytes of a float32."""
AT_ONCE = 4 << 20
"""Bytes sent between two readings of the clock if messages are smaller; at most ``MOST`` messages."""
MOST = 50


@dataclass(frozen=True)
class LinkRow:
    """One collective along one axis, with messages of one size."""

    axis: str
    collective: str
    ulysses_size: int
    ring_size: int
    asked: int
    """Bytes that a rank was asked to send; 0 for the smallest possible message."""
    bytes: int
    """Bytes that a rank sends to others per call: whole tokens, so a few bytes more."""
    seconds: float
    """Seconds of a call on the slowest rank, the minimum of the repeats."""
    gigabytes_per_second: float
    """10^9 bytes that a rank sends per second."""
    spread: float | None
    """(maximum - minimum) / minimum of the repeats; ``None`` for one repeat."""
    cpu_seconds: float | None = None
    """On CPU: CPU-seconds of a call on the mean rank, the minimum of the repeats."""

    @property
    def latency(self) -> bool:
        """True if the message is so small that ``seconds`` is the latency."""
        return self.asked == 0


class LinkCall(NamedTuple):
    """A collective with its tensors."""

    step: Step
    sent: int
    """Bytes that a rank sends."""


Maker = Callable[[ContextParallelMesh, int], LinkCall]
"""Makes a call from the mesh and the approximate bytes that a rank sends."""


def measure_links(settings: BenchSettings, tell: Callable[[str], None]) -> list[LinkRow]:
    """Measure every axis of every split of the ranks; all ranks return the same rows.

    Args:
        settings: the number of ranks and the sizes.
        tell: shows progress.
    """
    ranks = settings.devices
    rows: list[LinkRow] = []
    for ulysses in (u for u in range(ranks, 0, -1) if ranks % u == 0):
        mesh = ContextParallelMesh(ranks // ulysses, ulysses, settings.device_type)
        for axis, collective, make in collectives(mesh):
            tell(f"{collective} along {axis}, ulysses {ulysses} x ring {ranks // ulysses}")
            found = _sizes(axis, collective, make, mesh, settings)
            rows += found
        mesh.destroy()
    return rows


def collectives(mesh: ContextParallelMesh) -> list[tuple[str, str, Maker]]:
    """Return (axis, collective, maker) for the axes of a mesh with more than one rank."""
    found: list[tuple[str, str, Maker]] = []
    if mesh.ulysses_size > 1:
        found.append((Axis.ULYSSES.value, "all-to-all", _all_to_all))
    if mesh.ring_size > 1:
        found.append((Axis.RING.value, "p2p", _p2p))
        found.append((Axis.RING.value, "all-gather", _all_gather))
        found.append((Axis.RING.value, "reduce-scatter", _reduce_scatter))
    if mesh.ring_size == mesh.cp_size:  # every rank, however they are split: once is enough
        found.append((Flat.LOSS.value, "all-reduce", _all_reduce))
    return found


def _sizes(
    axis: str, collective: str, make: Maker, mesh: ContextParallelMesh, settings: BenchSettings
) -> Iterator[LinkRow]:
    """Yield a row for the smallest possible message, and one for each configured size."""
    for size in (0, *settings.message_bytes):
        call = make(mesh, size)
        count = max(1, min(MOST, AT_ONCE // call.sent))
        found = measure_on_ranks(_repeated(call.step, count), settings)
        figure = wall_of_slowest(found)
        cpu = cpu_of_all(found).best / len(found) / count
        seconds = figure.best / count
        rate = call.sent / seconds / 1e9
        sizes = (mesh.ulysses_size, mesh.ring_size)
        yield LinkRow(
            axis,
            collective,
            *sizes,
            size,
            call.sent,
            seconds,
            rate,
            figure.spread,
            cpu if settings.device_type == "cpu" else None,
        )


def _repeated(step: Step, count: int) -> Step:
    def repeated() -> None:
        for _ in range(count):
            step()

    return repeated


def _p2p(mesh: ContextParallelMesh, size: int) -> LinkCall:
    """A hop: send to the next rank of the ring, receive from the previous one."""
    group, rank, ranks = mesh.group(Axis.RING), mesh.ring_rank, mesh.ring_size
    x = _tokens(mesh, size, 1)

    def step() -> object:
        ahead, behind = (rank + 1) % ranks, (rank - 1) % ranks
        return start_transfer(x, ahead, x.shape, behind, x, group).wait()

    return LinkCall(step, x.nbytes)


def _all_to_all(mesh: ContextParallelMesh, size: int) -> LinkCall:
    """The Ulysses exchange of tokens for heads, with one head for each rank of the group."""
    group, rank, ranks = mesh.group(Axis.ULYSSES), mesh.ulysses_rank, mesh.ulysses_size
    x_BLHD = _tokens(mesh, size, ranks - 1).unsqueeze(1).repeat(1, ranks, 1).unsqueeze(0)
    heads = [(head, head + 1) for head in range(ranks)]
    sent = x_BLHD.nbytes // ranks * (ranks - 1)
    return LinkCall(lambda: scatter_heads([[x_BLHD]], [heads], rank, group).wait(), sent)


def _all_gather(mesh: ContextParallelMesh, size: int) -> LinkCall:
    """The gather of a rank's keys by every other rank of the ring."""
    group, others = mesh.group(Axis.RING), mesh.ring_size - 1
    x = _tokens(mesh, size, others)
    return LinkCall(lambda: start_all_gather(x, group).wait(), x.nbytes * others)


def _reduce_scatter(mesh: ContextParallelMesh, size: int) -> LinkCall:
    """The reduction of the gradients of all keys on the ranks that hold the keys."""
    group, others = mesh.group(Axis.RING), mesh.ring_size - 1
    x = _tokens(mesh, size, others).repeat(mesh.ring_size, 1)
    return LinkCall(
        lambda: start_reduce_scatter(x, group).wait(), x.nbytes // mesh.ring_size * others
    )


def _all_reduce(mesh: ContextParallelMesh, size: int) -> LinkCall:
    """The reduction of parameter gradients; a ring of N ranks sends 2 (N-1)/N of the tensor."""
    group, ranks = mesh.group(Flat.LOSS), mesh.cp_size
    x = _tokens(mesh, size, 2 * (ranks - 1)).repeat(ranks, 1)
    return LinkCall(lambda: all_sum(x, group), x.nbytes // ranks * 2 * (ranks - 1))


def _tokens(mesh: ContextParallelMesh, size: int, parts: int) -> torch.Tensor:
    """Return float32 [tokens, head dim], of which ``parts`` are about ``size`` bytes; at least one token."""
    tokens = max(1, math.ceil(size / (parts * HEAD_DIM * ENTRY)))
    return torch.ones(tokens, HEAD_DIM, device=mesh.device_type)
