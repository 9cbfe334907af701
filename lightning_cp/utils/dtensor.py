"""Sharded tensors and modules: the local part, and PyTorch's caches of meshes, cleared before a new mesh."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch
from torch.distributed.tensor import DTensor


def local_part(x: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of ``x`` (all of a plain tensor): shared memory, detached, no communication."""
    with torch.no_grad():  # several times as fast as DTensor.detach
        return x.to_local() if isinstance(x, DTensor) else x.detach()


def is_on_meta(module: torch.nn.Module) -> bool:
    """True if any parameter or buffer has no values."""
    return any(x.is_meta for x in [*module.parameters(), *module.buffers()])


def is_sharded(module: torch.nn.Module) -> bool:
    """True if FSDP wraps a part of it."""
    return any(map(is_unit, module.modules()))


def is_unit(module: torch.nn.Module) -> bool:
    """True if FSDP wraps the module itself; by class names, so that FSDP need not be imported."""
    names = {kind.__name__ for kind in type(module).__mro__}
    return bool(names & {"FSDPModule", "FullyShardedDataParallel"})


def gathering_parts(root: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the units of a model, and the modules with sharded parameters that hold units or are in none.

    A call of one of them outside of the root's forward gathers parameters, with all ranks.
    """
    for child in root.children():
        if any(isinstance(p, DTensor) for p in child.parameters()):
            yield child
            if not is_unit(child):
                yield from gathering_parts(child)


_CACHES = (
    ("torch.distributed.tensor._redistribute", "_gen_transform_infos", "cache_clear"),
    ("torch.distributed.tensor._redistribute", "clear_redistribute_planner_cache", ""),
    ("torch.distributed.tensor.debug", "_clear_python_sharding_prop_cache", ""),
    ("torch.distributed.tensor.debug", "_clear_fast_path_sharding_prop_cache", ""),
)
"""(module, attribute, clearing method) of private caches; not every PyTorch has all of them."""


def forget_meshes() -> None:
    """Clear caches that refer to meshes: they keep destroyed groups alive, and return them for equal meshes.

    Call it before a new mesh is made; in a finalizer it could interrupt a DTensor operation.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return  # no DTensor exists yet
    for module, name, method in _CACHES:
        with suppress(ImportError, AttributeError):
            held: Any = getattr(import_module(module), name)
            (getattr(held, method) if method else held)()
