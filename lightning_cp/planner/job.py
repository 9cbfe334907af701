"""Input of the planner: a job (model, devices, sequences), and one method of training it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from lightning_cp.errors import ConfigError
from lightning_cp.layout import HeadSplit, SequenceLayout
from lightning_cp.layout.axes import FLATTENED, Axis, Flat
from lightning_cp.planner.machines import Machine
from lightning_cp.planner.model import Model

PRECISIONS = {
    "bf16-mixed": (4, 2),
    "bf16-true": (2, 2),
    "fp32": (4, 4),
}
"""Bytes of the optimizer's parameters, and of the compute dtype."""
OPTIMIZERS = {"adamw": 2, "momentum": 1, "sgd": 0, "none": 0}
"""State tensors per parameter. ``none``: the model is loaded, and not trained."""


@dataclass(frozen=True)
class Job:
    """One training step of ``global_batch`` sequences."""

    model: Model
    machine: Machine
    devices: int
    seq_len: int
    global_batch: int
    precision: str = "bf16-mixed"
    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        for name in ("devices", "seq_len", "global_batch"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(
                    f"{name} must be an integer of at least 1, got {value!r}. Set it to 1 or more."
                )
        for name, known in (("precision", PRECISIONS), ("optimizer", OPTIMIZERS)):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}. "
                    "Choose one of these."
                )

        if self.precision == "fp32" and self.trains and not self.machine.float32_flops:
            others = ", ".join(name for name in PRECISIONS if name != "fp32")
            raise ConfigError(
                f"precision=fp32: of {self.machine.name} no peak in float32 is published, so nothing can be "
                f"timed. What would work: {others}; or optimizer=none, which only loads."
            )

    @cached_property
    def timed(self) -> Machine:
        """The machine with its rates in the compute dtype."""
        return self.machine.in_float32 if self.precision == "fp32" else self.machine

    @property
    def itemsize(self) -> int:
        """Bytes of a parameter between steps."""
        return PRECISIONS[self.precision][0]

    @property
    def compute_itemsize(self) -> int:
        """Bytes of the compute dtype."""
        return PRECISIONS[self.precision][1]

    @property
    def reduced_itemsize(self) -> int:
        """Bytes of a gradient's entry in reductions: those of a parameter, float32 unless these have less."""
        return self.itemsize

    @property
    def trains(self) -> bool:
        """True if the job trains; else it only loads the model."""
        return self.optimizer != "none"

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.seq_len * self.global_batch


def devices_per_node(devices: int, most: int) -> int:
    """Return devices per node, for the fewest nodes with equally many, as a Trainer requires."""
    return max(n for n in range(1, min(devices, most) + 1) if devices % n == 0)


@dataclass(frozen=True)
class MeshSizes:
    """Sizes of the axes, outer to inner."""

    dp_replicate: int = 1
    dp_shard: int = 1
    ring: int = 1
    ulysses: int = 1
    tp: int = 1

    @property
    def by_axis(self) -> dict[Axis, int]:
        """Sizes by axis, in order."""
        return {axis: getattr(self, axis.value) for axis in Axis}

    @property
    def devices(self) -> int:
        """All ranks."""
        return math.prod(self.by_axis.values())

    @property
    def cp(self) -> int:
        """Ranks that share a sequence."""
        return self.ring * self.ulysses

    @property
    def data(self) -> int:
        """Groups of ranks with different sequences."""
        return self.dp_replicate * self.dp_shard

    def size(self, axis: Axis | Flat) -> int:
        """Return the ranks of an axis or of a flattened group."""
        axes = FLATTENED[axis] if isinstance(axis, Flat) else (axis,)
        return math.prod(getattr(self, one.value) for one in axes)

    def crosses_nodes(self, axis: Axis | Flat, devices_per_node: int) -> bool:
        """Return True if some group of an axis spans nodes; ranks fill one node after the other."""
        axes = list(FLATTENED[axis] if isinstance(axis, Flat) else (axis,))
        order = list(Axis)
        inner = math.prod(self.by_axis[one] for one in order[order.index(axes[-1]) + 1 :])
        reach = inner * self.size(axis)
        return self.size(axis) > 1 and bool(devices_per_node % reach)

    def __str__(self) -> str:
        return " x ".join(f"{axis.value} {size}" for axis, size in self.by_axis.items() if size > 1)


@dataclass(frozen=True)
class TrainingMethod:
    """One method of training: a mesh, an engine, and the settings that trade memory for time."""

    mesh: MeshSizes
    engine: str = "fsdp"
    exchange: str = "ring"
    """``ring``, ``rotation`` or ``all_gather``."""
    checkpointing: str = "none"
    """``none``, ``blocks`` or ``keep_attention``."""
    offload: bool = False
    chunked_loss: int = 0
    """Tokens of a chunk; 0: off."""
    tiled_mlp: int = 0
    """Tokens of a tile; 0: off."""

    @property
    def mode(self) -> str:
        """The strategy's name of the mode."""
        ring, ulysses = self.mesh.ring > 1, self.mesh.ulysses > 1
        if ring and self.exchange == "all_gather":
            return "zigzag_llama3"
        return "hybrid" if ring and ulysses else "ring" if ring else "ulysses"

    @property
    def shard_ranks(self) -> int:
        """Ranks over which a parameter's rows are sharded."""
        if self.engine == "ddp":
            return 1
        return self.mesh.size(Flat.LOSS if self.engine == "zero1" else Flat.FSDP)


@dataclass(frozen=True)
class PlanCase:
    """A job, and one method of training it."""

    job: Job
    choice: TrainingMethod

    @cached_property
    def layout(self) -> SequenceLayout:
        """Layout of each sequence."""
        mesh = self.choice.mesh
        kind = "zigzag" if mesh.ring > 1 else "contiguous"  # of one causal document
        return SequenceLayout(self.job.seq_len, mesh.ring, mesh.ulysses, kind)

    @cached_property
    def heads(self) -> HeadSplit:
        """Heads of a tensor-parallel rank, split over Ulysses ranks."""
        model, mesh = self.job.model, self.choice.mesh
        return HeadSplit(model.heads // mesh.tp, model.kv_heads // mesh.tp, mesh.ulysses)

    @property
    def devices_per_node(self) -> int:
        """Ranks of each node: as many as fit, and the same number on all."""
        return devices_per_node(self.choice.mesh.devices, self.job.machine.devices_per_node)

    def crosses_nodes(self, axis: Axis | Flat) -> bool:
        """Return True if some group of an axis spans nodes."""
        return self.choice.mesh.crosses_nodes(axis, self.devices_per_node)

    @property
    def local_tokens(self) -> int:
        """Tokens of a sequence on each rank, padding included."""
        return self.layout.local_len

    @property
    def sequences(self) -> int:
        """Sequences that a data rank processes in a step, one after the other."""
        return -(-self.job.global_batch // self.choice.mesh.data)
