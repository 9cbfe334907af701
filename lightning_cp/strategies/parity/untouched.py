"""A model and its run, left as they were by what happens in between: a check must not change the training."""

from __future__ import annotations

import copy
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import Metric

from lightning_cp.logs.token_mean import RATIO_HOOK

_OF_EVERY_MODULE = {*vars(nn.Module()), *vars(LightningModule()), "training"}
"""Attributes that PyTorch and Lightning keep; all others are a module's own: counters, lists of losses."""
_CONTAINERS = (list, deque, dict, defaultdict, OrderedDict, Counter, set)
_LOGS = ("log", "log_dict", RATIO_HOOK)


@dataclass
class _Kept:
    """A value, and what is in it where it is a container: the same object gets it again."""

    value: Any
    items: Any = None

    @classmethod
    def of(cls, value: Any, around: frozenset[int] = frozenset()) -> _Kept:
        if type(value) not in _CONTAINERS or id(value) in around:
            return cls(value)
        inside = around | {id(value)}
        if isinstance(value, (list, deque)):
            return cls(value, [cls.of(item, inside) for item in value])
        if isinstance(value, dict):
            return cls(value, {key: cls.of(item, inside) for key, item in value.items()})
        return cls(value, set(value))

    def back(self) -> Any:
        value: Any = self.value
        if self.items is None:
            return value
        value.clear()
        if isinstance(value, (list, deque)):
            value.extend(item.back() for item in self.items)
        elif isinstance(value, dict):
            value.update({key: item.back() for key, item in self.items.items()})
        else:
            value.update(self.items)
        return value


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Within: evaluation mode, no gradients yet, nothing is logged. Afterwards all is as it was.

    That are gradients, buffers, modes, metrics and other attributes of modules; what they refer to, but
    containers, is not looked into.
    """
    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(_put_back_attributes(module))
        stack.callback(_put_back_buffers(model))
        stack.callback(_put_back_modes(model))
        stack.callback(_put_back_gradients(model))
        stack.callback(_unmute(model))
        model.eval()  # ranks would drop out others than one process
        yield


@contextmanager
def same_random_numbers(model: nn.Module) -> Iterator[None]:
    """What is drawn within is drawn again afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _put_back_attributes(module: nn.Module) -> Any:
    own = vars(module)
    kept = {name: _Kept.of(value) for name, value in own.items() if name not in _OF_EVERY_MODULE}
    states = _states_of(module) if isinstance(module, Metric) else {}

    def put_back() -> None:
        for name in [name for name in own if name not in kept and name not in _OF_EVERY_MODULE]:
            del own[name]
        own.update({name: value.back() for name, value in kept.items()})
        own.update(states)

    return put_back


def _states_of(metric: Metric) -> dict[str, Any]:
    names = [*metric._defaults, "_update_count", "_computed", "_forward_cache"]
    return {name: copy.deepcopy(vars(metric)[name]) for name in names if name in vars(metric)}


def _put_back_buffers(model: nn.Module) -> Any:
    kept = [(x, x.detach().clone()) for x in model.buffers() if not x.is_meta]

    def put_back() -> None:
        with torch.no_grad():
            for x, then in kept:
                if not torch.equal(x, then):
                    x.copy_(then)

    return put_back


def _put_back_modes(model: nn.Module) -> Any:
    kept = [(module, module.training) for module in model.modules()]

    def put_back() -> None:
        for module, training in kept:
            module.training = training

    return put_back


def _put_back_gradients(model: nn.Module) -> Any:
    kept = [(p, p.grad) for p in model.parameters()]
    for p, _ in kept:
        p.grad = None

    def put_back() -> None:
        for p, gradient in kept:
            p.grad = gradient

    return put_back


def _unmute(model: nn.Module) -> Any:
    """What is logged while the model is looked at is nobody's business."""
    own = vars(model)
    kept = {name: own[name] for name in _LOGS if name in own}
    for name in _LOGS:
        if name in kept or hasattr(type(model), name):
            own[name] = _nothing

    def put_back() -> None:
        for name in _LOGS:
            own.pop(name, None)
        own.update(kept)

    return put_back


def _nothing(*_: Any, **__: Any) -> None:
    return None
