"""Initial values of models that were built on the meta device, after sharding.

One module after the other, in the order of construction, gets whole parameters, initialises them in the usual
way, and keeps its rank's part. So only one module's parameters are ever whole, and modules that draw random
numbers in ``reset_parameters`` draw those of one process with the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
    Names,
    copy_from_first_rank,
    has_nan,
    initializers_of,
    materialize,
    meta_tensors,
    run_initializers,
)
from lightning_cp.checkpoint.pretrained.memory import TensorMemory, room_for_whole
from lightning_cp.checkpoint.pretrained.options import without_values
from lightning_cp.comm.consensus import World
from lightning_cp.errors import CheckpointError, ConfigError, LightningCPError
from lightning_cp.utils.dtensor import is_on_meta, is_sharded, local_part
from lightning_cp.utils.patching import strip_wrappers

# Placeholders for tensors whose values are not available.
#
# A function that sets one of a module's tensors often writes its others as well: ``_init_weights`` draws a
# weight before it sets the buffer beside it. A placeholder accepts writes, draws no random numbers for them,
# and needs no memory for any shape. Unlike a meta tensor it is on the device of the others, so that
# ``torch.arange(n, device=self.weight.device)`` works.


class PlaceholderTensor(torch.Tensor):
    """Shape, dtype and device of a tensor; a write changes nothing, a read raises a ``RuntimeError``."""

    is_meta: Any = True
    """True, as PyTorch's ``trunc_normal_`` tests before it reads the drawn values."""
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
        return f"PlaceholderTensor({self._name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run functions that need no values."""
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
    """A placeholder with the full shape of ``x``; a parameter if ``x`` is one."""
    made: torch.Tensor = PlaceholderTensor(
        torch.empty(x.shape, dtype=x.dtype, device="meta"), device, name
    )
    return nn.Parameter(made, x.requires_grad) if isinstance(x, nn.Parameter) else made


def _each(change: Callable[[torch.Tensor], torch.Tensor], x: Any) -> Any:
    return tree.tree_map_only(torch.Tensor, change, x)


def _shape_of(x: torch.Tensor) -> torch.Tensor:
    return x._meta if isinstance(x, PlaceholderTensor) else x


def _any_like(x: torch.Tensor) -> torch.Tensor:
    """One number expanded to the shape, for functions that read only shape, dtype and device."""
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


# Values that are set whole on every rank, and the memory for them.


