"""Verification of the best plan against the code that would run it, without devices: groups and state bytes.

One process plays a rank of a world of any size: its groups are real, and nothing is sent. The expected ranks
of a group are computed here, without a mesh. The model is built without values on the meta device and sharded
there by the training engines, so all sizes are PyTorch's own, for the real number of ranks and parameters.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from math import prod
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_cp.apps.plan.settings import hf_config
from lightning_cp.apps.train.model import model_on_meta
from lightning_cp.comm.groups import FAKE
from lightning_cp.config import StrategyConfig
from lightning_cp.engines.base import engine as engine_of
from lightning_cp.engines.checks import DTYPES
from lightning_cp.engines.ddp_comm_hook import CommHook
from lightning_cp.engines.fsdp_internals import groups_of
from lightning_cp.errors import ConfigError
from lightning_cp.layout.axes import FLATTENED, Axis, Flat
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.planner.memory import rank_state
from lightning_cp.planner.search import MethodPlan
from lightning_cp.planner.state import StateBytes
from lightning_cp.strategies.validation import check
from lightning_cp.utils.console import markdown_table, quiet_lightning
from lightning_cp.utils.dtensor import local_part

CONTROL: dict[Flat, tuple[Axis, ...]] = {
    Flat.CP: (*FLATTENED[Flat.CP], Axis.TP),
    Flat.LOSS: tuple(Axis),
}
"""The axes that control groups span; tensor-parallel ranks are included."""


@dataclass(frozen=True)
class GroupRanks:
    """One group of one rank."""

    name: str
    expected: tuple[int, ...]
    found: tuple[int, ...]

    @property
    def agrees(self) -> bool:
        """True if the group has the expected ranks in the expected order."""
        return self.expected == self.found


def group_ranks(
    mesh: ContextParallelMesh, sizes: Mapping[Axis, int], rank: int
) -> tuple[GroupRanks, ...]:
    """Return every group of a rank's mesh, with its expected ranks.

    Args:
        mesh: the rank's mesh.
        sizes: sizes of the axes; 1 by default.
        rank: the rank.
    """
    groups = {str(axis): (mesh.group(axis), (axis,)) for axis in Axis}
    groups |= {str(flat): (mesh.group(flat), axes) for flat, axes in FLATTENED.items()}
    groups |= {f"control {flat}": (mesh.control_group(flat), CONTROL[flat]) for flat in CONTROL}
    return tuple(
        GroupRanks(name, ranks_along(sizes, rank, axes), tuple(dist.get_process_group_ranks(group)))
        for name, (group, axes) in groups.items()
    )


def ranks_along(sizes: Mapping[Axis, int], rank: int, axes: Iterable[Axis]) -> tuple[int, ...]:
    """Return the ranks whose coordinates equal those of ``rank`` except on ``axes``, in order."""
    elsewhere = [axis for axis in Axis if axis not in tuple(axes)]
    own, ranks = coordinates(sizes, rank), math.prod(sizes.values())
    every = ((other, coordinates(sizes, other)) for other in range(ranks))
    return tuple(r for r, there in every if all(there[axis] == own[axis] for axis in elsewhere))


def coordinates(sizes: Mapping[Axis, int], rank: int) -> dict[Axis, int]:
    """Return a rank's coordinate on each axis; ranks count through the innermost axis first."""
    found: dict[Axis, int] = {}
    for axis in reversed(Axis):
        rank, found[axis] = divmod(rank, sizes.get(axis, 1))
    return found


@contextmanager
def fake_world(sizes: Mapping[Axis, int], rank: int) -> Iterator[ContextParallelMesh]:
    """Make this process ``rank`` of a world with these axis sizes for the block; yield its mesh.

    Collectives return at once and leave their tensors unchanged, so values must not be computed here.

    Args:
        sizes: sizes of the axes; 1 by default.
        rank: the rank to play.

    Raises:
        ConfigError: this process is already in a process group, or the rank does not exist.
    """
    if dist.is_initialized():
        raise ConfigError(
            f"a fake world needs a separate process, but this one is rank {dist.get_rank()} of a process "
            f"group of {dist.get_world_size()} ({dist.get_backend()}). Start another process for it, or "
            "call torch.distributed.destroy_process_group() first."
        )
    ranks = math.prod(sizes.values())
    if not 0 <= rank < ranks:
        raise ConfigError(
            f"rank must be from 0 to {ranks - 1}, as there are {ranks}, got {rank}. "
            "Name one of these ranks."
        )
    # Imported here because the import registers the backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(FAKE, store=FakeStore(), world_size=ranks, rank=rank)
    try:
        mesh = _mesh(sizes)
        try:
            yield mesh
        finally:
            mesh.destroy()
    finally:
        dist.destroy_process_group()


