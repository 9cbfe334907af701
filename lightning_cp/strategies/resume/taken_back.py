"""What a micro-batch changes besides gradients, for a replay: buffers, and callbacks that count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint
from torch import nn

_PLAIN = (int, float, str, bool, type(None))


@dataclass(frozen=True)
class _Copy:
    """A buffer's value when it was this tensor, in this version of it."""

    buffer: torch.Tensor
    version: int
    value: torch.Tensor

    @classmethod
    def of(cls, buffer: torch.Tensor) -> _Copy:
        return cls(buffer, buffer._version, buffer.detach().clone())

    def is_of(self, buffer: torch.Tensor) -> bool:
        return buffer is self.buffer and buffer._version == self.version


_Owned = tuple[nn.Module, str]
"""A buffer by the module that has it, and its name there."""


class Buffers:
    """Copies of modules' persistent buffers; taken anew only of those that have changed."""

    def __init__(self) -> None:
        self._copies: dict[_Owned, _Copy] = {}

    def keep(self, modules: Iterable[nn.Module]) -> None:
        """Copy what has changed since it was copied last."""
        copies: dict[_Owned, _Copy] = {}
        parts: list[nn.Module | None] = list(modules)
        while parts:  # several times as fast as Module.modules(), and every step may come here
            part = parts.pop()
            if part is None:
                continue
            parts.extend(part._modules.values())
            for name, buffer in _persistent(part):
                known = self._copies.get((part, name))
                fits = known is not None and known.is_of(buffer)
                copies[part, name] = known if fits and known else _Copy.of(buffer)
        self._copies = copies

    def put_back(self, state: dict[str, Any], module: nn.Module) -> dict[str, Any]:
        """A module's state with the copies in place of what changed since."""
        changed: dict[str, torch.Tensor] = {}
        for prefix, part in module.named_modules():
            for name, buffer in _persistent(part):
                full = f"{prefix}.{name}" if prefix else name
                copy = self._copies.get((part, name))
                if full in state and copy is not None and not copy.is_of(buffer):
                    changed[full] = copy.value
        return {**state, **changed}


def _persistent(part: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Of the module itself."""
    for name, buffer in part._buffers.items():
        if buffer is not None and name not in part._non_persistent_buffers_set:
            yield name, buffer


def plain_states(trainer: Trainer) -> dict[str, Any]:
    """States of callbacks that are numbers and strings in containers; not of those that keep files."""
    states: dict[str, Any] = {}
    callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    for callback in callbacks:
        state = {} if isinstance(callback, Checkpoint) else callback.state_dict()
        if state and _is_plain(state):
            states[callback.state_key] = deepcopy(state)
    return states


def _is_plain(state: Any) -> bool:
    if isinstance(state, dict):
        return all(_is_plain(key) and _is_plain(value) for key, value in state.items())
    if isinstance(state, list | tuple):
        return all(_is_plain(value) for value in state)
    return isinstance(state, _PLAIN)
