"""State besides gradients that a micro-batch changes, for a replay: buffers, and callbacks that count."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lightning_cp.utils.dtensor import local_part

OF_STEPS = "state_is_of_steps"
"""True of callbacks whose state changes with an optimizer's step only: nothing is to be taken back."""
_PLAIN = (int, float, str, bool, type(None))


_Owned = tuple[nn.Module, str]
"""A buffer by the module that has it, and its name there."""


class Buffers:
    """Copies of modules' persistent buffers, as they were when they were kept last."""

    def __init__(self) -> None:
        self._copies: dict[_Owned, torch.Tensor] = {}

    def keep(self, modules: Iterable[nn.Module]) -> None:
        """Copy all of them, into the memory of the copies before.

        Which have changed is not asked: batch norm and ``.data`` write past a tensor's version, and comparing
        takes longer than copying, on a GPU with a wait for each.
        """
        copies: dict[_Owned, torch.Tensor] = {}
        values: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for owned, buffer in _persistent(modules):
            if owned in copies:
                continue
            own = self._copies.get(owned)
            if own is None or not _holds(own, buffer):
                copies[owned] = buffer.detach().clone()
                continue
            copies[owned] = own
            into, of = values.setdefault((own.device, own.dtype), ([], []))
            into.append(_here(own))
            of.append(_here(buffer))
        with torch.no_grad():
            for into, of in values.values():  # a GPU copies those of one dtype at once
                torch._foreach_copy_(into, of)
        self._copies = copies

    def put_back(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state of these modules with the copies in place of buffers.

        Which value is a buffer is told by its memory: modules may have several names, and wrappers and hooks
        of a state give others.
        """
        kept: dict[Hashable, torch.Tensor] = {}
        for (part, name), copy in self._copies.items():
            buffer = part._buffers.get(name)
            if buffer is not None and (memory := _memory(buffer)) is not None:
                kept[memory] = copy
        return {
            name: kept.get(_memory(x), x) if isinstance(x, torch.Tensor) else x
            for name, x in state.items()
        }


def _holds(copy: torch.Tensor, buffer: torch.Tensor) -> bool:
    """True if a buffer's value can be copied into that."""
    return (
        copy.shape == buffer.shape
        and copy.dtype == buffer.dtype
        and copy.device == buffer.device
        and isinstance(copy, DTensor) == isinstance(buffer, DTensor)
    )


def _here(x: torch.Tensor) -> torch.Tensor:
    return local_part(x) if isinstance(x, DTensor) else x


def _memory(x: torch.Tensor) -> Hashable:
    """Equal for tensors that are the same values in the same place; ``None`` if they are nowhere."""
    x = _here(x)
    if x.layout != torch.strided or not x.data_ptr():
        return None
    return x.device, x.data_ptr(), x.shape, x.stride(), x.dtype


def _persistent(modules: Iterable[nn.Module]) -> Iterator[tuple[_Owned, torch.Tensor]]:
    """Of the modules and all that they have; a part of several names comes as often."""
    parts: list[nn.Module | None] = list(modules)
    while parts:  # several times as fast as Module.modules(), and every step comes here
        part = parts.pop()
        if part is None:
            continue
        parts.extend(part._modules.values())
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield (part, name), buffer


_OTHER = object()
"""Stands for an attribute that is not copied."""


class CallbackStates:
    """Attributes of callbacks with a state: numbers and strings, in containers and dataclasses.

    ``state_dict`` itself is called when something is saved, as Lightning calls it, on a copy of the callback
    that has these attributes: it may be slow, or be counted. Callbacks that keep files are left alone.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[Any, dict[str, Any]]] = []

    def keep(self, trainer: Trainer) -> None:
        """Copy them."""
        callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        self._kept = [(each, _plain_attributes(each)) for each in callbacks if _is_followed(each)]

    def states(self) -> dict[str, Any]:
        """The states of then, of callbacks whose state holds nothing else."""
        found: dict[str, Any] = {}
        for callback, attributes in self._kept:
            then = object.__new__(type(callback))
            now = callback.__dict__
            then.__dict__ = {
                name: now.get(name, x) if x is _OTHER else x for name, x in attributes.items()
            }
            state = then.state_dict()
            if state and _is_plain(state):
                found[callback.state_key] = state
        return found


def _is_followed(callback: Any) -> bool:
    own = getattr(type(callback), "state_dict", Callback.state_dict)  # a test's stand-in has none
    has_state = own is not Callback.state_dict
    return has_state and not isinstance(callback, Checkpoint) and not getattr(callback, OF_STEPS, 0)


def _plain_attributes(callback: Any) -> dict[str, Any]:
    """All that it has, by name; for those that are something else ``_OTHER``."""
    copies: dict[str, Any] = dict.fromkeys(callback.__dict__, _OTHER)
    for name, value in callback.__dict__.items():
        with suppress(_NotPlainError):
            copies[name] = _copied(value)
    return copies


class _NotPlainError(Exception):
    pass


def _copied(state: Any) -> Any:
    """A deep copy; every step may come here with all that a callback has noted, so it has to be fast.

    Raises:
        _NotPlainError: it holds more than numbers and strings in containers.
    """
    kind = type(state)
    if kind in _PLAIN:
        return state
    if kind is dict:
        return {_copied(key): _copied(value) for key, value in state.items()}
    if kind is list or kind is tuple:
        return kind([x if type(x) in _PLAIN else _copied(x) for x in state])
    if not _is_plain(state):
        raise _NotPlainError
    return deepcopy(state)


def _is_plain(state: Any) -> bool:
    if isinstance(state, dict):
        return all(_is_plain(key) and _is_plain(value) for key, value in state.items())
    if isinstance(state, list | tuple):
        return all(_is_plain(value) for value in state)
    if is_dataclass(state) and not isinstance(state, type):
        return all(_is_plain(value) for value in vars(state).values())
    return isinstance(state, _PLAIN)


# The order in which DistributedDataParallel adds gradients up, which decides how sums are rounded.
#
# It puts parameters into buckets in the order in which they were registered, and after the first backward
# in that in which gradients come; with four ranks and more, where a number lies in a bucket decides in
# which order the ranks' parts are added. A run that goes on would begin with the first order once more, so
# it is given the second one. Only PyTorch's private names tell and set it: where they are missing, nothing
# is done.


Order = list[list[int]]
"""Of every bucket, in the order in which they are filled: places of its parameters among those reduced."""


def orders_of(modules: Iterable[nn.Module | None]) -> list[Order | None]:
    """The orders that the modules' next backwards use; all ranks call this, between steps."""
    return [_order_of(module) for module in modules]


def lay_out(modules: Sequence[nn.Module | None], orders: Sequence[Order | None]) -> None:
    """Have each module's next backward use the same; those whose parameters are others are left alone."""
    if len(modules) != len(orders):
        return
    for module, order in zip(modules, orders, strict=True):
        if isinstance(module, DistributedDataParallel) and order and _can(module):
            _lay_out(module, order)


def _order_of(module: nn.Module | None) -> Order | None:
    if not isinstance(module, DistributedDataParallel) or not _can(module):
        return None
    module.reducer._rebuild_buckets()  # as the next forward would
    said = module._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices")
    if said:
        return [[int(place) for place in bucket.split()] for bucket in str(said).split(",")]
    places = {id(p): place for place, p in enumerate(module._build_params_for_reducer()[0])}
    buckets = module.reducer._get_zeros_like_grad_buckets()  # not yet said: a run of few steps
    return [[places[id(p)] for p in bucket.parameters()] for bucket in buckets]


def _can(module: DistributedDataParallel) -> bool:
    """True if the order changes at all, and this PyTorch has what is needed."""
    names = (
        "_ddp_init_helper",
        "_build_params_for_reducer",
        "_comm_hooks",
        "_remove_autograd_hooks",
    )
    known = all(hasattr(module, name) for name in names)
    return known and not module.find_unused_parameters and not module.static_graph


def _lay_out(module: Any, order: Order) -> None:
    parameters, sparse = module._build_params_for_reducer()
    if sorted(place for bucket in order for place in bucket) != list(range(len(parameters))):
        return
    names = module._build_debug_param_to_name_mapping(parameters)
    module._remove_autograd_hooks()
    with _assigned(order):
        module._ddp_init_helper(parameters, sparse, names, module.static_graph)
    for hook, state in module._comm_hooks:
        dist._register_comm_hook(module.reducer, state, hook)


@contextmanager
def _assigned(order: Order) -> Iterator[None]:
    """Have DistributedDataParallel take this order; it reverses what it is given."""
    own = dist._compute_bucket_assignment_by_size

    def assign(parameters: Any, limits: list[int], *rest: Any, **more: Any) -> Any:
        return [list(bucket) for bucket in reversed(order)], [limits[-1]] * len(order)

    dist._compute_bucket_assignment_by_size = assign  # type: ignore[assignment]
    try:
        yield
    finally:
        dist._compute_bucket_assignment_by_size = own  # type: ignore[assignment]
