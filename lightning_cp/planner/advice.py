"""Advice about a plan (idle devices, copies, slow links), and memory while a checkpoint is loaded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from lightning_cp.layout.axes import Axis
from lightning_cp.planner.job import PlanCase

FEW_TOKENS = 2048
"""Tokens of a rank below which gathering a layer takes longer than its compute on most links."""
MANY_COPIES = 1.5
"""Copies of a parameter over all ranks of one copy of the model that count as many."""


@dataclass(frozen=True)
class ParameterMemory:
    """Memory of one parameter on a rank, while a checkpoint is read tensor by tensor."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    whole: int
    """Bytes of the whole parameter."""
    local: int
    """Bytes of a rank's part: equally many rows on each, of those of a tensor-parallel rank."""
    ranks: int
    """Ranks over which the model is sharded; a parameter with fewer rows has fewer."""

    @property
    def excess(self) -> int:
        """Bytes of all ranks together beyond one copy."""
        return self.local * self.ranks - self.whole


@dataclass(frozen=True)
class OutOfMemory:
    """The point where reading runs out of memory."""

    part: ParameterMemory
    free: int
    """Bytes that are left for the part."""
    read: float
    """Fraction of all bytes read by then."""


def parameter_memory(case: PlanCase) -> Iterator[ParameterMemory]:
    """Yield the memory of every parameter, in the order of use."""
    choice, itemsize = case.choice, case.job.itemsize
    ranks, tp = choice.shard_ranks, choice.mesh.tp
    for one in case.job.model.parameters:
        shape = one.local_shape(tp)
        local = -(-shape[0] // ranks) * math.prod(shape[1:])
        yield ParameterMemory(
            one.name, one.shape, one.numel * itemsize, local * itemsize, ranks * tp
        )


def find_out_of_memory(case: PlanCase) -> OutOfMemory | None:
    """Find the first parameter that does not fit; ``None`` if all do."""
    machine = case.job.machine
    free, read = machine.memory - machine.reserve, 0
    every = case.job.model.num_parameters * case.job.itemsize
    for part in parameter_memory(case):
        if part.local > free:
            return OutOfMemory(part, free, read / every)
        free -= part.local
        read += part.whole
    return None


def largest_stacked_parameter(case: PlanCase) -> tuple[str, int]:
    """Return the name of the largest parameter stacked over layers, and its bytes if it were whole."""
    job = case.job
    sizes = {one.name: one.numel for one in job.model.layers[0].parameters}
    name = (
        "self_attn.o_proj.weight"
        if "self_attn.o_proj.weight" in sizes
        else max(sizes, key=lambda at: sizes[at])
    )
    return name, sizes[name] * len(job.model.layers) * job.itemsize


def advice(case: PlanCase) -> Iterator[str]:
    """Yield sentences of advice, most important first."""
    job, mesh, heads = case.job, case.choice.mesh, case.heads
    idle = job.devices - mesh.devices
    if idle:
        share = f"{idle} of {job.devices} devices ({idle / job.devices:.1%})"
        yield f"{share} are idle: the mesh has {mesh.devices}"
    full, each = min(mesh.devices, job.machine.devices_per_node), case.devices_per_node
    if each < full:
        nodes = mesh.devices // each
        yield f"{mesh.devices} devices are {nodes} nodes of {each}, as each has equally many"
    copies = mesh.devices // (case.choice.shard_ranks * mesh.tp)
    if copies > 1:
        yield (
            f"{copies} copies of the model's state: {1 - 1 / copies:.1%} of the devices hold what others "
            "hold already. dp_shard in place of dp_replicate shards it"
        )
    for axis in (Axis.TP, Axis.ULYSSES, Axis.RING):
        if case.crosses_nodes(axis):
            beyond = (
                f"{axis.value} of {mesh.size(axis)} goes beyond nodes of {case.devices_per_node}"
            )
            yield f"{beyond}: its messages take the slower link"
    sent = sum(map(heads.num_local_kv, range(heads.ulysses_size))) / heads.num_kv_heads
    if sent > 1:
        above = f"ulysses of {mesh.ulysses} is above {heads.num_kv_heads} K/V heads"
        yield f"{above}: each is sent to {sent:g} ranks"
    most = job.model.positions
    if most is not None and job.seq_len > most:
        yield (
            f"seq_len={job.seq_len:,} is above the {most:,} positions of the model's config "
            "(max_position_embeddings)"
        )
    padding = case.layout.padded_len - job.seq_len
    if padding:
        yield f"{padding:,} tokens of padding ({padding / job.seq_len:.2%}), which cost no attention"
    if case.local_tokens < FEW_TOKENS:
        yield f"{case.local_tokens:,} tokens a rank are few: gathering parameters may take longer"
    if case.sequences > 1:
        yield (
            f"{case.sequences} sequences one after the other: until the last one, gradients stay whole"
        )


def find_poorly_sharded(case: PlanCase, most: int = 5) -> list[ParameterMemory]:
    """Find parameters that take much more than a rank's even share, largest waste first."""
    found: dict[tuple[str, int], ParameterMemory] = {}
    for part in parameter_memory(case):
        if part.local * part.ranks > MANY_COPIES * part.whole and part.ranks > 1:
            kind = (".".join(p for p in part.name.split(".") if not p.isdecimal()), part.local)
            found.setdefault(kind, part)
    return sorted(found.values(), key=lambda part: -part.excess)[:most]
