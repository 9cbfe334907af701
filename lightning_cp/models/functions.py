"""Functions that are replaced in every loaded module that holds them, in whatever way they were imported."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

from lightning_cp.models.handle import SwapHandle

Function = Callable[..., Any]

LINK = "_lightning_cp_link"
"""Attribute of a replacement: what it has replaced."""


@dataclass
class Link:
    """The function that a replacement replaced, and hands over to."""

    original: Function


class Replaced(NamedTuple):
    """One function that was replaced."""

    home: ModuleType
    """Defines it, and would show a later replacement."""
    name: str
    ours: Function
    link: Link


@contextmanager
def undisturbed() -> Iterator[None]:
    """Collect no garbage within: a swap without a holder is undone as it is collected, which would change
    functions that another swap is about to replace."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def replace_for(handle: SwapHandle, *kinds: Callable[[SwapHandle], Iterable[Replaced]]) -> None:
    """Put replacements of these kinds in place until the swap is undone, or its handle is gone.

    All of a swap in one call, as a look at the names of all modules, about 100,000, takes 10 to 50 ms.
    """
    with undisturbed():
        replaced = [one for kind in kinds for one in kind(handle)]
        replace_everywhere({one.link.original: one.ours for one in replaced})
    undo = weakref.finalize(handle, take_back, replaced)
    undo.atexit = False
    handle.on_undo(undo)


def globals_of_all(without: tuple[str, ...] = ()) -> Iterator[tuple[ModuleType, dict[str, Any]]]:
    """Every loaded module but those with a prefix in ``without``, and its names; threads may add to them."""
    for key, module in list(sys.modules.items()):
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict) and not key.startswith(without):
            yield module, names


def name_for_compiler() -> None:
    """Have the compiler look up which functions are PyTorch's, before their names are those of others.

    It looks once, by name, and again after ``init_process_group``; what it finds goes into graphs as it is.
    """
    rules = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None:
        rules.get_torch_obj_rule_map()


def replace_everywhere(news: Mapping[Function, Function]) -> None:
    """Put the new functions where the old ones are in modules' globals."""
    name_for_compiler()
    by_identity = {id(old): new for old, new in news.items()}
    for module, names in globals_of_all():
        if not by_identity.keys().isdisjoint(map(id, list(names.values()))):
            for name, value in names.copy().items():
                if id(value) in by_identity:
                    setattr(module, name, by_identity[id(value)])


def take_back(replaced: Sequence[Replaced]) -> None:
    """Restore the originals; where another swap came later, have that one hand over to them."""
    with undisturbed():
        replace_everywhere({one.ours: one.link.original for one in replaced})
        for home, name, ours, link in replaced:
            later: Link | None = getattr(getattr(home, name), LINK, None)
            while later is not None:
                if later.original is ours:
                    later.original = link.original
                later = getattr(later.original, LINK, None)
