"""What all ranks share: made once, in the fork server, after everything else that it imports."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import entry_points
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric.utilities import registry
from torch._dynamo import trace_rules

from lightning_cp.models.guards import attention_calls
from lightning_cp.randomness import functions
from lightning_cp.utils import patching

trace_rules.get_torch_obj_rule_map()  # what the compiler does with each function of PyTorch

USERS = {"transformers", "tests"}
"""Packages whose modules may get other functions while a case runs."""

FUNCTIONS = FunctionType, BuiltinFunctionType


def _find_others() -> frozenset[str]:
    """Return the modules of other packages, among those that are loaded, without a function to replace."""
    replaced = {id(x) for x in vars(F).values() if isinstance(x, FUNCTIONS)}
    replaced |= {id(getattr(torch, name)) for name in functions._TORCH}
    return frozenset(
        name
        for name, module in sys.modules.items()
        if name.partition(".")[0] not in USERS
        and replaced.isdisjoint(map(id, getattr(module, "__dict__", {}).values()))
    )


OTHERS = _find_others()


def module_globals(without: tuple[str, ...] = ()) -> Iterator[tuple[ModuleType, dict[str, Any]]]:
    """Yield what ``patching.module_globals`` yields, but ``OTHERS``, nine names in ten.

    Searching them for functions takes a third of a rank's time. If one of them held a function after all, it
    would not be replaced, and its case would fail.
    """
    for name, module in list(sys.modules.items()):
        if name not in OTHERS and not name.startswith(without):
            names = getattr(module, "__dict__", None)
            if isinstance(names, dict):
                yield module, names


def share() -> None:
    """Make this process use what is here."""
    patching.module_globals = attention_calls.module_globals = module_globals
    registry.entry_points = cache(entry_points)  # Trainer and Fabric read them from files, each
