"""State besides gradients that a micro-batch changes, for a replay: buffers, and callbacks that count."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import is_dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_cp.comm.local import local_part

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
