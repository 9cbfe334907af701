"""Notes of a module in its own attributes, kept: the same objects get them again."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import Metric

from lightning_cp.strategies.generators import GENERATORS, set_state, state_of

_PARTS = {name for name, value in vars(nn.Module()).items() if isinstance(value, dict)}
"""Dicts that every module has: of its hooks, submodules, parameters and buffers."""
_OF_EVERY_MODULE = ({*vars(nn.Module()), *vars(LightningModule()), "training"} - _PARTS) | {
    "_parameters",
    "_buffers",
}
"""Attributes that are not looked at; all others are put back: hooks, and a module's own, such as counters."""
_CONTAINERS = (list, deque, dict, defaultdict, OrderedDict, Counter, set)
LARGEST = 2**26
"""Bytes of a tensor that is copied: what a step changes in place is small; data that it holds is not."""


@dataclass
class Kept:
    """A value, and what is in it where it is a container, a tensor or a source of random numbers."""

    value: Any
    inside: Any = None

    @classmethod
    def of(cls, value: Any, around: frozenset[int] = frozenset()) -> Kept:
        """Look into a value, but not into what it lies in."""
        if type(value) is torch.Tensor:
            copied = not value.requires_grad and not value.is_meta and value.nbytes <= LARGEST
            return cls(value, value.clone() if copied else None)
        if isinstance(value, GENERATORS):
            return cls(value, state_of(value))
        if type(value) not in _CONTAINERS or id(value) in around:
            return cls(value)
        within = around | {id(value)}
        if isinstance(value, (list, deque)):
            return cls(value, [cls.of(item, within) for item in value])
        if isinstance(value, dict):
            return cls(value, {key: cls.of(item, within) for key, item in value.items()})
        return cls(value, set(value))

    def back(self) -> Any:
        """The value, with what was in it."""
        value: Any = self.value
        if self.inside is None:
            return value
        if isinstance(value, torch.Tensor):
            put_into(value, self.inside)
        elif isinstance(value, GENERATORS):
            set_state(value, self.inside)
        else:
            self._refill(value)
        return value

    def _refill(self, value: Any) -> None:
        value.clear()
        if isinstance(value, (list, deque)):
            value.extend(item.back() for item in self.inside)
        elif isinstance(value, dict):
            value.update({key: item.back() for key, item in self.inside.items()})
        else:
            value.update(self.inside)


def put_into(x: torch.Tensor, then: torch.Tensor) -> None:
    """Give a tensor the numbers that it had, if it has others."""
    with torch.no_grad():
        if x.shape == then.shape and not torch.equal(x, then):
            x.copy_(then)


def keep_attributes(module: nn.Module) -> Any:
    """A module's own attributes, and the states of a metric; returns what puts them back."""
    own = vars(module)
    kept = {name: Kept.of(value) for name, value in own.items() if name not in _OF_EVERY_MODULE}
    states = _states_of(module) if isinstance(module, Metric) else {}
    parameters = set(module._parameters)  # their values are the engine's matter

    def put_back() -> None:
        for name in [name for name in own if name not in kept and name not in _OF_EVERY_MODULE]:
            del own[name]
        own.update({name: value.back() for name, value in kept.items()})
        own.update(states)
        for name in module._parameters.keys() - parameters:
            del module._parameters[name]

    return put_back


def keep_buffers(module: nn.Module) -> Any:
    """A module's buffers, also where a step puts other tensors in their place."""
    kept = dict(module._buffers)
    copies = {
        name: x.detach().clone() for name, x in kept.items() if x is not None and not x.is_meta
    }

    def put_back() -> None:
        module._buffers.clear()
        module._buffers.update(kept)
        for name, then in copies.items():
            put_into(module._buffers[name], then)  # type: ignore[arg-type]

    return put_back


def _states_of(metric: Metric) -> dict[str, Any]:
    names = [*metric._defaults, "_update_count", "_computed", "_forward_cache"]
    return {name: copy.deepcopy(vars(metric)[name]) for name in names if name in vars(metric)}