@dataclass
class WholeValues:
    """Some of a module's own values, whole within the block, so that they are set as in one process.

    Every rank draws the same random numbers. The module's other parameters are placeholders in the block, so
    only tensors that are set are whole; its other buffers are copies. All others are restored afterwards.
    """

    module: nn.Module
    names: Collection[str]
    """Names of the tensors that are set."""
    path: str = ""
    """Name of the module, for errors."""
    tied: Collection[str] = ()
    """Names of tensors that are set too, but keep their earlier values: tied parameters."""
    pending: Collection[str] = ()
    """Names of buffers whose values come later."""
    _held: dict[str, torch.Tensor] = field(default_factory=dict, init=False)

    @contextmanager
    def block(self, device: torch.device) -> Iterator[None]:
        """A block with whole values; afterwards the module has its former tensors.

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
            if id(x) not in made:  # tied names stay tied in the block
                made[id(x)] = self._placeholder(name, x, device)
        _put(self.module, {name: made[id(x)] for name, x in held.items()})
        self._held = held

    def _placeholder(self, name: str, x: torch.Tensor, device: torch.device) -> torch.Tensor:
        if not self._has_memory(name, x):
            return placeholder_like(x, device, name)
        with room_for_whole(self._named(name), x, device):
            if name not in self.names and name not in self.tied:
                return x.detach().to(device, copy=True)
            made = torch.empty(x.shape, dtype=x.dtype, device=device)
        return nn.Parameter(made, x.requires_grad) if isinstance(x, nn.Parameter) else made

    def _has_memory(self, name: str, x: torch.Tensor) -> bool:
        """True if it needs memory in the block: it is not whole on this device already."""
        if name in self.names or name in self.tied:
            return True
        return not isinstance(x, nn.Parameter | DTensor) and name not in self.pending

    def _named(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def values(self) -> dict[str, torch.Tensor]:
        """The tensors that are set; to be called within the block."""
        return {name: getattr(self.module, name) for name in self.names}

    def store(self, values: Mapping[str, torch.Tensor]) -> None:
        """Store this rank's part of them; to be called after the block."""
        for name, whole in values.items():
            part = getattr(self.module, name)
            if part is not whole:
                with room_for_whole(self._named(name), whole, whole.device):
                    _keep_part(part, whole)

    def parts(
        self, other_device: bool, dtype_of: Callable[[torch.Tensor], torch.dtype]
    ) -> list[TensorMemory]:
        """Bytes that the block needs beside the model, before the model is allocated.

        Args:
            other_device: the block is on another device than the model.
            dtype_of: the final dtype of each tensor.
        """
        found: list[TensorMemory] = []
        for name, x in self._with_memory():
            taken = 0
            if name not in self.names or other_device or isinstance(x, DTensor):
                taken = x.numel()
            if name in self.names and isinstance(x, DTensor):
                taken += local_part(x).numel()  # for the copy of this rank's part
            if name in self.names and not has_nan(x):
                taken += x.numel()  # while it is set twice
            found.append(TensorMemory(self._named(name), x.shape, taken * dtype_of(x).itemsize))
        return found

    def numel(self) -> int:
        """The number of values with memory in the block."""
        return sum(x.numel() for _, x in self._with_memory())

    def _with_memory(self) -> list[tuple[str, torch.Tensor]]:
        """Tensors with memory of their own in the block, each once."""
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for name, x in {**self.module._parameters, **self.module._buffers}.items():
            if x is not None and self._has_memory(name, x):
                found.setdefault(id(x), (name, x))
        return [*found.values()]

    @contextmanager
    def explain_reads(self, error: type[LightningCPError]) -> Iterator[None]:
        """Raise with advice if the block reads values that are not available."""
        try:
            yield
        except (
            RuntimeError,
            TypeError,
        ) as raised:  # PyTorch's too: not all calls reach a placeholder
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
    """Replace a module's tensors without its ``__setattr__``."""
    for name, x in states.items():
        held: dict[str, Any] = module._buffers if name in module._buffers else module._parameters
        held[name] = x


