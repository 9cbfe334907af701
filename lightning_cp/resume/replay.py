"""State besides gradients that a micro-batch changes (buffers, counting callbacks), copied for a
replay."""

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
"""True for callbacks whose state changes only with an optimizer step, so that nothing is restored."""
_PLAIN = (int, float, str, bool, type(None))


_Owned = tuple[nn.Module, str]
"""A module and the name of one of its buffers."""


class BufferCopies:
    """Copies of modules' persistent buffers, as of the last ``keep``."""

    def __init__(self) -> None:
        self._copies: dict[_Owned, torch.Tensor] = {}

    def save(self, modules: Iterable[nn.Module]) -> None:
        """Copy all buffers, reusing the memory of the earlier copies.

        Changed buffers are not detected: batch norm and ``.data`` write past a tensor's version, and
        comparing takes longer than copying, with a wait for each on a GPU.
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
            for into, of in values.values():  # a GPU copies all of one dtype in one call
                torch._foreach_copy_(into, of)
        self._copies = copies

    def replace_in(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state of these modules with the copies in place of buffers.

        Buffers are recognized by their memory: modules may have several names, and wrappers and state
        hooks give others.
        """
        kept: dict[Hashable, torch.Tensor] = {}
        for (part, name), copy in self._copies.items():
            buffer = part._buffers.get(name)
            if buffer is not None and (memory := _memory_key(buffer)) is not None:
                kept[memory] = copy
        return {
            name: kept.get(_memory_key(x), x) if isinstance(x, torch.Tensor) else x
            for name, x in state.items()
        }


def _holds(copy: torch.Tensor, buffer: torch.Tensor) -> bool:
    """True if a buffer's value can be copied into ``copy``."""
    return (
        copy.shape == buffer.shape
        and copy.dtype == buffer.dtype
        and copy.device == buffer.device
        and isinstance(copy, DTensor) == isinstance(buffer, DTensor)
    )


def _here(x: torch.Tensor) -> torch.Tensor:
    return local_part(x) if isinstance(x, DTensor) else x


def _memory_key(x: torch.Tensor) -> Hashable:
    """Return a key that is equal for tensors of the same values in the same memory; ``None`` without
    memory."""
    x = _here(x)
    if x.layout != torch.strided or not x.data_ptr():
        return None
    return x.device, x.data_ptr(), x.shape, x.stride(), x.dtype


def _persistent(modules: Iterable[nn.Module]) -> Iterator[tuple[_Owned, torch.Tensor]]:
    """Return the persistent buffers of modules and submodules; a shared submodule comes once for each
    name."""
    parts: list[nn.Module | None] = list(modules)
    while parts:  # several times as fast as Module.modules(), and called every step
        part = parts.pop()
        if part is None:
            continue
        parts.extend(part._modules.values())
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield (part, name), buffer


_NOT_COPIED = object()
"""Placeholder for an attribute that is not copied."""


class CallbackStates:
    """Attributes of callbacks with a state: numbers and strings, in containers and dataclasses.

    ``state_dict`` is called only when something is saved, as Lightning calls it, on a copy of the callback
    with these attributes: it may be slow, or be counted. Callbacks that hold files are skipped.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[Any, dict[str, Any]]] = []

    def save(self, trainer: Trainer) -> None:
        """Copy the attributes."""
        callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        self._kept = [(each, _plain_attributes(each)) for each in callbacks if _is_followed(each)]

    def states(self) -> dict[str, Any]:
        """Return the states of that time, of callbacks whose state holds nothing else."""
        found: dict[str, Any] = {}
        for callback, attributes in self._kept:
            then = object.__new__(type(callback))
            now = callback.__dict__
            then.__dict__ = {
                name: now.get(name, x) if x is _NOT_COPIED else x for name, x in attributes.items()
            }
            state = then.state_dict()
            if state and _is_plain(state):
                found[callback.state_key] = state
        return found


def _is_followed(callback: Any) -> bool:
    own = getattr(
        type(callback), "state_dict", Callback.state_dict
    )  # stand-ins of tests lack the attribute
    has_state = own is not Callback.state_dict
    return has_state and not isinstance(callback, Checkpoint) and not getattr(callback, OF_STEPS, 0)


def _plain_attributes(callback: Any) -> dict[str, Any]:
    """Return all attributes by name; ``_OTHER`` for those of other types."""
    copies: dict[str, Any] = dict.fromkeys(callback.__dict__, _NOT_COPIED)
    for name, value in callback.__dict__.items():
        with suppress(_NotPlainError):
            copies[name] = _copied(value)
    return copies


class _NotPlainError(Exception):
    pass


def _copied(state: Any) -> Any:
    """Copy deeply and fast: it may run every step with all that a callback has recorded.

    Raises:
        _NotPlainError: the state holds more than numbers and strings in containers.
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


# The order in which DistributedDataParallel adds up gradients, which decides how sums are rounded.
#
# It puts parameters into buckets in the order of registration, and after the first backward in the order in
# which gradients arrive. With four ranks and more, a number's place in its bucket decides in which order
# the ranks' parts are added. A resumed run would begin with the first order again, so the second one is
# restored. Only private names of PyTorch read and set it: where they are missing, nothing is done.


Order = list[list[int]]
"""For each bucket, in the order of filling: indices of its parameters among the reduced ones."""


def orders_of(modules: Iterable[nn.Module | None]) -> list[Order | None]:
    """Return the orders that the modules' next backwards use. Collective, between steps."""
    return [_order_of(module) for module in modules]


def set_orders(modules: Sequence[nn.Module | None], orders: Sequence[Order | None]) -> None:
    """Set the order of each module's next backward; modules with other parameters are skipped."""
    if len(modules) != len(orders):
        return
    for module, order in zip(modules, orders, strict=True):
        if isinstance(module, DistributedDataParallel) and order and _can_reorder(module):
            _lay_out(module, order)


def _order_of(module: nn.Module | None) -> Order | None:
    if not isinstance(module, DistributedDataParallel) or not _can_reorder(module):
        return None
    module.reducer._rebuild_buckets()  # as the next forward would
    said = module._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices")
    if said:
        return [[int(place) for place in bucket.split()] for bucket in str(said).split(",")]
    places = {id(p): place for place, p in enumerate(module._build_params_for_reducer()[0])}
    buckets = module.reducer._get_zeros_like_grad_buckets()  # not set yet: a run of few steps
    return [[places[id(p)] for p in bucket.parameters()] for bucket in buckets]


def _can_reorder(module: DistributedDataParallel) -> bool:
    """True if the order changes at all, and this PyTorch has the private names."""
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
    with _set_order(order):
        module._ddp_init_helper(parameters, sparse, names, module.static_graph)
    for hook, state in module._comm_hooks:
        dist._register_comm_hook(module.reducer, state, hook)


@contextmanager
def _set_order(order: Order) -> Iterator[None]:
    """Set DistributedDataParallel's order; it reverses its argument."""
    own = dist._compute_bucket_assignment_by_size

    def assign(parameters: Any, limits: list[int], *rest: Any, **more: Any) -> Any:
        return [list(bucket) for bucket in reversed(order)], [limits[-1]] * len(order)

    dist._compute_bucket_assignment_by_size = assign  # type: ignore[assignment]
    try:
        yield
    finally:
        dist._compute_bucket_assignment_by_size = own  # type: ignore[assignment]
