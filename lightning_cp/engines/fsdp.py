"""``data_parallel="fsdp" | "hsdp" | "zero1"``: PyTorch's FSDP2 over groups of our mesh.

| engine | parameters are sharded over | copies | between forward and backward |
|---|---|---|---|
| fsdp | ``fsdp`` = dp_shard x cp, which is all of ``loss`` | 1 | sharded again |
| hsdp | ``fsdp``, replicated over ``dp_replicate`` | dp_replicate | sharded again |
| zero1 | ``loss`` = data x cp | 1 | whole |

In each the gradient of a parameter is added over all ranks of ``loss``, then divided by their number.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_cp.checkpoint.pretrained.meta_init import initialise
from lightning_cp.comm.reduce import broadcast_tensors
from lightning_cp.config import StrategyConfig
from lightning_cp.engines.checks import mixed_precision_policy
from lightning_cp.engines.fsdp_gradients import FsdpGradients
from lightning_cp.engines.fsdp_internals import enter_backward, keep_methods, two_dimensional
from lightning_cp.engines.gradients import clip_norm, clip_value
from lightning_cp.engines.tensor_parallel import share_layers
from lightning_cp.errors import ConfigError
from lightning_cp.layout.axes import Axis, Flat
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.models.blocks import blocks_of, matches
from lightning_cp.utils.dtensor import gathering_parts, is_on_meta, local_part
from lightning_cp.utils.patching import add_hook

# Optimizers made before their model was sharded, and the parameters that they step and zero.


class _ParameterMove(NamedTuple):
    """A parameter before sharding, and the place of its sharded version.

    A weak reference to the sharded parameter is not possible: PyTorch cannot move DTensors that have one.
    """

    before: weakref.ref[nn.Parameter]
    module: weakref.ref[nn.Module]
    name: str


class ShardedParameters:
    """The sharded versions of parameters, for all modules that one engine has sharded."""

    def __init__(self) -> None:
        self._sharded: dict[int, _ParameterMove] = {}  # by id of the parameter before sharding

    def record(self, module: nn.Module, before: Mapping[str, nn.Parameter]) -> None:
        """Record a module that was sharded; ``before`` are its former parameters by name."""
        at = weakref.ref(module)
        self._sharded.update(
            {id(p): _ParameterMove(weakref.ref(p), at, n) for n, p in before.items()}
        )

    def apply_to(self, optimizer: Optimizer, engine: str) -> None:
        """Replace an optimizer's parameters by their sharded versions.

        Args:
            optimizer: the user's.
            engine: the name of the engine, for the message.

        Raises:
            ConfigError: the optimizer has stepped already, with whole parameters.
        """
        for group in optimizer.param_groups:
            now = [self._sharded_version(p) for p in group["params"]]
            if any(
                a is not b and b in optimizer.state
                for a, b in zip(now, group["params"], strict=True)
            ):
                raise ConfigError(
                    f"{type(optimizer).__name__} has state of parameters that data_parallel={engine!r} "
                    "has sharded since. Call fabric.setup before its first step; load its state afterwards."
                )
            group["params"] = now

    def _sharded_version(self, parameter: nn.Parameter) -> nn.Parameter:
        """The sharded version of a parameter; the parameter itself if there is none."""
        known = self._sharded.get(id(parameter))
        module = known.module() if known is not None and known.before() is parameter else None
        return parameter if known is None or module is None else module.get_parameter(known.name)


def hook_zero_grad(optimizer: Optimizer, drop: Callable[[set[int]], object]) -> None:
    """Have ``zero_grad`` drop also the gradients that ranks hold outside of ``grad``.

    The change is made to the optimizer's class, not the object: Lightning's wrappers inherit from the class,
    and call its method.

    Args:
        optimizer: gets a subclass of its class, with this one method.
        drop: called with the ids of parameters whose gradients were zeroed.
    """
    kind = type(optimizer)

    def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        kind.zero_grad(self, set_to_none)
        drop({id(p) for group in self.param_groups for p in group["params"]})

    own = {"zero_grad": zero_grad, "__module__": kind.__module__, "__doc__": kind.__doc__}
    optimizer.__class__ = type(kind.__name__, (kind,), own)


# Wrapping units: modules that are sharded, gathered and freed together. They are a model's blocks, and the
# remainder.
#
# Lists within a block (experts, adapters) stay part of it: ranks may use different members, and gathering one
# takes all ranks.


_Place = tuple[str, nn.Module, int]
"""A parameter's dotted name, the module that holds it, and its id."""


