"""What a rank holds at its fullest, by kind."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from lightning_cp.planner.activations import kept_per_layer
from lightning_cp.planner.attention import AttentionCost
from lightning_cp.planner.job import OPTIMIZERS, Case
from lightning_cp.planner.machines import GIB
from lightning_cp.planner.model import Model, Parameter, Shape
from lightning_cp.planner.moments import Moment, optimizer_moment, peak
from lightning_cp.planner.rank_step import rank_step
from lightning_cp.planner.state import ModelShapes, StateBytes, state_bytes


@dataclass(frozen=True)
class Memory:
    """Bytes of one device."""

    parameters: int
    """Between steps."""
    optimizer: int
    moment: Moment
    """The fullest one of a step, with what is there beside."""
    accumulated: int
    """Gradients of sequences before, whole."""
    reserve: int
    capacity: int
    loading: int
    """The most while a checkpoint is read: the rank's part, and the largest tensor's on its way."""
    host: int
    """Of the host, for each device."""
    host_capacity: int

    @property
    def by_kind(self) -> dict[str, int]:
        """What is there at once, at the fullest moment of a step, without the reserve."""
        now = self.moment
        return {
            "parameters": self.parameters,
            "optimizer": self.optimizer,
            "gathered parameters": now.gathered,
            "gradients": now.gradients + self.accumulated,
            "buffers of reductions": now.buffers,
            "activations": now.layers + now.beside + now.working + now.batch,
            "optimizer's temporaries": now.temporaries,
            "attention buffers": now.attention,
            "logits and loss": now.loss,
        }

    @property
    def total(self) -> int:
        """At the fullest moment of a step, with the reserve."""
        return sum(self.by_kind.values()) + self.reserve

    @property
    def missing(self) -> int:
        """Bytes that do not fit, on the device or its host; negative: bytes that are free."""
        device = self.fullest - self.capacity
        return max(device, self.host - self.host_capacity) if self.host else device

    @property
    def fullest(self) -> int:
        """Of a step, or of loading where that needs more."""
        return max(self.total, self.loading + self.reserve)

    @property
    def why(self) -> str:
        """Which bytes do not fit, largest first."""
        if self.host and self.missing == self.host - self.host_capacity:
            sizes = f"{self.host / GIB:,.1f} of {self.host_capacity / GIB:,.1f} a device"
            return f"{self.missing / GIB:,.1f} GiB too much in host memory: {sizes}"
        kinds = self.by_kind
        if self.fullest > self.total:
            kinds = {"parameters": self.parameters, "on its way": self.loading - self.parameters}
        largest = sorted(kinds.items(), key=lambda item: -item[1])[:3]
        shown = ", ".join(f"{kind} {size / GIB:,.1f}" for kind, size in largest if size)
        when = " while a checkpoint is loaded" if self.fullest > self.total else ""
        sizes = f"{self.fullest / GIB:,.1f} of {self.capacity / GIB:,.1f}{when}"
        return f"{self.missing / GIB:,.1f} GiB too much: {sizes} ({shown})"


def between_steps(case: Case) -> Memory:
    """What is there all the time; where the model is loaded only, all that there is."""
    job, choice, machine = case.job, case.choice, case.job.machine
    state = rank_state(case, 0)
    largest = _largest_part(job.model, choice.shard_ranks, choice.mesh.tp) * job.itemsize
    return Memory(
        state.parameters,
        state.optimizer if job.trains else 0,
        Moment("between steps"),
        0,
        machine.reserve,
        machine.memory,
        state.parameters + largest,
        0,
        machine.host_memory,
    )


def memory_of(case: Case, attention: Mapping[int | None, AttentionCost]) -> Memory:
    """The fullest moment of a step of a case; without ``attention``, what it is at least."""
    held = between_steps(case)
    if not case.job.trains:
        return held
    calls = [cost.memory for cost in attention.values()] or [(0, 0)]
    step = rank_step(case, (max(one[0] for one in calls), max(one[1] for one in calls)))
    stepping = optimizer_moment(step)
    if not case.job.machine.is_cpu:  # as many tensors at once
        stepping = replace(stepping, temporaries=held.parameters)
    moment = max(peak(step), stepping, key=lambda one: one.total)
    kept = kept_per_layer(step) * step.tokens * len(case.job.model.layers)
    host = kept if case.choice.offload else 0
    return replace(held, moment=moment, accumulated=_accumulated(case), host=host)


def _accumulated(case: Case) -> int:
    """Engines that shard leave gradients whole until the last sequence; ``ddp`` has them whole anyway."""
    if case.sequences == 1 or case.choice.engine == "ddp":
        return 0
    return _entries(case.job.model, case.choice.mesh.tp) * case.job.reduced_itemsize


def rank_state(case: Case, rank: int) -> StateBytes:
    """Parameters, gradients and optimizer state of a rank of the mesh; the first one has the most."""
    job, choice = case.job, case.choice
    cut, tp = choice.shard_ranks, choice.mesh.tp
    place = rank // tp % cut  # copies, where there are any, lie outside
    return _state(job.model, choice.engine, place, cut, tp, job.itemsize, OPTIMIZERS[job.optimizer])


@lru_cache(maxsize=4096)
def _state(
    model: Model, engine: str, rank: int, ranks: int, tp_size: int, itemsize: int, states: int
) -> StateBytes:
    """States are as wide as parameters."""
    sizes = {"itemsize": itemsize, "states": states, "state_itemsize": itemsize}
    return state_bytes(local_shapes(model, tp_size), engine, rank=rank, ranks=ranks, **sizes)


@lru_cache(maxsize=64)
def local_shapes(model: Model, tp_size: int) -> ModelShapes:
    """What a tensor-parallel rank has of each parameter."""

    def local(parameters: tuple[Parameter, ...]) -> tuple[Shape, ...]:
        return tuple(one.local_shape(tp_size) for one in parameters)

    return ModelShapes(
        local(model.before),
        tuple(local(layer.parameters) for layer in model.layers),
        local(model.after),
    )


@lru_cache(maxsize=64)
def _entries(model: Model, tp_size: int) -> int:
    """Of all parameters, as a tensor-parallel rank has them."""
    shapes = local_shapes(model, tp_size)
    own = sum(math.prod(shape) for shape in (*shapes.before, *shapes.after))
    return own + sum(math.prod(shape) for block in shapes.blocks for shape in block)


@lru_cache(maxsize=1024)
def _largest_part(model: Model, ranks: int, tp_size: int) -> int:
    """Entries of the largest part of a tensor that a rank reads at once."""
    shapes = local_shapes(model, tp_size)
    each = {*shapes.before, *shapes.blocks[0], *shapes.after}
    return max(-(-shape[0] // ranks) * math.prod(shape[1:]) for shape in each)
