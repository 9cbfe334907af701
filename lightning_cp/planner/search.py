"""Of all ways of doing a job those that fit a device, fastest first, and why the others do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_cp.errors import ConfigError
from lightning_cp.planner.attention import AttentionCost, attention_cost
from lightning_cp.planner.job import Case, Job, MeshSizes
from lightning_cp.planner.memory import Memory, memory_of
from lightning_cp.planner.seconds import Seconds, step_seconds
from lightning_cp.planner.ways import ENGINES, Limits, meshes, nothing_of, settings


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
    per_pair = job.model.heads * job.model.flops_per_pair
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
        raise ConfigError(nothing_of(job, limits))
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
