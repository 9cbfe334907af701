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
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_cp.checkpoint.pretrained.meta_init import initialise, is_on_meta
from lightning_cp.comm.reduce import broadcast_tensors
from lightning_cp.config import StrategyConfig
from lightning_cp.engines.checks import precision_of
from lightning_cp.engines.fsdp_gradients import Root
from lightning_cp.engines.fsdp_internals import enter_backward, keep_methods, two_dimensional
from lightning_cp.engines.gradients import clip_norm, clip_value
from lightning_cp.engines.tensor_parallel import share_layers
from lightning_cp.errors import ConfigError
from lightning_cp.layout.axes import Axis, Flat
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.models.blocks import blocks_of, matches
from lightning_cp.utils.dtensor import local_part
from lightning_cp.utils.module_hooks import add_hook

# Successors of parameters: those that optimizers of a model that was sharded step and zero.


class _Sharded(NamedTuple):
    """A parameter that was sharded, and where to find what was made of it.

    Not what was made itself: PyTorch cannot move DTensors that somebody has a weak reference to.
    """

    before: weakref.ref[nn.Parameter]
    module: weakref.ref[nn.Module]
    name: str


class Successors:
    """Of all modules that one engine has sharded."""

    def __init__(self) -> None:
        self._sharded: dict[int, _Sharded] = {}  # by id of what was there before

    def note(self, module: nn.Module, before: Mapping[str, nn.Parameter]) -> None:
        """A module was sharded; ``before`` are the parameters that it had, by name."""
        at = weakref.ref(module)
        self._sharded.update({id(p): _Sharded(weakref.ref(p), at, n) for n, p in before.items()})

    def put_into(self, optimizer: Optimizer, engine: str) -> None:
        """Have an optimizer step sharded parameters in the place of those that they were made of.

        Args:
            optimizer: the user's.
            engine: for the message.

        Raises:
            ConfigError: the optimizer has stepped already, with whole parameters.
        """
        for group in optimizer.param_groups:
            now = [self._now(p) for p in group["params"]]
            if any(
                a is not b and b in optimizer.state
                for a, b in zip(now, group["params"], strict=True)
            ):
                raise ConfigError(
                    f"{type(optimizer).__name__} has state of parameters that data_parallel={engine!r} "
                    "has sharded since. Call fabric.setup before its first step; load its state afterwards."
                )
            group["params"] = now

    def _now(self, parameter: nn.Parameter) -> nn.Parameter:
        """The successor of a parameter; itself, if it has none."""
        known = self._sharded.get(id(parameter))
        module = known.module() if known is not None and known.before() is parameter else None
        return parameter if known is None or module is None else module.get_parameter(known.name)


def dropping_when_zeroed(optimizer: Optimizer, drop: Callable[[set[int]], object]) -> None:
    """Have ``zero_grad`` drop too what ranks keep elsewhere than in ``grad``.

    By its class and not on the object: Lightning's wrappers inherit from the class, and call that one's.

    Args:
        optimizer: is of a class of its own afterwards, which is nothing but that.
        drop: called with the ids of parameters whose gradients were zeroed.
    """
    kind = type(optimizer)

    def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        kind.zero_grad(self, set_to_none)
        drop({id(p) for group in self.param_groups for p in group["params"]})

    own = {"zero_grad": zero_grad, "__module__": kind.__module__, "__doc__": kind.__doc__}
    optimizer.__class__ = type(kind.__name__, (kind,), own)


# Units of modules that are sharded, gathered and freed together: a model's blocks, and the rest.
#
# Lists within a block (experts, adapters) stay part of it, since ranks may each use others of them, and
# gathering one takes all ranks.


_Place = tuple[str, nn.Module, int]
"""A parameter's dotted name, the module that holds it, and its id."""


