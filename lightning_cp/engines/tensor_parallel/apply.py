"""Sharing of a model's layers by a plan, once, before an engine wraps the model."""

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
from lightning_cp.engines.tensor_parallel.user_plan import (
    check_widths_in_forward,
    plan_from_patterns,
)
from lightning_cp.errors import ConfigError
from lightning_cp.layout.axes import Axis, Flat
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.randomness.token_draws import share_features

# Attention modules that count their heads get the number of a rank's heads.


def set_local_heads(attention: Attention, size: int) -> None:
    """Divide the counts of heads in a module's attributes; a module that infers them from shapes has none."""
    module: Any = attention.module
    counts: dict[str, int] = dict.fromkeys(known.KV_HEADS, attention.kv_heads)
    counts |= dict.fromkeys(known.QUERY_HEADS, attention.query_heads)
    for name, count in counts.items():
        if vars(module).get(name) == count and type(vars(module)[name]) is int:
            setattr(module, name, count // size)
    # A fused layer's outputs are separated by the counts in the config.
    if len(attention.input_layers) == 1 and hasattr(module, "config"):
        module.config = LocalConfig(
            module.config,
            num_attention_heads=attention.query_heads // size,
            num_key_value_heads=attention.kv_heads // size,
        )


class LocalConfig:
    """A config as one rank's part of a module sees it: local counts, all else from the model's config."""

    def __init__(self, config: Any, **counts: int) -> None:
        self.__dict__.update(counts)
        self.__dict__["_config"] = config

    def __getattr__(self, name: str) -> Any:
        if name == "_config":  # a copy in construction
            raise AttributeError(name)
        return getattr(self._config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._config, name, value)


UserPlan = Mapping[str, Any] | Callable[..., Any] | None


def share_layers(
    module: nn.Module,
    mesh: ContextParallelMesh,
    user_plan: UserPlan = None,
    before_exchange: Callable[[], object] = lambda: None,
) -> None:
    """Share the layers of ``module`` among the ranks of each ``tp`` group. Does nothing if they are shared
    already, or for one rank.

    Afterwards all ranks have the same values of replicated parameters, and the same random state.

    Args:
        module: changed in place.
        mesh: the process groups.
        user_plan: ``None``: the automatic plan; or the user's own: patterns of names with styles, or a
            function of (module, device_mesh).
        before_exchange: called before layers exchange anything; a method is held weakly.

    Raises:
        ConfigError: a plan that does not fit the model, or heads or dimensions that do not divide.
    """
    if mesh.tp_size == 1 or is_shared(module):
        return
    tied, styles = _tied(module), dict[str, ParallelStyle]()
    if callable(user_plan):
        _call(user_plan, module, mesh)
    else:
        plan = (
            automatic_plan(module, mesh.tp_size)
            if user_plan is None
            else plan_from_patterns(module, user_plan, mesh.tp_size)
        )
        styles = plan.styles
        for name, style in styles.items():
            parallelize_module(module.get_submodule(name), mesh.axis_mesh(Axis.TP), style)
        if user_plan is not None:
            check_widths_in_forward(module, styles, mesh.tp_size)
        for attention in plan.attention:
            set_local_heads(attention, mesh.tp_size)
        rank_zero_info(_plan_text(plan, mesh.tp_size))
    _check_equal_parts(module, mesh.tp_size)
    _register_draws(module, styles, mesh.axis_mesh(Axis.TP).get_local_rank())
    _tie(module, tied)
    _exchange_errors_first(module, before_exchange)
    _copy_first_rank(module, mesh)


def is_shared(module: nn.Module) -> bool:
    """True if layers were shared already: at an earlier stage of the run, or by the user."""
    return any(
        isinstance(p.data, DTensor) and Axis.TP in (p.data.device_mesh.mesh_dim_names or ())
        for p in module.parameters()
    )


def _call(plan: Callable[..., Any], module: nn.Module, mesh: ContextParallelMesh) -> None:
    returned = plan(module, mesh.axis_mesh(Axis.TP))
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


def _register_draws(module: nn.Module, styles: Mapping[str, ParallelStyle], rank: int) -> None:
    """Register the features of each rank with random draws, from layers that share outputs to those that
    share inputs.
    """
    for name, layer in module.named_modules():
        weight = layer.weight.data if isinstance(layer, nn.Linear) else None
        if not isinstance(layer, nn.Linear) or not isinstance(weight, DTensor):
            continue
        if Shard(1) in weight.placements:
            layer.register_forward_pre_hook(_mark_replicated)
        elif Shard(0) in weight.placements:
            style, size = styles.get(name), weight.device_mesh.size()
            parts = style.parts if isinstance(style, FusedColwiseLinear) else ()
            widths = frozenset(part // size for part in (*parts, layer.out_features))
            layer.register_forward_hook(partial(_share, widths, rank))


def _share(widths: frozenset[int], rank: int, layer: nn.Module, args: object, output: Any) -> None:
    if isinstance(output, torch.Tensor) and output.shape[-1] in widths:  # not where it is gathered
        share_features(widths, rank)


def _mark_replicated(*call: object) -> None:
    share_features()


def _check_equal_parts(module: nn.Module, size: int) -> None:
    """Check that all parts have one size: FSDP2 shards them as if they were equal.

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
    """Lists of names of tied parameters."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), []).append(name)
    return [names for names in by_id.values() if len(names) > 1]


def _tie(module: nn.Module, tied: list[list[str]]) -> None:
    """Tie parameters again that were shared one by one.

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


def _exchange_errors_first(module: nn.Module, before_exchange: Callable[[], object]) -> None:
    """Have ranks exchange their errors before layers exchange anything."""
    owner = getattr(before_exchange, "__self__", None)
    call = before_exchange if owner is None else weakref.WeakMethod(before_exchange)  # type: ignore[arg-type]

    def tell(*_: Any) -> None:
        found: Any = call() if owner is not None else before_exchange
        if found is not None:
            found()

    for part in module.modules():
        if any(isinstance(p.data, DTensor) for p in part.parameters(recurse=False)):
            part.register_forward_pre_hook(tell, prepend=True)


def _copy_first_rank(module: nn.Module, mesh: ContextParallelMesh) -> None:
    """Copy replicated parameters, buffers and the random state from the first rank of each group.

    The shared layers are then broadcast to the groups with other tokens and samples.
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


def _plan_text(plan: TensorParallelPlan, size: int) -> str:
    """The plan in a few lines: modules whose names differ only in numbers share a line."""
    counts = Counter(
        (re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name), type(style).__name__)
        for name, style in plan.styles.items()
    )
    lines = [f"{name}: {style} ({count})" for (name, style), count in counts.items()]
    lines += [f"{left.name}: whole on every rank, as {left.why}" for left in plan.replicated]
    return f"tensor parallel over {size} ranks:\n  " + "\n  ".join(lines)