def _keep_part(part: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy this rank's part of a tensor that every rank has whole."""
    if isinstance(part, DTensor):
        own = distribute_tensor(whole, part.device_mesh, part.placements, src_data_rank=None)
        whole = own.to_local()
    local_part(part).copy_(whole)


def check_has_values(module: nn.Module, data_parallel: str) -> None:
    """Check that a model is not on the meta device, where nothing initialises it, and not sharded already.

    Raises:
        ConfigError: naming settings that work.
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


# Tensors on the meta device get values: of a whole model, or of what no file holds.


LOADING = "loading pretrained weights"
_TOGETHER = 2**20
"""Values of several small modules that are set before ranks exchange them."""


class UnsetTensors:
    """Tensors on the meta device of a model that is sharded already, set by its modules.

    Args:
        model: the model.
        unset: the tensors. Tied ones keep the first one's values; the others are drawn as in one process.
        initialize: the user's own way; by default that of modules or of their model.
        unread: buffers whose values come later.

    Raises:
        ConfigError: a module that nothing sets.
    """

    error: type[LightningCPError] = ConfigError
    doing = "initialising the model"
    no_way = (
        "{path} ({kind}) was built on the meta device, and nothing says what its values are. Give it a "
        "method reset_parameters() that sets its own parameters and buffers, build it on a real device, or "
        "pass pretrained=."
    )
    incomplete = (
        "{path} left {names} without values when it was initialised. Have its reset_parameters() set all of "
        "its own parameters and buffers, or build it on a real device."
    )
    root = "{kind}"
    """The path of the model itself, for messages."""

    def __init__(
        self,
        model: nn.Module,
        unset: Names,
        initialize: Initialize | None = None,
        unread: Names | None = None,
    ) -> None:
        self._owners = [
            (strip_wrappers(path), x) for path, x in model.named_modules() if x in unset
        ]
        self._unset, self._unread = unset, unread or {}
        if initialize is None:
            self._ways = initializers_of(model, unset)
        else:
            self._ways = {module: [initialize] for module in unset}
        done: set[int] = set()
        self._first: Names = {}
        for path, module in self._owners:
            if not self._ways[module]:
                raise self._refusal(self.no_way, path, module, unset[module])
            tensors = {name: id(getattr(module, name)) for name in unset[module]}
            self._first[module] = [name for name, x in tensors.items() if x not in done]
            done.update(tensors.values())

    def _refusal(
        self, text: str, path: str, module: nn.Module, names: Sequence[str]
    ) -> LightningCPError:
        given = {"kind": type(module).__name__, "names": ", ".join(names), "first": names[0]}
        return self.error(text.format(path=path or self.root.format(**given), **given))

    def groups(self) -> Iterator[list[WholeValues]]:
        """Modules that are whole at a time: one, or several small ones, as ranks wait for each group."""
        group: list[WholeValues] = []
        held = 0
        for path, module in self._owners:
            first = self._first[module]
            again = [name for name in self._unset[module] if name not in first]
            whole = WholeValues(module, first, path, again, self._unread.get(module, ()))
            held += (more := whole.numel())
            if group and held > _TOGETHER:
                yield group
                group, held = [], more
            group.append(whole)
        if group:
            yield group

    def set(
        self,
        device: torch.device,
        now: Callable[[str], None] = lambda doing: None,
        *,
        ranks: dist.ProcessGroup | None = None,
    ) -> None:
        """Values for all of it, those of the first rank. Collective.

        Args:
            device: where they are drawn; ranks exchange tensors of this kind.
            now: called with the step that begins.
            ranks: that get the same values; by default all.

        Raises:
            LightningCPError: ``error``, of a module that left something without a value.
            RankFailure: another rank has raised.
        """
        if ranks is None and dist.is_initialized():
            ranks = dist.group.WORLD
        for group in self.groups():
            values: list[dict[str, torch.Tensor]] = []
            with torch.no_grad(), World().raising_on_all(device.type, what=self.doing):
                for whole in group:
                    now(f"setting {whole.path or type(whole.module).__name__}")
                    values.append(self._draw(whole, device))
                    whole.store(values[-1])  # which the next ones may read
            if ranks is not None:
                copy_from_first_rank([x for some in values for x in some.values()], device, ranks)
            with torch.no_grad(), World().raising_on_all(device.type, what=self.doing):
                for whole, some in zip(group, values, strict=True):
                    whole.store(some)

    def _draw(self, whole: WholeValues, device: torch.device) -> dict[str, torch.Tensor]:
        module, path = whole.module, whole.path
        with whole.block(device):
            with whole.explain_reads(self.error):
                left = run_initializers(module, self._unset[module], self._ways[module], path)
            if left:
                raise self._refusal(self.incomplete, path, module, left)
            return whole.values()


def initialise(
    model: nn.Module, device: torch.device, group: dist.ProcessGroup, *, offload: bool = False
) -> None:
    """Allocate everything on the meta device, with the initial values of the group's first rank.

    Args:
        model: sharded already.
        device: of computation and of drawn values.
        group: ranks that train one model.
        offload: parameters are in host memory.

    Raises:
        ConfigError: a module that nothing initialises, or that leaves values out.
        RankFailure: another rank has raised.
    """
    unset = meta_tensors(model)
    tensors = UnsetTensors(model, unset)
    materialize(model, torch.device("cpu") if offload else device, None)
    move_buffers(unset, device)
    tensors.set(device, ranks=group)


def move_buffers(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Bring modules' own buffers to where they are used: only parameters are offloaded."""
    for module in modules:
        module._buffers.update(
            {k: x.to(device) for k, x in module._buffers.items() if x is not None}
        )


class UnsavedTensors(UnsetTensors):
    """Tensors on the meta device and in no file; tied ones once.

    Args:
        model: sharded already, if it is to be.
        in_files: ids of the tensors that files hold.
        initialize: the user's own way; by default that of modules or of their model.

    Raises:
        CheckpointError: a module that nothing sets.
    """

    error = CheckpointError
    doing = LOADING
    no_way = (
        "{path} ({kind}) has buffers or parameters on the meta device that the checkpoint does not hold "
        "({names}), and nothing says what their values are. Give the module a method reset_buffers() or "
        "reset_parameters() that sets them, pass initialize=, or build it on a real device. Nothing was "
        "loaded."
    )
    incomplete = (
        "{kind} left its {first} without a value when it was made again. Have its reset_buffers() or "
        "reset_parameters() set it, or pass initialize=."
    )
    root = "the model"

    def __init__(
        self, model: nn.Module, in_files: Collection[int], initialize: Initialize | None
    ) -> None:
        unset = _not_in_files(model, in_files)
        unread = {
            module: [name for name, x in module._buffers.items() if id(x) in in_files]
            for module in unset
        }
        super().__init__(model, unset, initialize, unread)

    def check_same(self, dtype_of: Callable[[torch.Tensor], torch.dtype]) -> None:
        """Refuse ranks that lack different things, since they are set on all of them together. Collective.

        Args:
            dtype_of: what each tensor is going to have.

        Raises:
            CheckpointError: on every rank, naming one that differs.
        """
        own: dict[str, str] = {}
        for path, module in self._owners:
            for name in self._unset[module]:
                x: torch.Tensor = getattr(module, name)
                own[f"{path}.{name}" if path else name] = f"{list(x.shape)} {dtype_of(x)}"
        for rank, other in enumerate(every := World().gather([*own.items()])):
            if other != every[0]:
                raise CheckpointError(
                    f"no file holds {_difference(dict(every[0]), dict(other), rank)}. Build the model in the "
                    "same way on every rank, with the same options. Nothing was loaded."
                )

    def parts(
        self, apart: bool, dtype_of: Callable[[torch.Tensor], torch.dtype]
    ) -> list[TensorMemory]:
        """The bytes that setting it takes beside the model: of the modules that take most together.

        Args:
            apart: values are set on another device than the model's.
            dtype_of: what each tensor is going to have.
        """
        every = [
            [part for whole in group for part in whole.parts(apart, dtype_of)]
            for group in self.groups()
        ]
        return max(every, key=lambda parts: sum(part.nbytes for part in parts), default=[])


def _difference(first: dict[str, str], other: dict[str, str], rank: int) -> str:
    """A line about what a rank lacks otherwise than the first one does."""
    names = (name for name in {**first, **other} if first.get(name) != other.get(name))
    name = next(names, None)
    if name is None:
        return "the same on all ranks, but in another order"
    if name in first and name in other:
        return f"{name}, which is {first[name]} on rank 0 and {other[name]} on rank {rank}"
    return f"{name}, which is on the meta device on one of the ranks 0 and {rank} only"


def _not_in_files(model: nn.Module, in_files: Collection[int]) -> Names:
    """Tensors with none now and, by their ids, in no file; tied ones once."""
    seen = set(in_files)
    found: Names = {}
    for module, names in without_values(model).items():
        for name in names:
            if id(getattr(module, name)) not in seen:
                seen.add(id(getattr(module, name)))
                found.setdefault(module, []).append(name)
    return found
