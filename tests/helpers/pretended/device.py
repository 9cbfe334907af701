"""A pretended CUDA device: CPU tensors that say they are on ``cuda:N``, with real memory and real arithmetic.

It sees what a GPU punishes and a CPU does not: an operator that gets tensors of both devices raises
``MixedDevicesError``, and what makes the host wait for the device is noted with its place.

Below Python a pretended tensor is a CPU tensor, so gloo, DDP, FSDP2 and autograd run as they are. All
operators pass ``_PretendedOperators``, which tells the devices apart by the class of a tensor.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import lightning_cp
from lightning_cp import mesh
from lightning_cp.comm import groups
from tests.helpers.pretended.cuda import cuda_functions

OURS = str(Path(lightning_cp.__file__).parent)
_NOT_CALLERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")
"""Beginnings of files that do not cause a wait: they do what their caller asks for."""


class MixedDevicesError(RuntimeError):
    """An operator got tensors of the device and of the host."""


@dataclass(frozen=True)
class Wait:
    """The host waited for the device.

    Args:
        kind: the operator, or the kind of copy.
        place: ``file:line`` of the caller; of this package, from its root.
        is_ours: the caller is of this package.
        phase: what ``PretendedDevice.phase`` was.
    """

    kind: str
    place: str
    is_ours: bool
    phase: str


class PretendedTensor(torch.Tensor):
    """A tensor in the memory of the host that says it is on the device."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def __new__(cls, memory: torch.Tensor) -> PretendedTensor:
        return torch.Tensor._make_subclass(cls, memory)

    @classmethod
    def __torch_dispatch__(  # pyright: ignore[reportAssignmentType]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator outside of the modes, such as of another thread."""
        return current().run(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return current().device

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def get_device(self) -> int:
        return current().device.index

    def __repr__(self, **_: Any) -> str:
        return f"<{tuple(self.shape)} {self.dtype} on {current().device}>"

    # C++ would see a CPU tensor that stays where it is, or read its memory.

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return current().move(self, *args, **kwargs)

    def cpu(self, memory_format: Any = torch.preserve_format) -> torch.Tensor:
        return current().move(self, "cpu")

    def cuda(self, device: Any = None, *_: Any, **__: Any) -> torch.Tensor:
        return self

    def record_stream(self, s: Any) -> None: ...

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy.")

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy.")

    def new_tensor(self, data: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        return torch.tensor(data, **{"dtype": self.dtype, "device": self.device, **kwargs})


class PretendedDevice:
    """The device of one rank, and what happened on it.

    Args:
        index: its number.
    """

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        self.waits: list[Wait] = []
        self.phase = ""
        """What goes on, for the waits from here on."""
        self.copied: Counter[tuple[str, str]] = Counter()
        """Bytes from host to device and back, by (phase, direction)."""
        self._pinned: set[int] = set()
        """Addresses of pinned memory."""
        self._host_groups: set[str] = set()
        """Names of groups that are gloo's on a GPU, too."""
        self._is_moving = False
        self._from_device = threading.local()

    @contextmanager
    def use(self) -> Iterator[PretendedDevice]:
        """A block in which ``cuda:N`` exists, and is the current device."""
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(_Current, "device", self))
            stack.enter_context(cuda_functions(self.device.index, self.note))
            stack.enter_context(_moving_modules())
            stack.enter_context(mock.patch.object(mesh, "gloo_group", self._host_group))
            stack.enter_context(mock.patch.object(torch.Tensor, "_make_subclass", _make_subclass))
            grouped = self._grouped(torch._C._group_tensors_by_device_and_dtype)
            stack.enter_context(
                mock.patch.object(torch._C, "_group_tensors_by_device_and_dtype", grouped)
            )
            for name in ("_ddp_init_helper", "_pre_forward"):  # DDP makes its buckets there, in C++
                own = getattr(DistributedDataParallel, name)
                made = self._computing_in(own)
                stack.enter_context(mock.patch.object(DistributedDataParallel, name, made))
            stack.enter_context(_PretendedOperators(self))
            functions = stack.enter_context(_PretendedFunctions(self))
            engine = functions.again_in(torch.autograd._engine_run_backward)  # type: ignore[attr-defined]
            stack.enter_context(mock.patch.object(torch.autograd, "_engine_run_backward", engine))
            yield self

    def note(self, kind: str) -> None:
        """Note that the host waits here."""
        place, is_ours = _caller()
        self.waits.append(Wait(kind, place, is_ours, self.phase))

    # -- operators --------------------------------------------------------------------------------------

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator as the device would, and wrap what is on the device.

        Raises:
            MixedDevicesError: of tensors of both devices.
        """
        name = func._schema.name
        tensors = [x for x in _leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        here = [x for x in tensors if isinstance(x, PretendedTensor)]
        goes_to = kwargs.get("device")
        if name in _MEMORY:
            return _MEMORY[name](self, func, args, kwargs)
        if name.startswith("c10d::") and name != "c10d::barrier":
            self._check_message(name, args)
        if name.startswith("aten::") and here:
            self._check_devices(name, tensors)
            self._note_waits(name, args, kwargs)
        on_device = bool(here) if goes_to is None else _is_cuda(goes_to)
        if goes_to is not None:
            if name == "aten::_to_copy" and here and not on_device and not self._is_moving:
                on_device = True  # C++ changes the dtype of what it takes for a CPU tensor
            elif name == "aten::_to_copy":
                self._note_copy(here, args[0], kwargs, to_device=on_device)
            elif not on_device and goes_to.type == "cpu" and not here and self.is_computing:
                on_device = True  # C++ makes a tensor beside one that it takes for a CPU tensor
            kwargs = {**kwargs, "device": torch.device("cpu") if _is_cuda(goes_to) else goes_to}
        pins = kwargs.get("pin_memory")
        if pins:
            kwargs = {**kwargs, "pin_memory": False}
        wrapped: dict[int, torch.Tensor] = {}

        def unwrap(x: Any) -> Any:
            if not isinstance(x, PretendedTensor):
                return x
            plain = memory_of(x)
            wrapped[id(plain)] = x
            return plain

        plain_args, plain_kwargs = _map_leaves(unwrap, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        if pins:
            self.pin(result)

        def wrap(x: Any) -> Any:
            if type(x) is not torch.Tensor or x.device.type != "cpu":
                return x
            if id(x) in wrapped:
                return wrapped[id(x)]
            is_input = any(x is one for one in tensors)
            return PretendedTensor(x) if on_device and not is_input else x

        return _map_leaves(wrap, result)

    def _check_devices(self, name: str, tensors: list[torch.Tensor]) -> None:
        if name in _COPIES:
            return
        strangers = [
            x
            for x in tensors
            if not isinstance(x, PretendedTensor)
            and x.device.type == "cpu"
            and (
                x.dim() or (name.endswith("_") and x is tensors[0])
            )  # a number, but not its memory
        ]
        if strangers:
            shapes = ", ".join(str(tuple(x.shape)) for x in strangers)
            raise MixedDevicesError(
                f"{name}: expected all tensors to be on {self.device}, got CPU tensors of shape {shapes}, "
                f"at {_caller()[0]}"
            )

    def _check_message(self, name: str, args: Any) -> None:
        """Check that the package sends what NCCL takes: contiguous tensors of the device and of known dtypes.

        Tensors of the host travel over groups of the host.
        """
        group = next((x for x in args if isinstance(x, torch.ScriptObject)), None)
        tensors = [x for x in _leaves(args) if isinstance(x, torch.Tensor)]
        if group is None or not _sends_itself():
            return
        known = dist.ProcessGroup.unbox(group).group_name in self._host_groups
        if not known and any(not isinstance(x, PretendedTensor) for x in tensors):
            raise MixedDevicesError(
                f"{name}: a tensor of the host over a group of {self.device}, at {_caller()[0]}"
            )
        strange = [x for x in tensors if not x.is_contiguous() or x.dtype in _NOT_OF_NCCL]
        if not known and strange:
            raise TypeError(f"{name}: NCCL takes no {strange[0]!r}, at {_caller()[0]}")

    def _host_group(self, partition: torch.Tensor) -> dist.ProcessGroup:
        """Return a group of the host, which a world of NCCL has beside its own."""
        made = groups.group_of(partition, "gloo")
        self._host_groups.add(made.group_name)
        return made

    def _note_waits(self, name: str, args: Any, kwargs: Any) -> None:
        if name in _WAITS or (name in _NEEDS_SIZE and kwargs.get("output_size") is None):
            self.note(name.removeprefix("aten::"))
        elif name == "aten::copy_":
            into, source = args[:2]
            asynchronous = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            if isinstance(into, PretendedTensor) != isinstance(source, PretendedTensor):
                to_device = isinstance(into, PretendedTensor)
                self._note_transfer(source, to_device, asynchronous)
        elif name in _INDEXED:
            for index in args[1]:
                if index is None or not isinstance(index, torch.Tensor):
                    continue
                if index.dtype in (torch.bool, torch.uint8):
                    self.note("index by a mask")
                elif not isinstance(index, PretendedTensor) and index.dim():
                    self.note("index from the host")

    def _note_copy(self, here: list[Any], x: torch.Tensor, kwargs: Any, *, to_device: bool) -> None:
        if bool(here) != to_device and x.device.type != "meta":
            self._note_transfer(x, to_device, kwargs.get("non_blocking", False))

    def _note_transfer(self, x: torch.Tensor, to_device: bool, asynchronous: bool) -> None:
        direction = "to device" if to_device else "to host"
        self.copied[self.phase, direction] += x.nbytes
        if not asynchronous:
            self.note(f"copy {direction}")
        elif to_device and not self.is_pinned(x):
            self.note("copy to device, of memory that is not pinned")

    def move(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """``x.to(..)``, for tensors of which C++ does not know the device."""
        device, dtype, asynchronous, copy = _destination(args, kwargs)
        is_here = isinstance(x, PretendedTensor)
        stays = device is None or _is_cuda(device) == is_here
        if stays:
            dtype = x.dtype if dtype is None else dtype
            with self.computing(is_here):
                return torch.Tensor.to(x, dtype, copy=copy)
        if x.requires_grad and torch.is_grad_enabled():
            return _Move.apply(x, device, dtype, asynchronous)  # type: ignore[no-any-return]
        return self.moved(x, device, dtype, asynchronous)

    def moved(
        self, x: torch.Tensor, device: Any, dtype: torch.dtype | None, asynchronous: bool
    ) -> torch.Tensor:
        """A copy on another device."""
        self._is_moving = True
        try:
            how: dict[str, Any] = {"dtype": dtype, "device": device, "non_blocking": asynchronous}
            return torch.ops.aten._to_copy(x.detach(), **how)
        finally:
            self._is_moving = False

    # -- pinned memory --------------------------------------------------------------------------------------

    def pin(self, x: torch.Tensor) -> torch.Tensor:
        """Take the memory of a tensor for pinned."""
        storage = x.untyped_storage()
        self._pinned.add(storage.data_ptr())
        weakref.finalize(storage, self._pinned.discard, storage.data_ptr())
        return x

    def is_pinned(self, x: torch.Tensor) -> bool:
        """True if the memory of a tensor is pinned."""
        return x.untyped_storage().data_ptr() in self._pinned

    # -- tensors that C++ makes by itself ------------------------------------------------------------------

    @property
    def is_computing(self) -> bool:
        """True within a function of tensors of the device."""
        return getattr(self._from_device, "computing", False)

    @contextmanager
    def computing(self, on_device: bool) -> Iterator[None]:
        """A block whose new tensors are on the device, or on the host."""
        before, self._from_device.computing = self.is_computing, on_device
        try:
            yield
        finally:
            self._from_device.computing = before

    def _grouped(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """``_group_tensors_by_device_and_dtype``, which takes a pretended tensor for one of the CPU."""

        def group(lists: Any, *args: Any) -> Any:
            groups = own(lists, *args).items()
            return {
                (self.device if isinstance(found[0][0][0], PretendedTensor) else at, dtype): found
                for (at, dtype), found in groups
            }

        return group

    def _computing_in(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.computing(True):
                return own(*args, **kwargs)

        return call


class _Current:
    device: PretendedDevice | None = None


def current() -> PretendedDevice:
    """The device that is in use."""
    assert _Current.device is not None, "a pretended tensor outside of PretendedDevice.use()"
    return _Current.device


class _PretendedOperators(TorchDispatchMode):
    """Runs operators on both devices."""

    def __init__(self, device: PretendedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(x, FakeTensor) for x in _leaves((args, kwargs))):
            return func(*args, **(kwargs or {}))  # shapes alone are computed
        if any(kind not in _KINDS for kind in types):
            return NotImplemented  # a DTensor, whose own operators come here
        return self._device.run(func, args, kwargs or {})


class _PretendedFunctions(TorchFunctionMode):
    """Knows the devices of a function's tensors, where C++ forgets them."""

    def __init__(self, device: PretendedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OF_DEVICE and type(args[0]) is DTensor:  # for which it asks C++
            return getattr(args[0].to_local(), _OF_DEVICE[func])
        if kwargs.get("device") is not None and _is_cuda(kwargs["device"]):
            kwargs = {
                **kwargs,
                "device": self._device.device,
            }  # with its number, which C++ would ask for
        if func is torch.Tensor.tolist and isinstance(args[0], PretendedTensor):
            return args[0].tolist()
        if func in _FROM_DATA and kwargs.get("device") == self._device.device:
            if func is torch.as_tensor and isinstance(args[0], torch.Tensor):
                return self._device.move(*args, **kwargs)
            requires_grad = kwargs.pop("requires_grad", False)  # which as_tensor does not take
            made = func(*args, **{**kwargs, "device": "cpu"})
            return self._device.move(made, self._device.device).requires_grad_(requires_grad)
        if func in _MOVES and type(args[0]) in (torch.Tensor, nn.Parameter):
            where = _to_arguments(func, args)
            device = _destination(where, kwargs)[0]
            if device is not None and device.type == "cuda":
                return self._device.move(args[0], *where, **kwargs)
        if func in _MOVES and type(args[0]) is DTensor and not torch.is_grad_enabled():
            device = _destination(_to_arguments(func, args), kwargs)[0]
            if device is not None:  # C++ takes it for one of the CPU, which stays where it is
                part = args[0]._local_tensor
                moved = self._device.move(part, *_to_arguments(func, args), **kwargs)
                return args[0] if moved is part else _with_part(args[0], moved)
        found = any(isinstance(x, PretendedTensor) for x in _leaves((args, kwargs)))
        with self._device.computing(found and kwargs.get("device") is None):
            return func(*args, **kwargs)

    def again_in(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """A function of PyTorch that calls Python code, with this mode in it."""

        def call(roots: Any, *args: Any, **kwargs: Any) -> Any:
            on_device = any(isinstance(x, PretendedTensor) for x in roots)
            with self, self._device.computing(on_device):
                return own(roots, *args, **kwargs)

        return call


class _Move(torch.autograd.Function):
    """Another device, and the gradient's way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *how: Any) -> torch.Tensor:
        ctx.back = x.device, x.dtype
        return current().moved(x, *how)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return current().move(gradient, *ctx.back), None, None, None


def memory_of(x: torch.Tensor) -> torch.Tensor:
    """The plain CPU tensor that shares the memory of a pretended one, as it is now."""
    plain = torch.empty(0, dtype=x.dtype)
    return plain.set_(x.untyped_storage(), x.storage_offset(), x.size(), x.stride())


def _leaves(tree: Any) -> Iterator[Any]:
    """As PyTorch's ``tree_leaves``, of sequences and dicts alone, in a fraction of its time."""
    if isinstance(tree, (tuple, list)):
        for part in tree:
            yield from _leaves(part)
    elif isinstance(tree, dict):
        yield from _leaves(tuple(tree.values()))
    else:
        yield tree


def _map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """As PyTorch's ``tree_map``, in a fraction of its time for plain sequences and dicts."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind([_map_leaves(function, part) for part in tree])
    if kind is dict:
        return {name: _map_leaves(function, part) for name, part in tree.items()}
    return tree_map(function, tree) if isinstance(tree, (tuple, list, dict)) else function(tree)


def _is_cuda(device: Any) -> bool:
    return torch.device(device).type == "cuda"


def _destination(args: Any, kwargs: Any) -> tuple[Any, torch.dtype | None, bool, bool]:
    """Device, dtype, non_blocking and copy of the arguments of ``Tensor.to``."""
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    flags: list[bool] = []
    for value in (*args, *([kwargs["other"]] if "other" in kwargs else [])):
        if isinstance(value, torch.Tensor):
            device, dtype = value.device, value.dtype
        elif isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, bool):
            flags.append(value)
        elif isinstance(value, (str, torch.device, int)):
            device = torch.device("cuda", value) if isinstance(value, int) else value
    asynchronous, copy = [*flags, False, False][:2]
    device = device if device is None else torch.device(device)
    if device is not None and device.type == "cuda":
        device = current().device
    return (
        device,
        dtype,
        kwargs.get("non_blocking", asynchronous),
        kwargs.get("copy", copy),
    )


def _to_arguments(func: Any, args: Any) -> tuple[Any, ...]:
    """Arguments of ``Tensor.to`` that do what a function of ``_MOVES`` does."""
    if func is torch.Tensor.to:
        return tuple(args[1:])
    if func is torch.Tensor.cpu:
        return (torch.device("cpu"),)
    return (current().device, *args[2:])


def _with_part(x: DTensor, part: torch.Tensor) -> DTensor:
    """The same sharded tensor with its part on another device."""
    return DTensor(part, x._spec, requires_grad=x.requires_grad)


def _pin(device: PretendedDevice, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    if isinstance(args[0], PretendedTensor):
        raise RuntimeError(
            "cannot pin 'torch.cuda.FloatTensor': only dense CPU tensors can be pinned"
        )
    return device.pin(args[0].clone())


def _says_pinned(device: PretendedDevice, func: Any, args: Any, kwargs: Any) -> bool:
    return device.is_pinned(args[0])


_NOT_OF_NCCL = {
    torch.int16,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex64,
    torch.complex128,
}
_KINDS = {PretendedTensor, torch.Tensor, nn.Parameter}
_MEMORY: dict[str, Callable[..., Any]] = {
    "aten::is_pinned": _says_pinned,
    "aten::pin_memory": _pin,
    "aten::_pin_memory": _pin,
}
_COPIES = {"aten::copy_", "aten::_to_copy", "aten::index", "aten::index_put_", "aten::index_put"}
"""Operators that take tensors of both devices."""
_INDEXED = {"aten::index", "aten::index_put_", "aten::index_put"}
_WAITS = {
    f"aten::{name}"
    for name in (
        "_local_scalar_dense",
        "is_nonzero",
        "equal",
        "nonzero",
        "masked_select",
        "unique_dim",
        "_unique2",
        "unique_consecutive",
        "bincount",
    )
}
_OF_DEVICE: dict[Any, str] = {
    getattr(torch.Tensor, name).__get__: name for name in ("device", "is_cuda", "is_cpu")
}
_FROM_DATA = {torch.tensor, torch.as_tensor}
_MOVES = {torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu}
_NEEDS_SIZE = {"aten::repeat_interleave"}


def _caller() -> tuple[str, bool]:
    """``file:line`` of the innermost caller that is neither torch nor this file, and if it is ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_NOT_CALLERS):
            is_ours = name.startswith(OURS)
            shown = name.removeprefix(OURS + "/") if is_ours else "/".join(name.split("/")[-3:])
            return f"{shown}:{frame.f_lineno}", is_ours
        frame = frame.f_back
    return "?", False


def _sends_itself() -> bool:
    """True if the package calls the collective itself: DDP and collectives of objects choose a device."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(OURS):
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if name.endswith(("_object", "_object_list")) or "/nn/parallel/" in file:
            return False
        frame = frame.f_back
    # The maxima of scores travel as the world's backend wants them.
    return frame is not None and "/optim/" not in str(
        frame.f_back and frame.f_back.f_code.co_filename
    )


def _make_subclass(
    kind: type[torch.Tensor], x: torch.Tensor, *how: Any, **more: Any
) -> torch.Tensor:
    """A tensor of another class, which is on the host: C++ knows one class of a memory."""
    if isinstance(x, PretendedTensor) and not issubclass(kind, PretendedTensor):
        x = memory_of(x)
    return _own_make_subclass(kind, x, *how, **more)


_own_make_subclass = torch.Tensor._make_subclass


@contextmanager
def _moving_modules() -> Iterator[None]:
    """A module that moves gets new parameters: C++ would put memory of one class into another.

    One that is there already keeps them, as optimizers have them.
    """
    own = nn.Module.to

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        device, dtype = _destination(args, kwargs)[:2]
        tensors = [*module.parameters(), *module.buffers()]
        goes = device is not None and any(x.is_cuda != (device.type == "cuda") for x in tensors)
        changes = any(x.dtype != dtype for x in tensors if x.is_floating_point())
        if tensors and not goes and (dtype is None or not changes):
            return module
        return own(module, *args, **kwargs)

    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with mock.patch.object(nn.Module, "to", to):
            yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)
