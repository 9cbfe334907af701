"""A model and its run, left as they were by what happens in between: a check must not change the training."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torchmetrics import Metric

from lightning_cp.logs.token_mean import RATIO_HOOK

_PLAIN = (int, float, str, bool, type(None), list, dict, set, tuple)
"""Attributes of these types are a module's own notes: counters, lists of losses."""
_LOGS = ("log", "log_dict", RATIO_HOOK)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Within: evaluation mode, no gradients yet, nothing is logged. Afterwards all is as it was.

    That are gradients, buffers, modes, metrics, plain attributes of modules, and random numbers.
    """
    with ExitStack() as stack:
        stack.enter_context(_random_numbers(model))
        for module in model.modules():
            stack.callback(_put_back_attributes(module))
        stack.callback(_put_back_buffers(model))
        stack.callback(_put_back_modes(model))
        stack.callback(_put_back_gradients(model))
        stack.callback(_unmute(model))
        model.eval()  # ranks would drop out others than one process
        yield


@contextmanager
def _random_numbers(model: nn.Module) -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng([device.index for device in devices]):
        yield
    random.setstate(python)
    np.random.set_state(numpy)


def _put_back_attributes(module: nn.Module) -> Any:
    own = vars(module)
    kept = {
        name: (value, copy.copy(value))
        for name, value in own.items()
        if name != "training" and type(value) in _PLAIN and not name.startswith("_")
    }
    states = _states_of(module) if isinstance(module, Metric) else {}

    def put_back() -> None:
        for name in [x for x in own if type(own[x]) in _PLAIN and x not in kept]:
            if not name.startswith("_") and name != "training":
                del own[name]
        for name, (value, then) in kept.items():
            if isinstance(value, (list, dict, set)):  # the same object: others may hold it
                value.clear()
                (value.extend if isinstance(value, list) else value.update)(then)  # type: ignore[arg-type]
            own[name] = value
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
