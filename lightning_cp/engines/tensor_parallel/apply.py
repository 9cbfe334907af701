"""Sharing a model's layers by a plan, once, before an engine wraps it."""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from lightning_cp.comm.reduce import broadcast_tensors
from lightning_cp.engines.tensor_parallel import auto_plan as known
from lightning_cp.engines.tensor_parallel.auto_plan import (
    Attention,
    TensorParallelPlan,
    automatic_plan,
)
from lightning_cp.engines.tensor_parallel.styles import FusedColwiseLinear
from lightning_cp.engines.tensor_parallel.user_plan import given_plan, watch_widths
from lightning_cp.errors import ConfigError
from lightning_cp.layout.axes import Axis, Flat
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.randomness.token_draws import share_features

# Attention modules that count their heads are told how many are left to a rank.


def leave_local_heads(attention: Attention, size: int) -> None:
    """Divide the counts of heads in a module's attributes; one that infers them from shapes has none."""
    module: Any = attention.module
    counts: dict[str, int] = dict.fromkeys(known.KV_HEADS, attention.kv_heads)
    counts |= dict.fromkeys(known.QUERY_HEADS, attention.query_heads)
    for name, count in counts.items():
        if vars(module).get(name) == count and type(vars(module)[name]) is int:
            setattr(module, name, count // size)
    if len(attention.ways_in) == 1 and hasattr(module, "config"):  # where it finds where keys begin
        module.config = LocalConfig(
            module.config,
            num_attention_heads=attention.query_heads // size,
            num_key_value_heads=attention.kv_heads // size,
        )


class LocalConfig:
    """A config seen by one rank's part of a module; all but the counts is the model's own."""

    def __init__(self, config: Any, **counts: int) -> None:
        self.__dict__.update(counts)
        self.__dict__["_config"] = config

    def __getattr__(self, name: str) -> Any:
        if name == "_config":  # a copy that is being made
            raise AttributeError(name)
        return getattr(self._config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._config, name, value)


Given = Mapping[str, Any] | Callable[..., Any] | None


def share_layers(
    module: nn.Module,
    mesh: ContextParallelMesh,
    given: Given = None,
    before_data: Callable[[], object] = lambda: None,
) -> None:
    """Have the ranks of each ``tp`` group share the layers of ``module``; nothing if they do, or are alone.

    Afterwards all of them have the same values of what is not shared, and will draw the same random numbers.

    Args:
        module: in place.
        mesh: the process groups.
        given: ``None``: the automatic plan; or the user's own: patterns of names with styles, or a
            function of (module, device_mesh).
        before_data: called before layers exchange anything; a method is held weakly.

    Raises:
        ConfigError: a plan that does not fit the model, or heads or dimensions that do not divide.
    """
    if mesh.tp_size == 1 or is_shared(module):
        return
    tied, styles = _tied(module), dict[str, ParallelStyle]()
    if callable(given):
        _call(given, module, mesh)
    else:
        plan = (
            automatic_plan(module, mesh.tp_size)
            if given is None
            else given_plan(module, given, mesh.tp_size)
        )
        styles = plan.styles
        for name, style in styles.items():
            parallelize_module(module.get_submodule(name), mesh.axis_mesh(Axis.TP), style)
        if given is not None:
            watch_widths(module, styles, mesh.tp_size)
        for attention in plan.attention:
            leave_local_heads(attention, mesh.tp_size)
        rank_zero_info(_shown(plan, mesh.tp_size))
    _require_equal_parts(module, mesh.tp_size)
    _tell_draws(module, styles, mesh.axis_mesh(Axis.TP).get_local_rank())
    _tie(module, tied)
    _tell_checks(module, before_data)
    _make_alike(module, mesh)


def is_shared(module: nn.Module) -> bool:
    """True if layers were shared already: at an earlier stage of the run, or by the user."""
    return any(
        isinstance(p.data, DTensor) and Axis.TP in (p.data.device_mesh.mesh_dim_names or ())
        for p in module.parameters()
    )


def _call(given: Callable[..., Any], module: nn.Module, mesh: ContextParallelMesh) -> None:
    returned = given(module, mesh.axis_mesh(Axis.TP))
    if returned is not None and returned is not module:
        raise ConfigError(
            "tensor_parallel_plan returned another module than it was given. Share layers in place, as "
            "torch.distributed.tensor.parallel.parallelize_module does."
        )
    if not is_shared(module):
        raise ConfigError(
            "tensor_parallel_plan was called and shares nothing: no parameter is a DTensor over the tp axis. "
            "Call parallelize_module(module, device_mesh, {...}) in it, or use tensor_parallel_size=1."
        )


def _tell_draws(module: nn.Module, styles: Mapping[str, ParallelStyle], rank: int) -> None:
    """Say where features are a rank's share: from layers that share outputs to those that share inputs."""
    for name, layer in module.named_modules():
        weight = layer.weight.data if isinstance(layer, nn.Linear) else None
        if not isinstance(layer, nn.Linear) or not isinstance(weight, DTensor):
            continue
        if Shard(1) in weight.placements:
            layer.register_forward_pre_hook(_whole)
        elif Shard(0) in weight.placements:
            style, size = styles.get(name), weight.device_mesh.size()
            parts = style.parts if isinstance(style, FusedColwiseLinear) else ()
            widths = frozenset(part // size for part in (*parts, layer.out_features))
            layer.register_forward_hook(partial(_share, widths, rank))


def _share(widths: frozenset[int], rank: int, layer: nn.Module, given: object, output: Any) -> None:
    if isinstance(output, torch.Tensor) and output.shape[-1] in widths:  # not where it is gathered
        share_features(widths, rank)


def _whole(*given: object) -> None:
    share_features()


def _require_equal_parts(module: nn.Module, size: int) -> None:
    """Refuse parts of different sizes: FSDP2 shards them as if they were equal.

    Raises:
        ConfigError: naming the parameter and the dimension.
    """
    for name, x in (*module.named_parameters(), *module.named_buffers()):
        for placement in x.data.placements if isinstance(x.data, DTensor) else ():
            dim = getattr(placement, "dim", None)
            if dim is not None and x.shape[dim] % size:
                raise ConfigError(
                    f"tensor_parallel_plan shards {name} of shape {list(x.shape)} along its dimension {dim}: "
                    f"{x.shape[dim]} does not divide by tensor_parallel_size={size}. Leave that module out "
                    "of the plan, give it a style for another dimension, or make it larger."
                )


def _tied(module: nn.Module) -> list[list[str]]:
    """Names of parameters that are one and the same."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), []).append(name)
    return [names for names in by_id.values() if len(names) > 1]


def _tie(module: nn.Module, tied: list[list[str]]) -> None:
    """Make parameters one again that were shared one by one.

    Raises:
        ConfigError: they were shared in different ways.
    """
    for first, *others in tied:
        kept = module.get_parameter(first)
        for name in others:
            if _placement(module.get_parameter(name)) != _placement(kept):
                raise ConfigError(
                    f"tensor_parallel_plan shards {first} and {name} differently, but they are one parameter "
                    f"({_placement(kept)} and {_placement(module.get_parameter(name))}). Give both modules "
                    "styles of the same placement (vocabulary_embedding and vocabulary_head are), or none."
                )
            owner, _, last = name.rpartition(".")
            module.get_submodule(owner).register_parameter(last, kept)


def _placement(parameter: torch.Tensor) -> str:
    data = parameter.data
    return str(data.placements) if isinstance(data, DTensor) else "not sharded"


def _tell_checks(module: nn.Module, before_data: Callable[[], object]) -> None:
    """Have ranks tell each other what they have found before layers exchange anything."""
    owner = getattr(before_data, "__self__", None)
    call = before_data if owner is None else weakref.WeakMethod(before_data)  # type: ignore[arg-type]

    def tell(*_: Any) -> None:
        found: Any = call() if owner is not None else before_data
        if found is not None:
            found()

    for part in module.modules():
        if any(isinstance(p.data, DTensor) for p in part.parameters(recurse=False)):
            part.register_forward_pre_hook(tell, prepend=True)


def _make_alike(module: nn.Module, mesh: ContextParallelMesh) -> None:
    """Give all ranks of a group what its first one has: parameters and buffers left whole, random numbers.

    What layers have become is then given to the groups with other tokens and samples.
    """
    group = mesh.group(Axis.TP)
    tensors = [x for x in (*module.parameters(), *module.buffers()) if not x.is_meta]
    whole = [x for x in tensors if not isinstance(x.data, DTensor)]
    for x in whole:
        x.data = x.data.to(mesh.device_type)
    broadcast_tensors([x.data for x in whole], group)
    shared = [x.data for x in tensors if isinstance(x.data, DTensor)]
    broadcast_tensors([x.to_local() for x in shared], mesh.group(Flat.LOSS))
    state = torch.get_rng_state().to(mesh.device_type)
    broadcast_tensors([state], group)
    torch.set_rng_state(state.cpu())
    if mesh.device_type == "cuda":
        state = torch.cuda.get_rng_state().to("cuda")
        broadcast_tensors([state], group)
        torch.cuda.set_rng_state(state.cpu())


def _shown(plan: TensorParallelPlan, size: int) -> str:
    """The plan in a few lines: modules that differ in numbers only are one."""
    counts = Counter(
        (re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name), type(style).__name__)
        for name, style in plan.styles.items()
    )
    lines = [f"{name}: {style} ({count})" for (name, style), count in counts.items()]
    lines += [f"{left.name}: whole on every rank, as {left.why}" for left in plan.whole]
    return f"tensor parallel over {size} ranks:\n  " + "\n  ".join(lines)
