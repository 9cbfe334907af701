"""What a rank holds at its fullest, by kind."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from lightning_cp.planner.activations import (
    kept_beside,
    kept_by_loss,
    kept_per_layer,
    layer_bytes,
)
from lightning_cp.planner.attention import AttentionCost
from lightning_cp.planner.job import OPTIMIZERS, Case
from lightning_cp.planner.machines import GIB
from lightning_cp.planner.model import Model, Parameter, Shape
from lightning_cp.planner.rank_step import rank_step
from lightning_cp.planner.state import ModelShapes, StateBytes, state_bytes
from lightning_cp.planner.wire import REDUCED


@dataclass(frozen=True)
class Memory:
    """Bytes of one device."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    """Parameters that are whole for a while: the model's own, of a block, and of the next."""
    unreduced: int
    """Gradients that are whole for a while, and buffers of their reduction."""
    activations: int
    """What forward keeps for backward, and a block's own while it is computed."""
    attention: int
    """Buffers of an attention call: keys that travel, accumulators."""
    logits: int
    reserve: int
    capacity: int
    loading: int
    """The most while a checkpoint is read: the rank's part, and the largest tensor's on its way."""
    host: int
    """Of the host, for each device."""
    host_capacity: int

    @property
    def by_kind(self) -> dict[str, int]:
        """What is there at once in a step, without the reserve."""
        return {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "gathered parameters": self.gathered,
            "unreduced gradients": self.unreduced,
            "activations": self.activations,
            "attention buffers": self.attention,
            "logits": self.logits,
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
        shown = ", ".join(f"{kind} {size / GIB:,.1f}" for kind, size in largest)
        when = " while a checkpoint is loaded" if self.fullest > self.total else ""
        sizes = f"{self.fullest / GIB:,.1f} of {self.capacity / GIB:,.1f}{when}"
        return f"{self.missing / GIB:,.1f} GiB too much: {sizes} ({shown})"


def memory_of(case: Case, attention: Mapping[int | None, AttentionCost]) -> Memory:
    """The fullest moment of a step of a case."""
    job, choice, model = case.job, case.choice, case.job.model
    tp, tokens, e = choice.mesh.tp, case.local_tokens, case.job.compute_itemsize
    cut = choice.shard_ranks
    state = rank_state(case, 0)
    loading = state.parameters + _largest_part(model, cut, tp) * job.itemsize
    machine = job.machine
    fixed = (machine.reserve, machine.memory, loading)
    if not job.trains:
        return Memory(state.parameters, 0, 0, 0, 0, 0, 0, 0, *fixed, 0, machine.host_memory)
    entries = _entries(model, tp)
    gathered = unreduced = 0
    if choice.engine != "ddp":
        gathered = (
            entries.whole if choice.engine == "zero1" else entries.own + 2 * entries.block
        ) * e
        unreduced = (entries.own + entries.block) * e + entries.block * REDUCED
        if case.sequences > 1:
            unreduced = entries.whole * REDUCED
    step = rank_step(case)
    layers = kept_per_layer(step) * tokens * len(model.layers)
    host = layers if choice.offload else 0
    beside = kept_beside(step) - kept_by_loss(step)
    activations = (0 if choice.offload else layers) + beside * tokens
    if choice.checkpointing != "none":
        activations += layer_bytes(step).total * tokens
    logits = 12 * min(choice.chunked_loss or tokens, tokens) * model.vocabulary // tp
    return Memory(
        state.parameters,
        state.gradients,
        state.optimizer,
        gathered,
        unreduced,
        activations,
        max(max(cost.memory) for cost in attention.values()),
        logits,
        *fixed,
        host,
        machine.host_memory,
    )


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


@dataclass(frozen=True)
class _Entries:
    own: int
    """Of the model's own parameters: before and after its layers."""
    block: int
    whole: int


@lru_cache(maxsize=64)
def _entries(model: Model, tp_size: int) -> _Entries:
    shapes = local_shapes(model, tp_size)
    own = sum(math.prod(shape) for shape in (*shapes.before, *shapes.after))
    blocks = [sum(map(math.prod, block)) for block in shapes.blocks]
    return _Entries(own, max(blocks), own + sum(blocks))


@lru_cache(maxsize=1024)
def _largest_part(model: Model, ranks: int, tp_size: int) -> int:
    """Entries of the largest part of a tensor that a rank reads at once."""
    shapes = local_shapes(model, tp_size)
    each = {*shapes.before, *shapes.blocks[0], *shapes.after}
    return max(-(-shape[0] // ranks) * math.prod(shape[1:]) for shape in each)
