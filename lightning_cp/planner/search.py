"""Search over meshes, engines and settings: methods that fit a device, fastest first, and rejected meshes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd
from typing import TypeVar

from lightning_cp.errors import ConfigError
from lightning_cp.layout.axes import Axis, divisors
from lightning_cp.planner.attention import AttentionCost, attention_cost
from lightning_cp.planner.job import Job, MeshSizes, PlanCase, TrainingMethod, devices_per_node
from lightning_cp.planner.memory import Memory, memory_of
from lightning_cp.planner.time_model import StepSeconds, step_seconds

T = TypeVar("T")
CHUNK_TOKENS, TILE_TOKENS = 1024, 4096
"""The strategy's defaults."""
ENGINES = ("ddp", "fsdp", "zero1", "hsdp")
CHECKPOINTING = ("none", "keep_attention", "blocks")


@dataclass(frozen=True)
class Limits:
    """Settings that the user fixes; ``None`` is free."""

    mesh: Mapping[Axis, int | None]
    engine: str | None = None
    exchange: str | None = None
    checkpointing: str | None = None
    offload: bool | None = None
    chunked_loss: bool | None = None
    tiled_mlp: bool | None = None


def meshes(job: Job, limits: Limits) -> Iterator[tuple[MeshSizes, str]]:
    """Yield every mesh of all devices that heads and limits allow, with every engine for it.

    A mesh whose axes are all given may leave devices idle.
    """
    if all(limits.mesh.get(axis) for axis in Axis):
        yield from _given_mesh(job, limits)
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


def _given_mesh(job: Job, limits: Limits) -> Iterator[tuple[MeshSizes, str]]:
    mesh = MeshSizes(*(limits.mesh[axis] or 1 for axis in Axis))
    if mesh.devices > job.devices:
        raise ConfigError(
            f"mesh: {mesh} has {mesh.devices} devices, got devices={job.devices}. "
            "Change the sizes of the mesh, or devices."
        )
    if mesh.tp not in job.model.tp_sizes:
        sizes = ", ".join(map(str, job.model.tp_sizes))
        raise ConfigError(
            f"mesh.tp={mesh.tp} cannot share {job.model.name}. What would work: {sizes}."
        )
    for engine, copies in _engines(mesh.data, mesh.tp, limits):
        if copies == mesh.dp_replicate:
            yield mesh, engine


def _engines(data: int, tp: int, limits: Limits) -> Iterator[tuple[str, int]]:
    """Yield engines with their numbers of model copies."""
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


def training_methods(
    job: Job, mesh: MeshSizes, engine: str, limits: Limits
) -> Iterator[TrainingMethod]:
    """Yield all methods of a mesh and engine that the strategy supports."""
    if not job.trains:
        yield TrainingMethod(mesh, engine)
        return
    alone, shared = mesh.cp == 1, mesh.tp > 1
    exchanges = _choices(limits.exchange, _exchanges(job, mesh, limits))
    kept = [one for one in CHECKPOINTING if not (alone and one == "keep_attention")]
    for checkpointing, exchange in product(_choices(limits.checkpointing, kept), exchanges):
        waits = checkpointing != "none" and job.machine.host_memory > 0
        offloads = (False, True) if waits else (False,)
        chunked = (False,) if shared else (False, True)
        tiled = (False,) if shared or job.model.experts else (False, True)
        for offload, chunks, tiles in product(
            _choices(limits.offload, offloads),
            _choices(limits.chunked_loss, chunked),
            _choices(limits.tiled_mlp, tiled),
        ):
            yield TrainingMethod(
                *(mesh, engine, exchange, checkpointing, offload),
                CHUNK_TOKENS if chunks else 0,
                TILE_TOKENS if tiles else 0,
            )


def _exchanges(job: Job, mesh: MeshSizes, limits: Limits) -> tuple[str, ...]:
    """Return the exchanges of a mesh: a rotation sends more, and only helps where devices share cards."""
    if mesh.ring == 1:
        return ("ring",)
    devices = devices_per_node(mesh.devices, job.machine.devices_per_node)
    shares = job.machine.cards(devices) < devices and mesh.crosses_nodes(Axis.RING, devices)
    rotation = ("rotation",) if shares or limits.exchange == "rotation" else ()
    return "ring", *rotation, "all_gather"


def _choices(wanted: T | None, possible: Sequence[T]) -> Sequence[T]:
    if wanted is None:
        return possible
    return [one for one in possible if one == wanted]


def no_mesh_message(job: Job, limits: Limits) -> str:
    """Return the message for limits that no mesh meets."""
    pinned = ", ".join(f"{axis}={size}" for axis, size in limits.mesh.items() if size is not None)
    asked = f"{pinned or 'no axis set'}, engine {limits.engine or 'any'}"
    per_node = devices_per_node(job.devices, job.machine.devices_per_node)
    return (
        f"no mesh of {job.devices} devices has {asked}. tp can be one of {list(job.model.tp_sizes)} within "
        f"a node of {per_node}, ulysses a divisor of {job.model.heads} heads / tp, and all sizes multiply to "
        "the devices. Leave an axis out, or change devices."
    )


