"""All ways of doing a job: those that fit a device, fastest first, and why the others do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd
from typing import TypeVar

from lightning_cp.axes import Axis
from lightning_cp.errors import ConfigError
from lightning_cp.planner.attention import AttentionCost, attention_cost
from lightning_cp.planner.job import Case, Choice, Job, MeshSizes, devices_per_node
from lightning_cp.planner.memory import Memory, memory_of
from lightning_cp.planner.seconds import Seconds, step_seconds

T = TypeVar("T")
CHUNK, TILE = 1024, 4096
"""Tokens: the strategy's own defaults."""
ENGINES = ("ddp", "fsdp", "zero1", "hsdp")
CHECKPOINTING = ("none", "keep_attention", "blocks")


@dataclass(frozen=True)
class Limits:
    """What the user leaves open; ``None`` is free."""

    mesh: Mapping[Axis, int | None]
    engine: str | None = None
    exchange: str | None = None
    checkpointing: str | None = None
    offload: bool | None = None
    chunked_loss: bool | None = None
    tiled_mlp: bool | None = None


@dataclass(frozen=True)
class Plan:
    """A way that fits, with its price."""

    case: Case
    memory: Memory
    attention: Mapping[int | None, AttentionCost]
    seconds: Seconds

    @property
    def tokens_per_second(self) -> float:
        """Of all devices."""
        return self.case.job.tokens / self.seconds.total

    @property
    def mfu(self) -> float:
        """Model FLOPs a second over the peak of all devices.

        6 for each parameter that multiplies a token, and 12 x head dim x heads for each visible pair;
        what is computed again does not count.
        """
        job = self.case.job
        flops = model_flops(job, self.attention)
        return flops / self.seconds.total / (job.timed.peak_flops * job.devices)


def model_flops(job: Job, attention: Mapping[int | None, AttentionCost]) -> int:
    """Of a step: forward and backward, without recomputation, visible pairs only."""
    pairs = sum(n * sum(attention[window].pairs) for window, n in job.model.windows.items())
    per_pair = 12 * job.model.heads * job.model.head_dim
    return job.global_batch * (pairs * per_pair + job.seq_len * job.model.flops_per_token)


@dataclass(frozen=True)
class Rejected:
    """A mesh that does not do, whatever the settings."""

    mesh: MeshSizes
    engine: str
    why: str
    missing: int = 0
    """Bytes by which the setting that needs least misses a device; 0: for another reason."""
    memory: Memory | None = None
    case: Case | None = None
    """The setting that needs least."""


@dataclass(frozen=True)
class Found:
    """What a search has found."""

    plans: tuple[Plan, ...]
    """The best settings of each mesh and engine that fits, fastest first."""
    rejected: tuple[Rejected, ...]
    """Closest first."""
    looked_at: int
    """Meshes and settings that were priced."""


def search(job: Job, limits: Limits) -> Found:
    """Price every way that the limits leave.

    Raises:
        ConfigError: limits that no mesh of so many devices has.
    """
    plans: list[Plan] = []
    rejected: list[Rejected] = []
    looked_at = 0
    for mesh, engine in meshes(job, limits):
        why = _impossible(job, mesh)
        if why:
            rejected.append(Rejected(mesh, engine, why))
            continue
        cases = [Case(job, choice) for choice in settings(job, mesh, engine, limits)]
        looked_at += len(cases)
        if not cases:
            rejected.append(Rejected(mesh, engine, "the settings that are set do not go with it"))
            continue
        found = _priced(cases)
        if isinstance(found, Plan):
            plans.append(found)
        else:
            memory, saving = found
            rejected.append(Rejected(mesh, engine, memory.why, memory.missing, memory, saving))
    if not plans and not rejected:
        raise ConfigError(_nothing(job, limits))
    plans.sort(key=_slowness)
    rejected.sort(key=lambda one: (one.memory is None, one.missing))
    return Found(tuple(plans), tuple(rejected), looked_at)


def _priced(cases: Sequence[Case]) -> Plan | tuple[Memory, Case]:
    """The fastest that fits; where none does, the one that needs least, with all that it needs.

    What is more than a device has without attention's buffers is not priced with them: they take longest.
    """
    bounds = [(memory_of(case, {}), case) for case in cases]
    found: list[Plan] = []
    for _, case in (one for one in bounds if one[0].missing <= 0):
        attention = _attention(case)
        memory = memory_of(case, attention)
        if memory.missing <= 0:
            seconds = step_seconds(case, attention) if case.job.trains else Seconds()
            found.append(Plan(case, memory, attention, seconds))
    return min(found, key=_slowness) if found else _least(bounds)


def _least(bounds: Sequence[tuple[Memory, Case]]) -> tuple[Memory, Case]:
    """Of cases with what each needs at least, the one that needs least."""
    nearest = sorted(bounds, key=_missing)
    _, case = nearest[0]
    least = memory_of(case, _attention(case)), case
    for bound, case in nearest[1:]:
        if bound.missing >= least[0].missing:
            break
        least = min(least, (memory_of(case, _attention(case)), case), key=_missing)
    return least


def _missing(one: tuple[Memory, Case]) -> int:
    return one[0].missing


def _attention(case: Case) -> dict[int | None, AttentionCost]:
    return {window: attention_cost(case, window) for window in case.job.model.windows}