def wrap_units(model: nn.Module, wanted: str | Sequence[str] | None) -> list[nn.Module]:
    """The modules to wrap one by one, innermost first, without the model itself.

    Args:
        model: the user's.
        wanted: class names or patterns of dotted names; ``None`` selects the blocks.

    Raises:
        ConfigError: something wanted matches no module, or shares a parameter with a module outside of it.
    """
    several = _shared_parameters(model)
    if wanted is None:
        return [unit for unit in blocks_of(model) if not _shared_outside(unit, several)]
    found: dict[str, nn.Module] = {}
    for each in [wanted] if isinstance(wanted, str) else wanted:
        named = {name: m for name, m in model.named_modules() if name and matches(each, name, m)}
        if not named:
            raise ConfigError(_no_match(each, model))
        found.update(named)
    for name, unit in found.items():
        shared = _shared_outside(unit, several)
        if shared:
            raise ConfigError(
                f"wrap_modules: {name!r} shares {shared!r} with a module outside of it, so the two cannot be "
                "gathered apart. Leave it to the model itself, or wrap a module that holds both."
            )
    deepest_first = sorted(found, key=lambda name: -name.count("."))
    return [found[name] for name in deepest_first]


def _no_match(wanted: str, model: nn.Module) -> str:
    blocks = sorted({type(unit).__name__ for unit in blocks_of(model)})
    classes = Counter(
        type(m).__name__ for m in model.modules() if any(True for _ in m.parameters())
    )
    known = blocks or [name for name, _ in classes.most_common(6)]
    return (
        f"wrap_modules: {wanted!r} is neither the class nor the name of a module of {type(model).__name__}. "
        f"Classes that could be wrapped: {', '.join(known)}; None finds the blocks by itself."
    )


def _shared_parameters(model: nn.Module) -> list[_Place]:
    """The parameters that more than one module holds, with each place."""
    places = [
        (f"{name}.{key}" if name else key, module, id(parameter))
        for name, module in model.named_modules()
        for key, parameter in module.named_parameters(recurse=False)
    ]
    holders = Counter(parameter for _, _, parameter in places)
    return [place for place in places if holders[place[2]] > 1]


def _shared_outside(unit: nn.Module, shared: Sequence[_Place]) -> str:
    """The name of a parameter of ``unit`` that modules outside of it hold too; ``""`` if there is none."""
    if not shared:
        return ""
    inside = set(unit.modules())
    own = {parameter for _, module, parameter in shared if module in inside}
    outside = (
        name for name, module, parameter in shared if module not in inside and parameter in own
    )
    return next(outside, "")


