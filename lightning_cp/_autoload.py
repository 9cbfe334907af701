"""Teaching Lightning the name ``ulysses_ring``.

The registry belongs to Lightning, and importing Lightning takes seconds; so if it is not loaded yet, a
hook on the import system registers the name when ``lightning.pytorch.strategies`` is loaded. This file
imports neither torch nor lightning.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

REGISTRY_MODULE = "lightning.pytorch.strategies"
NAME = "ulysses_ring"


def register_when_loaded() -> None:
    """Register the strategy's name now if Lightning is loaded, else as soon as it is."""
    module = sys.modules.get(REGISTRY_MODULE)
    if module is not None and hasattr(module, "StrategyRegistry"):
        _register(module)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register(module: ModuleType) -> None:
    registry: Any = module.StrategyRegistry
    if NAME not in registry:
        description = "Context parallelism: Ulysses over a ring"
        registry.register(NAME, _strategy, description=description)


def _strategy(**kwargs: Any) -> Any:
    from lightning_cp.strategies.trainer import UlyssesRingStrategy

    return UlyssesRingStrategy(**kwargs)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the registry's module the usual way, and has the name registered after it has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != REGISTRY_MODULE:
            return None
        sys.meta_path.remove(self)  # once is enough, and the search below must not find us
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Runs a module with its own loader, then registers the name in it."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _register(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
