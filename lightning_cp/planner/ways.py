"""All ways of doing a job: meshes of its devices, engines, and the settings that each of them takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd
from typing import TypeVar

from lightning_cp.axes import Axis
from lightning_cp.errors import ConfigError
from lightning_cp.planner.job import Choice, Job, MeshSizes, devices_per_node

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


def nothing_of(job: Job, limits: Limits) -> str:
    """What is said where no mesh is left."""
    pinned = ", ".join(f"{axis}={size}" for axis, size in limits.mesh.items() if size is not None)
    asked = f"{pinned or 'no axis set'}, engine {limits.engine or 'any'}"
    per_node = devices_per_node(job.devices, job.machine.devices_per_node)
    return (
        f"no mesh of {job.devices} devices has {asked}. tp can be one of {list(job.model.tp_sizes)} within "
        f"a node of {per_node}, ulysses a divisor of {job.model.heads} heads / tp, and all sizes multiply to "
        "the devices. Leave an axis out, or change devices."
    )