def units_of(model: nn.Module, wanted: str | Sequence[str] | None) -> list[nn.Module]:
    """The modules to be wrapped one by one, innermost first; the model itself is not among them.

    Args:
        model: the user's.
        wanted: class names or patterns of dotted names; ``None`` finds the blocks.

    Raises:
        ConfigError: something wanted matches no module, or shares a parameter with a module outside of it.
    """
    several = _in_several(model)
    if wanted is None:
        return [unit for unit in blocks_of(model) if not _shared_outside(unit, several)]
    found: dict[str, nn.Module] = {}
    for each in [wanted] if isinstance(wanted, str) else wanted:
        named = {name: m for name, m in model.named_modules() if name and matches(each, name, m)}
        if not named:
            raise ConfigError(_nothing(each, model))
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


def _nothing(wanted: str, model: nn.Module) -> str:
    blocks = sorted({type(unit).__name__ for unit in blocks_of(model)})
    classes = Counter(
        type(m).__name__ for m in model.modules() if any(True for _ in m.parameters())
    )
    known = blocks or [name for name, _ in classes.most_common(6)]
    return (
        f"wrap_modules: {wanted!r} is neither the class nor the name of a module of {type(model).__name__}. "
        f"Classes that could be wrapped: {', '.join(known)}; None finds the blocks by itself."
    )


def _in_several(model: nn.Module) -> list[_Place]:
    """Where the parameters are that more than one module holds."""
    places = [
        (f"{name}.{key}" if name else key, module, id(parameter))
        for name, module in model.named_modules()
        for key, parameter in module.named_parameters(recurse=False)
    ]
    holders = Counter(parameter for _, _, parameter in places)
    return [place for place in places if holders[place[2]] > 1]


def _shared_outside(unit: nn.Module, shared: Sequence[_Place]) -> str:
    """The name of a parameter of ``unit`` that the rest of the model holds too; ``""`` if there is none."""
    if not shared:
        return ""
    inside = set(unit.modules())
    own = {parameter for _, module, parameter in shared if module in inside}
    outside = (
        name for name, module, parameter in shared if module not in inside and parameter in own
    )
    return next(outside, "")


