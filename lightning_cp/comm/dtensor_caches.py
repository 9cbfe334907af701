"""PyTorch's caches of DTensors' meshes, emptied before a new mesh is made."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

_CACHES = (
    ("torch.distributed.tensor._redistribute", "_gen_transform_infos", "cache_clear"),
    ("torch.distributed.tensor._redistribute", "clear_redistribute_planner_cache", ""),
    ("torch.distributed.tensor.debug", "_clear_python_sharding_prop_cache", ""),
    ("torch.distributed.tensor.debug", "_clear_fast_path_sharding_prop_cache", ""),
)
"""Modules, what they hold, and how it is cleared; private, and not all of them in every PyTorch."""


def forget_meshes() -> None:
    """Clear caches that refer to meshes: they keep destroyed groups alive, and give them to equal meshes.

    A new mesh is the place for it: from a finalizer it could come in the middle of a DTensor operation.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return  # nobody has made a DTensor yet
    for module, name, method in _CACHES:
        with suppress(ImportError, AttributeError):
            held: Any = getattr(import_module(module), name)
            (getattr(held, method) if method else held)()
