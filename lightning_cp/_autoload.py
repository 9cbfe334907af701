"""Registration of the strategies' names in Lightning, without an import of this package.

Lightning owns the registries, and importing Lightning takes seconds; so if one is not loaded yet, an import
hook adds the names when it is. This file does not import lightning. Torch loads it at the end of its own
import, through the entry point group ``torch.backends``, so the names are known to programs that never import
this package. ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` turns that off.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

NAMES = {"ulysses_ring": "popen", "ulysses_ring_spawn": "spawn", "ulysses_ring_fork": "fork"}
"""Registered name -> start method of its processes."""
ALIASES = ("ulysses-ring", "context_parallel", "ulyssesringstrategy")
"""Aliases of the first name; the class's is in lower case, as Lightning looks names up."""

DESCRIPTION = "Context parallelism: Ulysses over a ring"


def _trainer_strategy(**arguments: Any) -> Any:
    from lightning_cp.strategies.trainer import UlyssesRingStrategy

    return UlyssesRingStrategy(**arguments)


def _fabric_strategy(**arguments: Any) -> Any:
    from lightning_cp.strategies.fabric import UlyssesRingStrategy

    return UlyssesRingStrategy(**arguments)


def _wrong_namespace(asked: str, works: str, **_: Any) -> Any:
    from lightning_cp.errors import ConfigError

    raise ConfigError(
        f"strategy='ulysses_ring' was asked of {asked}, whose classes are others than those of {works}, "
        f"which this package builds on. Import {works} instead of {asked}: it is the same code under its "
        "present name."
    )


REGISTRIES: dict[str, tuple[str, Callable[..., Any]]] = {
    "lightning.pytorch.strategies": ("StrategyRegistry", _trainer_strategy),
    "lightning.fabric.strategies": ("STRATEGY_REGISTRY", _fabric_strategy),
    "pytorch_lightning.strategies": (
        "StrategyRegistry",
        partial(_wrong_namespace, "pytorch_lightning", "lightning.pytorch"),
    ),
    "lightning_fabric.strategies": (
        "STRATEGY_REGISTRY",
        partial(_wrong_namespace, "lightning_fabric", "lightning.fabric"),
    ),
}
"""Module -> the name of its registry, and the factory of the strategy."""


def autoload() -> None:
    """Run as the entry point that torch loads; an error here must not break ``import torch``."""
    try:
        register_when_loaded()
        _allow_plain_forms()
    except Exception:  # any: it would make the import of torch fail
        return


def register_when_loaded() -> None:
    """Register the names in every loaded registry, and in the others when they are loaded."""
    waiting: set[str] = set()
    for name, (registry, _) in REGISTRIES.items():
        module = sys.modules.get(name)
        if module is not None and hasattr(module, registry):
            _register(module)
        else:
            waiting.add(name)
    if waiting and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(waiting))


def _allow_plain_forms() -> None:
    """Allow ``torch.load(weights_only=True)`` to read this package's files with objects, in plain form."""
    from torch.serialization import add_safe_globals

    from lightning_cp.checkpoint.objects import SAFE

    add_safe_globals(SAFE)


def _register(module: ModuleType) -> None:
    attribute, strategy = REGISTRIES[module.__name__]
    registry: Any = getattr(module, attribute)
    for name, start_method in {**NAMES, **dict.fromkeys(ALIASES, "popen")}.items():
        if name not in registry:
            registry.register(name, strategy, description=DESCRIPTION, start_method=start_method)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds a registry's module in the usual way, and registers the names after it has run."""

    def __init__(self, waiting: set[str]) -> None:
        self._waiting = waiting

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._waiting:
            return None
        self._waiting.remove(fullname)  # the search below must not find us
        if not self._waiting and self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Runs a module with its own loader, then registers the names in it."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _register(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