class ShardedEngine:
    """FSDP2; ``zero1`` keeps parameters gathered until backward has ended, and shards the rest of the
    state.
    """

    shards = True

    def __init__(self, settings: StrategyConfig) -> None:
        self.name = settings.data_parallel
        self.before_exchange: Callable[[], object] = list  # no listener
        self._settings = settings
        self._roots: list[FsdpGradients] = []
        self._successors = ShardedParameters()

    def wrap(
        self,
        module: nn.Module,
        mesh: ContextParallelMesh,
        device: torch.device,
        options: Mapping[str, Any],
        methods: Sequence[str] = ("forward",),
    ) -> nn.Module:
        """Shard the module in place, one unit at a time, with the weights of the group's first rank.

        Raises:
            ConfigError: ``wrap_modules`` that match nothing, a module that was sharded elsewhere, or layers
                that tensor-parallel ranks cannot share.
        """
        if any(root.module is module for root in self._alive()):
            return module
        if isinstance(module, FSDPModule):
            raise ConfigError(
                f"{type(module).__name__} was sharded before, by another strategy or by fully_shard. Make a "
                "new module, and load its weights from a checkpoint if they are to be kept."
            )
        before = dict(module.named_parameters())
        share_layers(module, mesh, self._settings.tensor_parallel_plan, self.before_exchange)
        self._shard(module, mesh, device)
        self._successors.record(module, before)
        root = FsdpGradients(module, mesh)
        self._roots = [*self._alive(), root]
        # Without a backward after a forward, nothing would free the gathered parameters.
        after = root.after_forward if "forward" in methods else root.shard
        add_hook(module.register_forward_hook, lambda *_: after())
        root.follow_calls(gathering_parts(module), lambda: self.before_exchange())
        zero = module.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            zero(set_to_none)
            root.zero_gradients()

        module.zero_grad = zero_grad
        for method in methods:
            if method != "forward":
                self._as_forward(root, method)
        return module

    def _shard(self, module: nn.Module, mesh: ContextParallelMesh, device: torch.device) -> None:
        over = self._mesh_of(mesh)
        scalars = {p for p in module.parameters() if not p.dim()}
        whole: dict[str, Any] = {
            "mesh": over,
            "mp_policy": mixed_precision_policy(self._settings.mixed_precision),
            "offload_policy": self._offload(device),
            "ignored_params": scalars,
        }
        done: set[int] = set()
        for unit in [*wrap_units(module, self._settings.wrap_modules), module]:
            own = [x for x in _states(unit) if id(x) not in done and not x.is_meta]
            for x in own:
                if x.device != device:
                    x.data = x.data.to(device)
            broadcast_tensors((local_part(x) for x in own), mesh.group(Flat.LOSS))
            last = unit is module  # backward needs its parameters next
            again = False if self.name == "zero1" else None if last else True
            users = type(unit)
            fully_shard(unit, reshard_after_forward=again, **whole)
            keep_methods(unit, users)
            unit.register_forward_pre_hook(self._before_forward, prepend=True)
            done.update(map(id, _states(unit)))
        _move_metrics(module, device)
        assert isinstance(module, FSDPModule)
        module.set_force_sum_reduction_for_comms(True)
        if is_on_meta(module) and self._settings.pretrained is None:
            group, offload = mesh.group(Flat.LOSS), self._settings.cpu_offload
            initialise(module, device, group, offload=offload)

    def _mesh_of(self, mesh: ContextParallelMesh) -> DeviceMesh:
        if self.name == "zero1":
            return mesh.axis_mesh(Flat.LOSS)
        shards = mesh.axis_mesh(Flat.FSDP)
        if self.name == "fsdp":
            return shards
        return two_dimensional(mesh.axis_mesh(Axis.DP_REPLICATE), shards)

    def _offload(self, device: torch.device) -> OffloadPolicy:
        if not self._settings.cpu_offload:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=device.type == "cuda")

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        self.before_exchange()

    def _as_forward(self, root: FsdpGradients, method: str) -> None:
        """Gather the module's own parameters around a method, as around its forward."""
        module = root.module
        assert module is not None
        users = getattr(module, method)

        @wraps(users)
        def begins(*args: Any, **kwargs: Any) -> Any:
            root.begin_method()
            output = users(*args, **kwargs)
            root.apply_changes()
            return output

        setattr(module, method, begins)
        register_fsdp_forward_method(module, method)
        gathered = getattr(module, method)

        @wraps(users)  # Lightning inspects the wrapped method, one layer deep
        def step(*args: Any, **kwargs: Any) -> Any:
            self.before_exchange()
            with root.inside():
                return gathered(*args, **kwargs)

        setattr(module, method, step)

    def remap_optimizer(self, optimizer: Optimizer) -> None:
        """Put sharded parameters into an optimizer in place of the former ones, and zero all gradients.

        Raises:
            ConfigError: the optimizer has stepped already, with whole parameters.
        """
        self._successors.apply_to(optimizer, self.name)
        hook_zero_grad(optimizer, self._drop_unreduced)

    def _drop_unreduced(self, zeroed: set[int]) -> None:
        for root in self._alive():
            root.drop_unreduced(zeroed)

    @contextmanager
    def accumulating(self, wrapped: nn.Module) -> Iterator[None]:
        """Leave gradients whole and unsynchronised; zero1 keeps its parameters gathered too."""
        assert isinstance(wrapped, FSDPModule)
        wrapped.set_requires_gradient_sync(False)
        if self.name == "zero1":
            wrapped.set_reshard_after_backward(False)
        try:
            yield
        finally:
            wrapped.set_requires_gradient_sync(True)
            wrapped.set_reshard_after_backward(True)

    def rewrap(
        self,
        wrapped: nn.Module,
        mesh: ContextParallelMesh,
        device: torch.device,
        options: Mapping[str, Any],
    ) -> nn.Module:
        """Return the same module: parameters that were frozen or unfrozen stay in place. Their dtype of
        reduction may change.
        """
        for root in self._alive():
            if root.module is wrapped:
                root.record_trained()
        return wrapped

    def prepare_backward_after_rewrap(self, wrapped: nn.Module, loss: torch.Tensor) -> None:
        """Do nothing: no gradient was lost."""
        self.prepare_backward(loss)

    def prepare_backward(self, loss: torch.Tensor) -> None:
        """Register the backward of a step method: its output does not exist yet, from which FSDP2 sees a
        backward.
        """
        for root in self._alive():
            if not root.is_current():
                root.record_trained()
            if root.entered and loss.requires_grad:
                root.apply_changes()
                module = root.module
                assert isinstance(module, FSDPModule)
                loss.register_hook(lambda gradient, at=module: enter_backward(at, gradient))

    def finish_backward(self) -> None:
        """Average the gradients that FSDP2 leaves alone, and drop zeros where no rank had a gradient."""
        for root in self._alive():
            root.finish_backward()

    def isolated(self, model: nn.Module) -> AbstractContextManager[None]:
        """A block that changes nothing: the step is an ordinary one, since parameters must be gathered."""
        return nullcontext()

    def unreduced_gradients(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """The whole gradients that ``accumulating`` has left unsynchronised on this rank."""
        for root in self._alive():
            yield from root.unreduced_gradients()

    def count_unsynced(self, parameters: Iterable[torch.Tensor]) -> int:
        """Count the parameters with unreduced gradients, which an optimizer would not see."""
        asked = {id(p) for p in parameters}
        return sum(id(p) in asked for p, _ in self.unreduced_gradients())

    def after_optimizer_step(self) -> None:
        """Mark gathered parameters as out of date."""
        for root in self._alive():
            root.after_optimizer_step()

    def is_current(self, module: nn.Module) -> bool:
        """True if the same parameters are trained as at the last call."""
        return all(root.is_current() for root in self._alive() if root.module is module)

    def frozen_at_wrap(self, module: nn.Module) -> list[str]:
        """Nothing: a parameter that is unfrozen is reduced from its next step on."""
        return []

    def clip_norm(
        self,
        parameters: Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Scale gradients so that their global norm is at most ``max_norm``; return the norm before."""
        return clip_norm(parameters, max_norm, norm_type, error_if_nonfinite)

    def clip_value(self, parameters: Iterable[torch.Tensor], value: float) -> None:
        """Clamp every element of the gradients to [-value, value]."""
        clip_value(parameters, value)

    def _alive(self) -> list[FsdpGradients]:
        return [root for root in self._roots if root.module is not None]


def _move_metrics(module: nn.Module, device: torch.device) -> None:
    """Move the states of metrics, which are neither parameters nor buffers."""
    for part in module.modules():
        if isinstance(part, Metric) and part.device.type != "meta":
            part.to(device)


def _states(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()