def _slowness(plan: Plan) -> tuple[float, int, int]:
    """Of equals the one that needs less memory, then the simpler engine."""
    engine = ENGINES.index(plan.case.choice.engine)
    return plan.seconds.total, plan.memory.total, engine


def meshes(job: Job, limits: Limits) -> Iterator[tuple[MeshSizes, str]]:
    """Every mesh of all devices that heads and limits allow, with every engine that it can have.

    A mesh that is set whole may leave devices idle.
    """
    if all(limits.mesh.get(axis) for axis in Axis):
        yield from _set_whole(job, limits)
        return
    per_node = devices_per_node(job.devices, job.machine.devices_per_node)
    for tp in job.model.tp_sizes:
        if job.devices % tp or tp > per_node:
            continue
        for cp in divisors(job.devices // tp):
            if cp > 1 and (job.seq_len < 2 * cp or not job.trains):
                continue
            data = job.devices // (tp * cp)
            for ulysses in divisors(gcd(job.model.heads // tp, cp)):
                for engine, replicate in _engines(data, tp, limits):
                    mesh = MeshSizes(replicate, data // replicate, cp // ulysses, ulysses, tp)
                    if _allowed(mesh, limits):
                        yield mesh, engine


def _set_whole(job: Job, limits: Limits) -> Iterator[tuple[MeshSizes, str]]:
    mesh = MeshSizes(*(limits.mesh[axis] or 1 for axis in Axis))
    if mesh.devices > job.devices:
        raise ConfigError(f"mesh: {mesh} has {mesh.devices} devices, got devices={job.devices}.")
    if mesh.tp not in job.model.tp_sizes:
        sizes = ", ".join(map(str, job.model.tp_sizes))
        raise ConfigError(
            f"mesh.tp={mesh.tp} cannot share {job.model.name}. What would work: {sizes}."
        )
    for engine, copies in _engines(mesh.data, mesh.tp, limits):
        if copies == mesh.dp_replicate:
            yield mesh, engine


def _engines(data: int, tp: int, limits: Limits) -> Iterator[tuple[str, int]]:
    """Engines, and how many copies of the model each has."""
    for engine in ENGINES if limits.engine is None else (limits.engine,):
        if engine in ("ddp", "zero1"):
            if tp == 1:
                yield engine, data
        elif engine == "fsdp":
            yield engine, 1
        else:
            yield from ((engine, copies) for copies in divisors(data) if copies > 1)


def _allowed(mesh: MeshSizes, limits: Limits) -> bool:
    return all(
        wanted is None or mesh.by_axis[axis] == wanted for axis, wanted in limits.mesh.items()
    )


def _impossible(job: Job, mesh: MeshSizes) -> str:
    """Why a mesh cannot do the job, whatever the settings; nothing if it might."""
    if job.trains and job.global_batch % mesh.data:
        if mesh.data > job.global_batch:
            idle = mesh.data - job.global_batch
            return (
                f"{idle} of {mesh.data} data ranks would be idle: global_batch={job.global_batch}"
            )
        return f"global_batch={job.global_batch} does not divide by {mesh.data} data ranks"
    return ""


def settings(job: Job, mesh: MeshSizes, engine: str, limits: Limits) -> Iterator[Choice]:
    """All settings of a mesh that the strategy takes."""
    if not job.trains:
        yield Choice(mesh, engine)
        return
    alone, shared = mesh.cp == 1, mesh.tp > 1
    exchanges = _free(limits.exchange, ("ring", "all_gather") if mesh.ring > 1 else ("ring",))
    kept = [one for one in CHECKPOINTING if not (alone and one == "keep_attention")]
    for checkpointing, exchange in product(_free(limits.checkpointing, kept), exchanges):
        waits = checkpointing != "none" and job.machine.host_memory > 0
        offloads = (False, True) if waits else (False,)
        chunked = (False,) if shared else (False, True)
        tiled = (False,) if shared or job.model.experts else (False, True)
        for offload, chunks, tiles in product(
            _free(limits.offload, offloads),
            _free(limits.chunked_loss, chunked),
            _free(limits.tiled_mlp, tiled),
        ):
            yield Choice(
                *(mesh, engine, exchange, checkpointing, offload),
                CHUNK if chunks else 0,
                TILE if tiles else 0,
            )


def _free(wanted: T | None, possible: Sequence[T]) -> Sequence[T]:
    if wanted is None:
        return possible
    return [one for one in possible if one == wanted]


def divisors(number: int) -> list[int]:
    """All of them, in order."""
    return [n for n in range(1, number + 1) if number % n == 0]


def _nothing(job: Job, limits: Limits) -> str:
    pinned = ", ".join(f"{axis}={size}" for axis, size in limits.mesh.items() if size is not None)
    asked = f"{pinned or 'no axis set'}, engine {limits.engine or 'any'}"
    per_node = devices_per_node(job.devices, job.machine.devices_per_node)
    return (
        f"no mesh of {job.devices} devices has {asked}. tp can be one of {list(job.model.tp_sizes)} within "
        f"a node of {per_node}, ulysses a divisor of {job.model.heads} heads / tp, and all sizes multiply to "
        "the devices. Leave an axis out, or change devices."
    )
