"""Initial values of models that were built on the meta device, once they are sharded.

One module after the other, in the order in which they were built, gets its own parameters whole, sets them
as it would have done, and keeps its rank's part. So one module's parameters is all that is ever whole, and
modules that draw random numbers in ``reset_parameters`` draw those of one process with the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils import _pytree as tree

from lightning_cp.checkpoint.pretrained.initial_values import (
    Initialize,
    copy_from_first_rank,
    has_nan,
    initializers_of,
    materialize,
    meta_tensors,
    run_initializers,
)
from lightning_cp.checkpoint.pretrained.memory import TensorMemory, room_for_whole
from lightning_cp.errors import ConfigError, LightningCPError
from lightning_cp.utils.dtensor import local_part

# Tensors without values, which stand in for those whose values are not at hand.
#
# What sets one of a module's values often writes its others as well: ``_init_weights`` draws a weight
# before it sets the buffer beside it. A blank lets itself be written, draws no random numbers for it, and
# takes no memory, however large it says that it is. Unlike a tensor on the meta device it is where the
# others are, so that ``torch.arange(n, device=self.weight.device)`` means what it says.


class PlaceholderTensor(torch.Tensor):
    """Shape, dtype and device of a tensor; a write changes nothing, a read raises a ``RuntimeError``."""

    is_meta: Any = True
    """There is nothing to sample, as PyTorch's ``trunc_normal_`` asks, which else looks at what it drew."""
    __torch_function__: ClassVar[Any] = torch._C._disabled_torch_function_impl
    _meta: torch.Tensor
    _name: str

    @staticmethod
    def __new__(cls, meta: torch.Tensor, device: torch.device, name: str) -> PlaceholderTensor:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=device,
        )
        made._meta, made._name = meta, name
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Blank({self._name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Do what needs no values."""
        given = kwargs or {}
        first = next(x for x in tree.tree_leaves((args, given)) if isinstance(x, PlaceholderTensor))
        if func.is_view:
            found = func(*_each(_shape_of, args), **_each(_shape_of, given))
            return _each(lambda x: PlaceholderTensor(x, first.device, first._name), found)
        if _is_new(func):
            return func(*_each(_any_like, args), **_each(_any_like, given))
        written = list(_written(func, args, given))
        if not written or not all(isinstance(x, PlaceholderTensor) for x in written):
            raise RuntimeError(f"{first._name} has no values then, and {func} reads them")
        returned = len(func._schema.returns)
        return None if not returned else written[0] if returned == 1 else tuple(written)


def placeholder_like(x: torch.Tensor, device: torch.device, name: str) -> torch.Tensor:
    """As large as all of ``x``, and a parameter if it is one."""
    made: torch.Tensor = PlaceholderTensor(
        torch.empty(x.shape, dtype=x.dtype, device="meta"), device, name
    )
    return nn.Parameter(made, x.requires_grad) if isinstance(x, nn.Parameter) else made


def _each(change: Callable[[torch.Tensor], torch.Tensor], x: Any) -> Any:
    return tree.tree_map_only(torch.Tensor, change, x)


def _shape_of(x: torch.Tensor) -> torch.Tensor:
    return x._meta if isinstance(x, PlaceholderTensor) else x


def _any_like(x: torch.Tensor) -> torch.Tensor:
    """One number in the place of all, for what looks at shape, dtype and device only."""
    if not isinstance(x, PlaceholderTensor):
        return x
    return torch.empty((), dtype=x.dtype, device=x.device).expand(x.shape)


def _is_new(func: Any) -> bool:
    """True if it makes another tensor, of other values: ``zeros_like``, ``new_empty``."""
    name: str = func._schema.name.removeprefix("aten::")
    return name.endswith("_like") or name.startswith("new_")


def _written(func: Any, args: Sequence[Any], given: Mapping[str, Any]) -> Iterator[Any]:
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[at] if at < len(args) else given.get(argument.name)
            yield from value if isinstance(value, list) else [value]


# Values that are set whole on every rank, and what that takes.


@dataclass
class WholeValues:
    """Some of a module's own values, whole within the block, so that they are set as in one process.

    They draw as many random numbers, on every rank. The module's other parameters have no values in the
    block and take no memory, so nothing is made whole that is not set; its other buffers have copies of
    theirs. All of them are as they were afterwards, whatever was written.
    """

    module: nn.Module
    names: Collection[str]
    """Of what is set."""
    path: str = ""
    """The module's, for errors."""
    again: Collection[str] = ()
    """Of what is set too, and had values before that it keeps: tied parameters."""
    unread: Collection[str] = ()
    """Of buffers whose values come later."""
    _held: dict[str, torch.Tensor] = field(default_factory=dict, init=False)

    @contextmanager
    def block(self, device: torch.device) -> Iterator[None]:
        """Where values are whole; afterwards the module has what it had.

        Args:
            device: where all ranks of the parameters' meshes compute.
        """
        try:
            self._enter(device)
            yield
        finally:
            _put(self.module, self._held)
            self._held = {}

    def _enter(self, device: torch.device) -> None:
        own = {**self.module._parameters, **self.module._buffers}
        held = {
            name: x
            for name, x in own.items()
            if x is not None and not (name in self.names and _is_whole_on(device, x))
        }
        made: dict[int, torch.Tensor] = {
            id(x): x for name, x in own.items() if x is not None and name not in held
        }
        for name, x in sorted(held.items(), key=lambda pair: pair[0] not in self.names):
            if id(x) not in made:  # one that has two names here is one in the block too
                made[id(x)] = self._stand_in(name, x, device)
        _put(self.module, {name: made[id(x)] for name, x in held.items()})
        self._held = held

    def _stand_in(self, name: str, x: torch.Tensor, device: torch.device) -> torch.Tensor:
        if not self._has_memory(name, x):
            return placeholder_like(x, device, name)
        with room_for_whole(self._named(name), x, device):
            if name not in self.names and name not in self.again:
                return x.detach().to(device, copy=True)
            made = torch.empty(x.shape, dtype=x.dtype, device=device)
        return nn.Parameter(made, x.requires_grad) if isinstance(x, nn.Parameter) else made

    def _has_memory(self, name: str, x: torch.Tensor) -> bool:
        """True if it has some of its own in the block, of what is not whole where it is."""
        if name in self.names or name in self.again:
            return True
        return not isinstance(x, nn.Parameter | DTensor) and name not in self.unread

    def _named(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def values(self) -> dict[str, torch.Tensor]:
        """The tensors that are set; to be called in the block."""
        return {name: getattr(self.module, name) for name in self.names}

    def keep(self, values: Mapping[str, torch.Tensor]) -> None:
        """Have this rank's part of them; to be called after the block."""
        for name, whole in values.items():
            part = getattr(self.module, name)
            if part is not whole:
                with room_for_whole(self._named(name), whole, whole.device):
                    _keep_part(part, whole)

    def parts(
        self, apart: bool, dtype_of: Callable[[torch.Tensor], torch.dtype]
    ) -> list[TensorMemory]:
        """The bytes that the block takes beside the model, before it has memory itself.

        Args:
            apart: the block is on another device than the model.
            dtype_of: what each is going to have.
        """
        found: dict[int, TensorMemory] = {}
        for name, x in {**self.module._parameters, **self.module._buffers}.items():
            if x is None or id(x) in found or not self._has_memory(name, x):
                continue
            taken = 0
            if name not in self.names or apart or isinstance(x, DTensor):
                taken = x.numel()
            if name in self.names and isinstance(x, DTensor):
                taken += local_part(x).numel()  # while this rank's part is copied
            if name in self.names and not has_nan(x):
                taken += x.numel()  # while it is set twice
            found[id(x)] = TensorMemory(self._named(name), x.shape, taken * dtype_of(x).itemsize)
        return list(found.values())

    def numel(self) -> int:
        """The number of values with memory in the block."""
        own = {**self.module._parameters, **self.module._buffers}
        having = {id(x): x for k, x in own.items() if x is not None and self._has_memory(k, x)}
        return sum(x.numel() for x in having.values())

    @contextmanager
    def must_not_read(self, error: type[LightningCPError]) -> Iterator[None]:
        """Say what would help where something in the block asks for values that are not there."""
        try:
            yield
        except (RuntimeError, TypeError) as raised:  # of PyTorch, too: not all comes to a Blank
            without = [
                name
                for name in self._held
                if isinstance(getattr(self.module, name), PlaceholderTensor)
            ]
            if isinstance(raised, LightningCPError) or not without:
                raise
            kind = type(self.module).__name__
            raise error(
                f"{self.path or 'the model'} ({kind}) failed when its {', '.join(self.names)} got values: "
                f"{raised}. There {', '.join(without)} can be written, but not read, so that nothing is made "
                "whole that is not set. Give the module a method reset_buffers() that sets what no file "
                "holds without reading what they hold, or pass initialize=."
            ) from raised


def _is_whole_on(device: torch.device, x: torch.Tensor) -> bool:
    return x.device == device and not isinstance(x, DTensor)


def _put(module: nn.Module, states: Mapping[str, torch.Tensor]) -> None:
    """Have a module's own states replaced, past what its ``__setattr__`` would do."""
    for name, x in states.items():
        held: dict[str, Any] = module._buffers if name in module._buffers else module._parameters
        held[name] = x


def _keep_part(part: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy what this rank holds of a tensor that every rank has whole."""
    if isinstance(part, DTensor):
        own = distribute_tensor(whole, part.device_mesh, part.placements, src_data_rank=None)
        whole = own.to_local()
    local_part(part).copy_(whole)


def is_on_meta(module: nn.Module) -> bool:
    """True if any parameter or buffer has no values."""
    return any(x.is_meta for x in [*module.parameters(), *module.buffers()])


def is_sharded(module: nn.Module) -> bool:
    """True if a part of it was given to FSDP; by names, as none of it need be imported."""
    kinds = {kind.__name__ for part in module.modules() for kind in type(part).__mro__}
    return bool(kinds & {"FSDPModule", "FullyShardedDataParallel"})


def check_has_values(module: nn.Module, data_parallel: str) -> None:
    """Refuse a model on the meta device, where nothing gives it values, and one that is sharded already.

    Raises:
        ConfigError: naming what does.
    """
    if is_sharded(module):
        raise ConfigError(
            f"{type(module).__name__} is sharded already (by fully_shard or FSDP, or by an earlier run that "
            f"shards), and data_parallel={data_parallel!r} keeps it whole on every rank. Use "
            "data_parallel='fsdp' for this run too; or build it again, unsharded, and load a full "
            "checkpoint of it."
        )
    if is_on_meta(module):
        raise ConfigError(
            f"{type(module).__name__} is on the meta device, which data_parallel={data_parallel!r} cannot "
            "train. Build it on a real device, pass pretrained=, or use data_parallel='fsdp', which "
            "initialises each rank's part by itself."
        )


def initialise(
    model: nn.Module, device: torch.device, group: dist.ProcessGroup, *, offload: bool = False
) -> None:
    """Give everything on the meta device memory and values: those of the group's first rank.

    Args:
        model: sharded already.
        device: where it computes, and where values are drawn.
        group: ranks that train one model.
        offload: parameters live in host memory.

    Raises:
        ConfigError: a module that nothing initialises, or that leaves values out.
    """
    unset = meta_tensors(model)
    owners = [(name, m) for name, m in model.named_modules() if m in unset]
    ways = _ways(model, owners)
    materialize(model, torch.device("cpu") if offload else device, None)
    for _, module in owners:
        module._buffers.update(
            {k: x.to(device) for k, x in module._buffers.items() if x is not None}
        )
    done: set[int] = set()
    for name, module in owners:
        # tied: the first one's values are kept, and the others are drawn as in one process
        first = [x for x in unset[module] if id(getattr(module, x)) not in done]
        done.update(id(getattr(module, x)) for x in first)
        again = [x for x in unset[module] if x not in first]
        whole = WholeValues(module, first, name, again=again)
        with torch.no_grad():
            with whole.block(device):
                with whole.must_not_read(ConfigError):
                    left = run_initializers(module, unset[module], ways[module], name)
                _check_all_set(name or type(module).__name__, left)
                values = whole.values()
            copy_from_first_rank([*values.values()], device, group)
            whole.keep(values)


def _ways(
    model: nn.Module, owners: Sequence[tuple[str, nn.Module]]
) -> dict[nn.Module, list[Initialize]]:
    ways = initializers_of(model, (owner for _, owner in owners))
    for name, owner in owners:
        if not ways[owner]:
            raise ConfigError(
                f"{name or type(owner).__name__} ({type(owner).__name__}) was built on the meta device, and "
                "nothing says what its values are. Give it a method reset_parameters() that sets its own "
                "parameters and buffers, build it on a real device, or pass pretrained=."
            )
    return ways


def _check_all_set(name: str, left: Sequence[str]) -> None:
    if left:
        raise ConfigError(
            f"{name} left {', '.join(left)} without values when it was initialised. Have its "
            "reset_parameters() set all of its own parameters and buffers, or build it on a real device."
        )
