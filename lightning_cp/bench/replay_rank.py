"""One rank of a ring on one device, with nothing sent: how long its passes take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from lightning_cp.bench.alone import one_rank
from lightning_cp.bench.case import Case
from lightning_cp.bench.clock import Figure, measure, widest
from lightning_cp.bench.ring_flash_attn_calls import ZigzagCalls
from lightning_cp.bench.ways import Ours, Step
from lightning_cp.kernels.api import Merged
from lightning_cp.kernels.call_per_tile import CallPerTile


@dataclass(frozen=True)
class Seconds:
    """Least times of a rank's passes."""

    forward: float
    backward: float
    spread: float | None = 0.0
    """(most - least) / least of the repeats, of the pass where it is larger."""

    @property
    def both(self) -> float:
        """One after the other."""
        return self.forward + self.backward

    @classmethod
    def slowest(cls, ranks: Sequence[Seconds]) -> Seconds:
        """Of each pass, the slowest rank's."""
        forward, backward, spread = zip(
            *((x.forward, x.backward, x.spread) for x in ranks), strict=True
        )
        return cls(max(forward), max(backward), widest(spread))


def replay(way: Ours, case: Case, rank: int, repeats: int) -> Seconds:
    """The times of one rank."""
    with one_rank(way, case, rank, arrived=True) as alone:
        alone.forward()
        alone.backward()  # what arrives has been made now
        return _seconds((alone.forward, alone.backward), case, repeats)


def replay_theirs(kernel: CallPerTile, case: Case, rank: int, repeats: int) -> Seconds:
    """The times of one rank in ring-flash-attention's sequence of calls; each step's keys are its own too."""
    with one_rank(Ours(1, case.ranks, kernel=kernel.name), case, rank) as alone:
        calls = ZigzagCalls(kernel, alone.plan.scores, rank, case.ranks)
        (q, k, v), dout = alone.inputs, alone.dout
    arrived = [(k, v), *((torch.randn_like(k), torch.randn_like(v)) for _ in range(1, case.ranks))]
    came = [
        (torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32))
        for k, v in arrived
    ]
    keys = arrived.__getitem__
    out, lse = calls.forward(q, keys)
    merged = Merged(dout, out, lse)
    backward = partial(calls.backward, merged, q, keys, came.__getitem__)
    return _seconds((partial(calls.forward, q, keys), backward), case, repeats)


def _seconds(passes: Sequence[Step], case: Case, repeats: int) -> Seconds:
    """CPU-seconds on CPU, wall time around work that the device has finished elsewhere."""
    found: list[Figure] = []
    for step in passes:
        samples = measure(step, repeats=repeats, device_type=case.device_type)
        found.append(Figure.of(samples.cpu if case.device_type == "cpu" else samples.wall))
    forward, backward = found
    return Seconds(forward.best, backward.best, widest((forward.spread, backward.spread)))
