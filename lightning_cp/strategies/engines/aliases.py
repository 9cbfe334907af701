"""Other parameters with the memory of a model's own: nothing that follows those sees a backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def aliases(model: nn.Module) -> Iterator[None]:
    """Within, each parameter of ``model`` is another one with the same values, and without a gradient.

    What was hung on a parameter is not on its alias: hooks, and those of DistributedDataParallel, which its
    C++ reducer notes also where it is not to average anything. What a step does to an alias, but to its
    values, is gone with it.
    """
    made: dict[int, nn.Parameter] = {}
    places = [
        (module, name, p)
        for module in model.modules()
        if not isinstance(module, torch.jit.ScriptModule)
        for name, p in module._parameters.items()
        if p is not None and (p.requires_grad or type(p) is nn.Parameter)
    ]
    for module, name, p in places:
        if id(p) not in made:  # tied ones stay tied
            made[id(p)] = _alias(p)
        setattr(module, name, made[id(p)])  # PyTorch's LSTM keeps a list of its parameters
    try:
        yield
    finally:
        for module, name, p in places:
            setattr(module, name, p)


def _alias(p: nn.Parameter) -> nn.Parameter:
    alias: Any = torch.Tensor._make_subclass(type(p), p.detach(), p.requires_grad)
    vars(alias).update(vars(p))
    return alias