def _mesh(sizes: Mapping[Axis, int]) -> ContextParallelMesh:
    return ContextParallelMesh(
        ring_size=sizes.get(Axis.RING, 1),
        ulysses_size=sizes.get(Axis.ULYSSES, 1),
        data_parallel_replicate_size=sizes.get(Axis.DP_REPLICATE, 1),
        data_parallel_shard_size=sizes.get(Axis.DP_SHARD, 1),
        tensor_parallel_size=sizes.get(Axis.TP, 1),
    )


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "none": partial(torch.optim.SGD, lr=1e-3),
}
FILES = "model.safetensors"
"""A stand-in source of weights. Without one, engines draw values, which would need memory."""


@dataclass(frozen=True)
class ParameterShard:
    """A rank's shard of one parameter."""

    name: str
    shape: tuple[int, ...]
    """Shape of the shard."""
    nbytes: int
    """Bytes of memory, padding rows included."""
    cut_by: tuple[Axis, ...]
    """The axes that shard it, outer to inner."""


@dataclass(frozen=True)
class MeasuredState:
    """Bytes of memory that one rank holds, counted as in ``planner.state``.

    FSDP2 allocates the same number of rows on every rank, so the parameters and gradients of the last ranks
    include padding rows; optimizer state does not. Not counted: buffers of the model, and AdamW's step
    counts, one number for each parameter on the CPU.
    """

    rank: int
    parameter_count: int
    """Parameters of the whole model; tied ones count once."""
    parameters: int
    """Bytes between steps."""
    gradients: int
    """Bytes from the end of backward to the optimizer's step."""
    optimizer: int
    largest: tuple[ParameterShard, ...]
    """The parameters with the most memory, the largest first."""
    whole: tuple[ParameterShard, ...]
    """The parameters that no axis shards, the largest first."""


def measured_groups(sizes: Mapping[Axis, int], rank: int) -> tuple[GroupRanks, ...]:
    """Return every group of a rank, as the mesh makes them in a world of that size, with its expected ranks.

    Args:
        sizes: sizes of the axes; 1 by default.
        rank: the rank.

    Raises:
        ConfigError: this process is in a process group, or the rank does not exist.
    """
    with fake_world(sizes, rank) as mesh:
        return group_ranks(mesh, sizes, rank)


def measured_state(
    config: Mapping[str, Any],
    sizes: Mapping[Axis, int],
    engine: str,
    rank: int,
    *,
    dtype: str = "float32",
    optimizer: str = "adamw",
    tensor_parallel_plan: Any = None,
    wrap_modules: str | Sequence[str] | None = None,
    largest: int = 8,
) -> MeasuredState:
    """Measure a rank's share of a Hugging Face model's parameters, gradients and optimizer state.

    Args:
        config: the content of a ``config.json``.
        sizes: sizes of the axes; 1 by default.
        engine: ``ddp``, ``fsdp``, ``hsdp`` or ``zero1``.
        rank: a rank of the world that the sizes make.
        dtype: dtype of parameters, gradients and the optimizer's state.
        optimizer: one of ``OPTIMIZERS``.
        tensor_parallel_plan: the strategies' argument.
        wrap_modules: the strategies' argument.
        largest: the number of parameters to name.

    Raises:
        ConfigError: invalid settings, axes that the engine does not have, a model that tensor parallelism
            cannot shard, or a process group in this process.
    """
    settings = _settings(sizes, engine, tensor_parallel_plan, wrap_modules)
    known = DTYPES.get(dtype)
    if known is None:
        raise ConfigError(
            f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}. Choose one of these."
        )
    with fake_world(sizes, rank) as mesh:
        model = model_on_meta(config, known)
        count = sum(p.numel() for p in model.parameters())
        _shard(model, mesh, settings)
        parameters = list(model.parameters())
        _give_gradients(model)
        stepped = OPTIMIZERS[optimizer](parameters)
        stepped.step()
        gradients = [p.grad for p in parameters if p.grad is not None]
        states = stepped.state.values()
        held = [_parameter_shard(name, p, mesh) for name, p in model.named_parameters()]
        held.sort(key=lambda each: -each.nbytes)
        return MeasuredState(
            rank=rank,
            parameter_count=count,
            parameters=_memory(parameters),
            gradients=_memory(gradients),
            optimizer=_memory(_tensors_of(states)),
            largest=tuple(held[:largest]),
            whole=tuple(each for each in held if not each.cut_by),
        )


