"""The tensors of a model by the names that a checkpoint uses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_cp.errors import ConfigError

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""Parts of names that wrappers of PyTorch put in."""


@dataclass
class Tensors:
    """Parameters and persistent buffers of a model, each once."""

    by_name: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """All names of each: tied weights have several."""


def tensors_of(model: nn.Module, prefix: str = "") -> Tensors:
    """The tensors that a state dict would hold, by plain names without ``prefix``; nothing is gathered."""
    names: dict[int, list[str]] = defaultdict(list)
    seen: dict[int, torch.Tensor] = {}
    for name, x in _named(model):
        if name.startswith(prefix):
            seen[id(x)] = x
            names[id(x)].append(name[len(prefix) :])
    found = Tensors()
    for key, x in seen.items():
        found.by_name[names[key][0]] = x
        found.aliases[names[key][0]] = tuple(names[key])
    return found


def _named(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in model.named_modules(remove_duplicate=False):
        for name, x in (*module._parameters.items(), *module._buffers.items()):
            if x is not None and name not in module._non_persistent_buffers_set:
                yield plain(f"{path}.{name}" if path else name), x


def plain(name: str) -> str:
    """A name without what wrappers put in."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module, within what Fabric, DDP and torch.compile put around it.

    Raises:
        ConfigError: it is no module.
    """
    given: Any = model
    if not isinstance(given, nn.Module):
        raise ConfigError(
            f"model must be a module of torch.nn, got {type(given).__name__}. Give the model itself, not its "
            "state dict."
        )
    while True:
        within = model._modules.get("_forward_module") or model._modules.get("_orig_mod")
        if isinstance(model, DistributedDataParallel):
            within = model.module
        if within is None:
            return model
        model = within