class ShardedEngine:
    """FSDP2; ``zero1`` keeps parameters whole until backward is over, and shards what remains."""

    shards = True

    def __init__(self, settings: StrategyConfig) -> None:
        self.name = settings.data_parallel
        self.before_data: Callable[[], object] = list  # nobody wants to know
        self._settings = settings
        self._roots: list[Root] = []
        self._successors = Successors()

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
        share_layers(module, mesh, self._settings.tensor_parallel_plan, self.before_data)
        self._shard(module, mesh, device)
        self._successors.note(module, before)
        root = Root(module, mesh)
        self._roots = [*self._alive(), root]
        # Where no backward follows a forward, nothing would free what it has gathered.
        after = root.after_forward if "forward" in methods else root.shard
        add_hook(module.register_forward_hook, lambda *_: after())
        root.follow_calls(_callable_parts(module), lambda: self.before_data())
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
            "mp_policy": precision_of(self._settings.mixed_precision),
            "offload_policy": self._offload(device),
            "ignored_params": scalars,
        }
        done: set[int] = set()
        for unit in [*units_of(module, self._settings.wrap_modules), module]:
            own = [x for x in _states(unit) if id(x) not in done and not x.is_meta]
            for x in own:
                if x.device.type != device.type:
                    x.data = x.data.to(device)
            broadcast_tensors((local_part(x) for x in own), mesh.group(Flat.LOSS))
            last = unit is module  # its parameters are needed again at once
            again = False if self.name == "zero1" else None if last else True
            users = type(unit)
            fully_shard(unit, reshard_after_forward=again, **whole)
            keep_methods(unit, users)
            unit.register_forward_pre_hook(self._before_forward, prepend=True)
            done.update(map(id, _states(unit)))
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
        self.before_data()

    def _as_forward(self, root: Root, method: str) -> None:
        """Gather the module's own parameters around a method, as around its forward."""
        module = root.module
        assert module is not None
        users = getattr(module, method)

        @wraps(users)
        def begins(*args: Any, **kwargs: Any) -> Any:
            root.begin_method()
            output = users(*args, **kwargs)
            root.keep_changes()
            return output

        setattr(module, method, begins)
        register_fsdp_forward_method(module, method)
        gathered = getattr(module, method)

        @wraps(users)  # Lightning looks at what is wrapped, one layer deep
        def step(*args: Any, **kwargs: Any) -> Any:
            self.before_data()
            with root.inside():
                return gathered(*args, **kwargs)

        setattr(module, method, step)

    def adopt(self, optimizer: Optimizer) -> None:
        """Put sharded parameters in the place of those that they were made of, and zero all gradients.

        Raises:
            ConfigError: the optimizer has stepped already, with whole parameters.
        """
        self._successors.put_into(optimizer, self.name)
        dropping_when_zeroed(optimizer, self._drop_unreduced)

    def _drop_unreduced(self, zeroed: set[int]) -> None:
        for root in self._alive():
            root.drop_unreduced(zeroed)

    @contextmanager
    def accumulating(self, wrapped: nn.Module) -> Iterator[None]:
        """Leave gradients whole and on their ranks; zero1 keeps its parameters gathered too."""
        assert isinstance(wrapped, FSDPModule)
        wrapped.set_requires_gradient_sync(False)
        if self.name == "zero1":
            wrapped.set_reshard_after_backward(False)
        try:
            yield
        finally:
            wrapped.set_requires_gradient_sync(True)
            wrapped.set_reshard_after_backward(True)

    def follow(
        self,
        wrapped: nn.Module,
        mesh: ContextParallelMesh,
        device: torch.device,
        options: Mapping[str, Any],
    ) -> nn.Module:
        """Frozen and unfrozen parameters stay where they are; which are added in which dtype may change."""
        for root in self._alive():
            if root.module is wrapped:
                root.settle()
        return wrapped

    def rejoin(self, wrapped: nn.Module, loss: torch.Tensor) -> None:
        """Nothing was lost."""
        self.expect(loss)

    def expect(self, loss: torch.Tensor) -> None:
        """Within a module's method its output does not exist yet, which tells FSDP2 that backward begins."""
        for root in self._alive():
            if not root.is_current():
                root.settle()
            if root.entered and loss.requires_grad:
                root.keep_changes()
                module = root.module
                assert isinstance(module, FSDPModule)
                loss.register_hook(lambda gradient, at=module: enter_backward(at, gradient))

    def require_averaged(self) -> None:
        """Average what FSDP2 leaves alone, and drop zeros in place of gradients that no rank had."""
        for root in self._alive():
            root.finish_backward()

    def aside(self, model: nn.Module) -> AbstractContextManager[None]:
        """Parameters have to be gathered, so a step is as any other; it leaves nothing."""
        return nullcontext()

    def unreduced(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """The gradients that ``accumulating`` has left on this rank, whole."""
        for root in self._alive():
            yield from root.unreduced()

    def kept_back(self, parameters: Iterable[torch.Tensor]) -> int:
        """The number of those not reduced yet: an optimizer would not see their gradients at all."""
        asked = {id(p) for p in parameters}
        return sum(id(p) in asked for p, _ in self.unreduced())

    def after_step(self) -> None:
        """What is gathered is out of date."""
        for root in self._alive():
            root.after_step()

    def is_current(self, module: nn.Module) -> bool:
        """True if the same parameters are trained as when this was asked last."""
        return all(root.is_current() for root in self._alive() if root.module is module)

    def left_out(self, module: nn.Module) -> list[str]:
        """None: what is unfrozen is reduced from its next step on."""
        return []

    def clip_norm(
        self,
        parameters: Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Scale gradients so that their norm, that of one process, is at most ``max_norm``; the norm."""
        return clip_norm(parameters, max_norm, norm_type, error_if_nonfinite)

    def clip_value(self, parameters: Iterable[torch.Tensor], value: float) -> None:
        """Clamp every element of the gradients to [-value, value]."""
        clip_value(parameters, value)

    def _alive(self) -> list[Root]:
        return [root for root in self._roots if root.module is not None]


def _callable_parts(root: nn.Module) -> Iterator[nn.Module]:
    """The units of a model, and the modules with sharded parameters that hold units or are in none."""
    for child in root.children():
        if any(isinstance(p, DTensor) for p in child.parameters()):
            yield child
            if not isinstance(child, FSDPModule):
                yield from _callable_parts(child)


def _states(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()