@dataclass(frozen=True)
class MethodPlan:
    """A method that fits, with its cost."""

    case: PlanCase
    memory: Memory
    attention: Mapping[int | None, AttentionCost]
    seconds: StepSeconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all devices."""
        return self.case.job.tokens / self.seconds.total

    @property
    def mfu(self) -> float:
        """Model FLOPs per second over the peak of all devices.

        6 for each parameter that multiplies a token, and 12 x head dim x heads for each visible pair;
        recomputation does not count.
        """
        job = self.case.job
        flops = model_flops(job, self.attention)
        return flops / self.seconds.total / (job.timed.peak_flops * job.devices)


def model_flops(job: Job, attention: Mapping[int | None, AttentionCost]) -> int:
    """Return the FLOPs of a step: forward and backward, without recomputation, visible pairs only."""
    pairs = sum(n * sum(attention[window].pairs) for window, n in job.model.windows.items())
    per_pair = job.model.heads * job.model.flops_per_pair
    return job.global_batch * (pairs * per_pair + job.seq_len * job.model.flops_per_token)


@dataclass(frozen=True)
class Rejection:
    """A mesh and engine that no settings make feasible."""

    mesh: MeshSizes
    engine: str
    why: str
    missing: int = 0
    """Missing bytes with the settings that need least; 0: rejected for another reason."""
    memory: Memory | None = None
    case: PlanCase | None = None
    """The settings that need least."""


@dataclass(frozen=True)
class SearchResult:
    """Result of a search."""

    plans: tuple[MethodPlan, ...]
    """The best settings of each mesh and engine that fits, fastest first."""
    rejected: tuple[Rejection, ...]
    """Rejected meshes, closest to fitting first."""
    looked_at: int
    """Number of evaluated cases."""


def search(job: Job, limits: Limits) -> SearchResult:
    """Evaluate every method within the limits.

    Raises:
        ConfigError: limits that no mesh of the devices meets.
    """
    plans: list[MethodPlan] = []
    rejected: list[Rejection] = []
    looked_at = 0
    for mesh, engine in meshes(job, limits):
        why = _mesh_obstacle(job, mesh)
        if why:
            rejected.append(Rejection(mesh, engine, why))
            continue
        cases = [PlanCase(job, choice) for choice in training_methods(job, mesh, engine, limits)]
        looked_at += len(cases)
        if not cases:
            rejected.append(Rejection(mesh, engine, "the settings that are set do not go with it"))
            continue
        found = _best_of(cases)
        if isinstance(found, MethodPlan):
            plans.append(found)
        else:
            memory, saving = found
            rejected.append(Rejection(mesh, engine, memory.why, memory.missing, memory, saving))
    if not plans and not rejected:
        raise ConfigError(no_mesh_message(job, limits))
    plans.sort(key=_slowness)
    rejected.sort(key=lambda one: (one.memory is None, one.missing))
    return SearchResult(tuple(plans), tuple(rejected), looked_at)


def _best_of(cases: Sequence[PlanCase]) -> MethodPlan | tuple[Memory, PlanCase]:
    """Return the fastest case that fits; or, if none does, the one that needs least, with its memory.

    Cases that exceed the device without attention's buffers are not evaluated with them, which takes longest.
    """
    bounds = [(memory_of(case, {}), case) for case in cases]
    found: list[MethodPlan] = []
    for _, case in (one for one in bounds if one[0].missing <= 0):
        attention = _attention(case)
        memory = memory_of(case, attention)
        if memory.missing <= 0:
            seconds = step_seconds(case, attention) if case.job.trains else StepSeconds()
            found.append(MethodPlan(case, memory, attention, seconds))
    return min(found, key=_slowness) if found else _least_memory(bounds)


def _least_memory(bounds: Sequence[tuple[Memory, PlanCase]]) -> tuple[Memory, PlanCase]:
    """Return the case that needs least, given lower bounds of all cases."""
    nearest = sorted(bounds, key=_missing)
    _, case = nearest[0]
    least = memory_of(case, _attention(case)), case
    for bound, case in nearest[1:]:
        if bound.missing >= least[0].missing:
            break
        least = min(least, (memory_of(case, _attention(case)), case), key=_missing)
    return least


def _missing(one: tuple[Memory, PlanCase]) -> int:
    return one[0].missing


def _attention(case: PlanCase) -> dict[int | None, AttentionCost]:
    return {window: attention_cost(case, window) for window in case.job.model.windows}


def _slowness(plan: MethodPlan) -> tuple[float, int, int]:
    """Sort key: time; of equals less memory, then the simpler engine."""
    engine = ENGINES.index(plan.case.choice.engine)
    return plan.seconds.total, plan.memory.total, engine


def _mesh_obstacle(job: Job, mesh: MeshSizes) -> str:
    """Return the reason why a mesh cannot do the job with any settings; empty if it may."""
    if job.trains and job.global_batch % mesh.data:
        if mesh.data > job.global_batch:
            idle = mesh.data - job.global_batch
            return (
                f"{idle} of {mesh.data} data ranks would be idle: global_batch={job.global_batch}"
            )
        return f"global_batch={job.global_batch} does not divide by {mesh.data} data ranks"
    return ""
