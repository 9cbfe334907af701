"""What a rank holds while a checkpoint is read, tensor by tensor, in the order of use."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from lightning_cp.planner.job import Case


@dataclass(frozen=True)
class Part:
    """What a rank takes memory for of one parameter."""

    name: str
    shape: tuple[int, ...]
    """Of the whole parameter."""
    whole: int
    """Bytes of it."""
    local: int
    """Bytes of a rank's part: as many rows on each, of those that a tensor-parallel rank has."""
    ranks: int
    """Over which the model is spread; fewer share a parameter with fewer rows."""

    @property
    def excess(self) -> int:
        """Bytes of all ranks together beyond one copy."""
        return self.local * self.ranks - self.whole


@dataclass(frozen=True)
class Stop:
    """Where reading runs out of memory."""

    part: Part
    free: int
    """Bytes that are left for it."""
    read: float
    """The share of all bytes that is there by then."""


def parts(case: Case) -> Iterator[Part]:
    """Of every parameter, in the order of use."""
    choice, itemsize = case.choice, case.job.itemsize
    ranks, tp = choice.shard_ranks, choice.mesh.tp
    for one in case.job.model.parameters:
        shape = one.local_shape(tp)
        local = -(-shape[0] // ranks) * math.prod(shape[1:])
        yield Part(one.name, one.shape, one.numel * itemsize, local * itemsize, ranks * tp)


def stops_at(case: Case) -> Stop | None:
    """The first parameter that does not fit any more; ``None`` if all do."""
    machine = case.job.machine
    free, read = machine.memory - machine.reserve, 0
    every = case.job.model.num_parameters * case.job.itemsize
    for part in parts(case):
        if part.local > free:
            return Stop(part, free, read / every)
        free -= part.local
        read += part.whole
    return None


def stacked(case: Case) -> tuple[str, int]:
    """The largest parameter of all layers in one, with its bytes if that were made whole."""
    job = case.job
    sizes = {one.name: one.numel for one in job.model.layers[0].parameters}
    name = (
        "self_attn.o_proj.weight"
        if "self_attn.o_proj.weight" in sizes
        else max(sizes, key=lambda at: sizes[at])
    )
    return name, sizes[name] * len(job.model.layers) * job.itemsize