def _settings(
    sizes: Mapping[Axis, int], engine: str, plan: Any, wrap_modules: str | Sequence[str] | None
) -> StrategyConfig:
    """Return settings of a run that loads its model from files, so that it stays on the meta device."""
    axes = (sizes.get(Axis.DP_REPLICATE, 1), sizes.get(Axis.DP_SHARD, 1))
    settings = StrategyConfig(
        data_parallel=engine,
        data_parallel_size=prod(axes),
        data_parallel_replicate_size=axes[0] if engine == "hsdp" else 1,
        ring_size=sizes.get(Axis.RING, 1),
        ulysses_size=sizes.get(Axis.ULYSSES, 1),
        tensor_parallel_size=sizes.get(Axis.TP, 1),
        tensor_parallel_plan=plan,
        wrap_modules=wrap_modules,
    )
    check(settings)
    if settings.data_parallel_axes != axes:
        replicate, shard = settings.data_parallel_axes
        raise ConfigError(
            f"data_parallel={engine!r} with {prod(axes)} data-parallel ranks makes a mesh of "
            f"dp_replicate={replicate} x dp_shard={shard}, got dp_replicate={axes[0]} x dp_shard={axes[1]}. "
            "Give the axes these sizes."
        )
    return replace(settings, pretrained=FILES)


def _shard(model: nn.Module, mesh: ContextParallelMesh, settings: StrategyConfig) -> None:
    """Shard as training does; DDP is skipped: it changes no parameter and refuses models without values."""
    engine = engine_of(settings, CommHook())
    if engine.shards:
        engine.wrap(model, mesh, torch.device(mesh.device_type), {})


def _give_gradients(model: nn.Module) -> None:
    """Give parameters gradients as after a backward, sharded like the parameters."""
    for group in groups_of(model):
        group.allocate_gradients()
    for p in model.parameters():
        if p.requires_grad and p.grad is None:
            p.grad = torch.empty_like(p)


def _tensors_of(states: Iterable[Mapping[str, Any]]) -> Iterator[torch.Tensor]:
    """Yield the optimizer's state tensors that are sized like parameters."""
    for state in states:
        yield from (x for key, x in state.items() if key != "step" and x is not None)


def _parameter_shard(
    name: str, parameter: nn.Parameter, mesh: ContextParallelMesh
) -> ParameterShard:
    own = local_part(parameter)
    cut_by = {axis for name in _cutting(parameter) for axis in _axes(name) if mesh.sizes[axis] > 1}
    return ParameterShard(
        name, tuple(own.shape), _memory([own]), tuple(axis for axis in Axis if axis in cut_by)
    )


def _cutting(parameter: nn.Parameter) -> list[str]:
    """Return the names of the axes and groups that shard a parameter."""
    data = parameter.data
    if not isinstance(data, DTensor):
        return []
    names = data.device_mesh.mesh_dim_names or ()
    # is_shard() is False for a dimension that two axes shard, so it cannot be used.
    return [
        name
        for name, placed in zip(names, data.placements, strict=True)
        if not placed.is_replicate()
    ]


def _axes(name: str) -> tuple[Axis, ...]:
    return FLATTENED[Flat(name)] if name in set(Flat) else (Axis(name),)


