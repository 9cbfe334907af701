"""What one rank of a run holds of a model's state, counted in the model as training shards it.

The model has no values: it is built on the meta device, and the engines that train shard it there, in a
world of one process. So all sizes are PyTorch's own, of as many ranks and parameters as there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_cp.axes import FLATTENED, Axis, Flat
from lightning_cp.comm.local import local_part
from lightning_cp.errors import ConfigError
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.plan.fake_world import fake_world
from lightning_cp.plan.group_ranks import GroupRanks, group_ranks
from lightning_cp.strategies.arguments.check import check
from lightning_cp.strategies.arguments.settings import Settings
from lightning_cp.strategies.engines import engine as engine_of
from lightning_cp.strategies.engines.checks import DTYPES
from lightning_cp.strategies.engines.comm_hooks import CommHook
from lightning_cp.strategies.engines.torch_fsdp2 import groups_of
from lightning_cp.train.networks import model_on_meta

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "none": partial(torch.optim.SGD, lr=1e-3),
}
FILES = "model.safetensors"
"""Where the weights would come from. Without any, engines draw values, for which there would be no memory."""


@dataclass(frozen=True)
class HeldParameter:
    """What a rank holds of one parameter."""

    name: str
    shape: tuple[int, ...]
    """Of its part."""
    nbytes: int
    """Of memory, with rows that only other ranks have."""
    cut_by: tuple[Axis, ...]
    """The axes that shard it, outer to inner."""


@dataclass(frozen=True)
class MeasuredState:
    """Bytes of memory that one rank holds, as ``planner.state`` counts them.

    FSDP2 takes memory for the same number of rows on every rank, so the parameters and gradients of the last
    ranks include rows that are not there; optimizer state does not. Not counted: buffers of the model, and
    AdamW's counts of steps, a number for each parameter on the CPU.
    """

    rank: int
    parameter_count: int
    """Of the whole model; tied ones once."""
    parameters: int
    """Between steps."""
    gradients: int
    """From the end of backward to the optimizer's step."""
    optimizer: int
    largest: tuple[HeldParameter, ...]
    """Those that take most of its memory, the largest first."""
    whole: tuple[HeldParameter, ...]
    """Those that no axis shards, the largest first."""


def measured_groups(sizes: Mapping[Axis, int], rank: int) -> tuple[GroupRanks, ...]:
    """Every group of a rank, as our mesh makes them in a world of that size, with what it should hold.

    Args:
        sizes: of the axes; 1 where one is left out.
        rank: whose groups they are.

    Raises:
        ConfigError: this process is in a process group, or there is no such rank.
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
    """What a rank holds of a Hugging Face model's parameters, gradients and optimizer state.

    Args:
        config: the content of a ``config.json``.
        sizes: of the axes; 1 where one is left out.
        engine: ``ddp``, ``fsdp``, ``hsdp`` or ``zero1``.
        rank: of as many as the sizes multiply to.
        dtype: of parameters, gradients and the optimizer's state.
        optimizer: one of ``OPTIMIZERS``.
        tensor_parallel_plan: as the strategies' argument.
        wrap_modules: likewise.
        largest: how many parameters to name.

    Raises:
        ConfigError: settings that no run can have, axes that the engine does not have, a model that tensor
            parallelism cannot share, or a process group in this process.
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
        held = [_held(name, p, mesh) for name, p in model.named_parameters()]
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
) -> Settings:
    """Those of a run that loads its model from files, which lie on the meta device until then."""
    axes = (sizes.get(Axis.DP_REPLICATE, 1), sizes.get(Axis.DP_SHARD, 1))
    settings = Settings(
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


def _shard(model: nn.Module, mesh: ContextParallelMesh, settings: Settings) -> None:
    """As training does; DistributedDataParallel takes no model without values, and leaves all as it is."""
    engine = engine_of(settings, CommHook())
    if engine.shards:
        engine.wrap(model, mesh, torch.device(mesh.device_type), {})


def _give_gradients(model: nn.Module) -> None:
    """As after a backward: sharded as parameters are, and whole where these are."""
    for group in groups_of(model):
        group.give_gradients()
    for p in model.parameters():
        if p.requires_grad and p.grad is None:
            p.grad = torch.empty_like(p)


def _tensors_of(states: Iterable[Mapping[str, Any]]) -> Iterator[torch.Tensor]:
    """What an optimizer keeps like its parameters."""
    for state in states:
        yield from (x for key, x in state.items() if key != "step" and x is not None)


def _held(name: str, parameter: nn.Parameter, mesh: ContextParallelMesh) -> HeldParameter:
    own = local_part(parameter)
    cut_by = {axis for name in _cutting(parameter) for axis in _axes(name) if mesh.sizes[axis] > 1}
    return HeldParameter(
        name, tuple(own.shape), _memory([own]), tuple(axis for axis in Axis if axis in cut_by)
    )


def _cutting(parameter: nn.Parameter) -> list[str]:
    """Names of the axes and groups that a parameter is sharded over."""
    data = parameter.data
    if not isinstance(data, DTensor):
        return []
    names = data.device_mesh.mesh_dim_names or ()
    # Not with is_shard(): it says no of what two axes have cut along one dimension.
    return [
        name
        for name, placed in zip(names, data.placements, strict=True)
        if not placed.is_replicate()
    ]


def _axes(name: str) -> tuple[Axis, ...]:
    return FLATTENED[Flat(name)] if name in set(Flat) else (Axis(name),)


def _memory(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the memory that this rank's parts lie in, of each piece of it once."""
    storages = [local_part(x).untyped_storage() for x in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
