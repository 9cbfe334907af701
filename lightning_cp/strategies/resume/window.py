"""What a micro-batch changes besides gradients: buffers, and callbacks that count."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint
from torch import nn

_PLAIN = (int, float, str, bool, type(None))


class Buffers:
    """Copies of a module's persistent buffers; taken anew only of those that have changed."""

    def __init__(self) -> None:
        self._copies: dict[str, tuple[int, int, torch.Tensor]] = {}

    def keep(self, module: nn.Module) -> None:
        """Copy what has changed since it was copied last."""
        copies: dict[str, tuple[int, int, torch.Tensor]] = {}
        for name, buffer in _persistent(module).items():
            known = self._copies.get(name)
            mark = id(buffer), buffer._version
            same = known is not None and known[:2] == mark
            copies[name] = known if same and known else (*mark, buffer.detach().clone())
        self._copies = copies

    def put_back(self, state: dict[str, Any], module: nn.Module) -> dict[str, Any]:
        """A module's state with the copies in place of what changed since."""
        changed = {
            name: copy
            for name, (_, version, copy) in self._copies.items()
            if name in state and _persistent(module)[name]._version != version
        }
        return {**state, **changed}


def _persistent(module: nn.Module) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for prefix, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


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