def _memory(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of this rank's storages, each counted once."""
    storages = [local_part(x).untyped_storage() for x in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


WITHIN = 0.01
"""Largest relative error of a prediction."""
KINDS = ("parameters", "gradients", "optimizer")
HEAD = ("rank", "bytes of", "predicted", "measured", "ratio")
DTYPE_OF_ITEMSIZE = {4: "float32", 2: "bfloat16"}


def verify(plan: MethodPlan, config: Mapping[str, Any]) -> bool:
    """Shard the model as training would, for the first rank and the last, and print the comparison.

    Args:
        plan: the chosen plan.
        config: the whole config, whose ``model.network.config`` is built without values.

    Returns:
        True if all groups and bytes are as predicted.
    """
    with quiet_lightning():
        return _verify(plan, config)


def _verify(plan: MethodPlan, config: Mapping[str, Any]) -> bool:
    began = time.monotonic()
    mesh, engine = plan.case.choice.mesh, plan.case.choice.engine
    ranks = sorted({0, mesh.devices - 1})
    groups = [group for rank in ranks for group in measured_groups(mesh.by_axis, rank)]
    print(
        f"\nVerified without devices: {mesh.devices:,} rank{'s' * (mesh.devices > 1)}, "
        f"{engine}; of {' and '.join(map(str, ranks))}.\n"
    )
    print(f"{_of_groups(groups)}\n")
    rows: list[list[str]] = []
    good = all(group.agrees for group in groups)
    for rank in ranks:
        job = plan.case.job
        found = measured_state(
            *(hf_config(config["model"]), mesh.by_axis, engine, rank),
            dtype=DTYPE_OF_ITEMSIZE[job.itemsize],
            optimizer=job.optimizer,
        )
        good &= found.parameter_count == job.model.num_parameters
        wanted = rank_state(plan.case, rank)
        rows += _rows(rank, wanted, found, trains=job.trains)
        good &= all(abs(float(row[-1]) - 1) <= WITHIN for row in rows)
        if rank == 0:
            print(f"{_of_tensors(found, plan)}\n")
    print(markdown_table(HEAD, rows))
    print(
        f"\n{'as predicted' if good else 'NOT as predicted'}, in {time.monotonic() - began:.0f} s"
    )
    return good


def verify_steps(config: Mapping[str, Any]) -> bool:
    """Run real steps of small models on CPU and compare memory, and CPU-seconds with a measured ``hardware``.

    This takes tens of minutes.

    Returns:
        True if all cells are within their bounds.
    """
    cost, memory = _validation("cost"), _validation("memory")
    from lightning_cp.planner.hardware import Hardware
    from lightning_cp.planner.machines import MACHINES

    table, good = memory.verify()
    print(f"\nPeaks of real steps on CPU ranks, in bytes of tensors:\n\n{table}")
    if config["hardware"] in MACHINES:
        print("\nCPU-seconds were not compared: hardware= is not a file measured here.")
        return good
    cells = cost.measured_cost(Hardware.load(config["hardware"]))
    print(f"\n{cost.table_of(cells)}\n\n{cost.summary_of(cells)}")
    return good and cost.as_asked(cells)


def _validation(study: str) -> ModuleType:
    """Import a study that compares predictions with real steps.

    Raises:
        ConfigError: the studies are missing, because only a checkout has them, not the wheel.
    """
    try:
        return import_module(f"benchmarks.plan_validation.{study}")
    except ModuleNotFoundError as missing:
        if not str(missing.name).startswith("benchmarks"):
            raise
        raise ConfigError(
            "verify=all compares real steps, which an installed package does not bring. Run it in "
            "a checkout of this project, or take verify=true."
        ) from missing


def _of_groups(groups: list[GroupRanks]) -> str:
    wrong = [group for group in groups if not group.agrees]
    if not wrong:
        return f"Process groups: all {len(groups)} hold the ranks that they have to."
    lines = [f"  {g.name}: {list(g.found)}, not {list(g.expected)}" for g in wrong]
    return "Process groups that hold other ranks:\n" + "\n".join(lines)


def _of_tensors(found: MeasuredState, plan: MethodPlan) -> str:
    counted, known = found.parameter_count, plan.case.job.model.num_parameters
    same = "as many as" if counted == known else f"NOT the {known:,} that"
    lines = [f"{counted:,} parameters, {same} the planner counts. Largest parts of the first rank:"]
    lines += [
        f"  {held.name} {list(held.shape)}: {held.nbytes / (1 << 20):,.2f} MiB, cut by "
        f"{', '.join(held.cut_by) or 'no axis'}"
        for held in found.largest[:5]
    ]
    if found.whole:
        lines.append(f"No axis cuts {len(found.whole)} of them, such as {found.whole[0].name}.")
    return "\n".join(lines)


def _rows(
    rank: int, wanted: StateBytes, found: MeasuredState, *, trains: bool
) -> Iterator[list[str]]:
    for kind in KINDS if trains else KINDS[:1]:
        predicted, measured = getattr(wanted, kind), getattr(found, kind)
        ratio = predicted / measured if measured else float(predicted == measured)
        yield [str(rank), kind, f"{predicted:,}", f"{measured:,}", f"{ratio:.4f}"]
