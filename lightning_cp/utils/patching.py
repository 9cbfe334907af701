"""Undoable monkeypatches: methods of one object, functions in every loaded module, and patches for a step.

A function is replaced in every module that holds it, however it was imported.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

from lightning_cp.utils.module_hooks import replace_method


class PatchSet:
    """Replaced methods and their originals; a user may have replaced the same ones before or since."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(
        self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        """Replace a method by ``make(current method)``, on this object only."""
        self._undo.append(replace_method(owner, name, make(getattr(owner, name))))

    def undo(self) -> None:
        """Restore everything that other code has not replaced since."""
        while self._undo:
            self._undo.pop()()


Function = Callable[..., Any]

LINK = "_lightning_cp_link"
"""Attribute of a replacement: its :class:`ChainedPatch`."""


@dataclass
class ChainedPatch:
    """The function that a replacement replaced, and calls."""

    original: Function


class ReplacedFunction(NamedTuple):
    """A replaced function."""

    home: ModuleType
    """The module that defines it; it shows later replacements."""
    name: str
    ours: Function
    link: ChainedPatch


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection in the block.

    A swap without a holder is undone when it is collected, which would change functions that another swap is
    about to replace.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def module_globals(without: tuple[str, ...] = ()) -> Iterator[tuple[ModuleType, dict[str, Any]]]:
    """Yield every loaded module except those with a prefix in ``without``, and its names.

    Other threads may add names meanwhile.
    """
    for key, module in list(sys.modules.items()):
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict) and not key.startswith(without):
            yield module, names


def load_compiler_rules() -> None:
    """Make the compiler look up PyTorch's functions before their names refer to replacements.

    It looks them up once by name, and again after ``init_process_group``, and puts them into graphs
    unchanged.
    """
    rules = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None:
        rules.get_torch_obj_rule_map()


def replace_everywhere(news: Mapping[Function, Function]) -> None:
    """Replace old functions by new ones in all modules' globals."""
    load_compiler_rules()
    by_identity = {id(old): new for old, new in news.items()}
    for module, names in module_globals():
        if not by_identity.keys().isdisjoint(map(id, list(names.values()))):
            for name, value in names.copy().items():
                if id(value) in by_identity:
                    setattr(module, name, by_identity[id(value)])


def restore_everywhere(replaced: Sequence[ReplacedFunction]) -> None:
    """Restore the originals; a later swap of the same function then calls the original."""
    with without_garbage_collection():
        replace_everywhere({one.ours: one.link.original for one in replaced})
        for home, name, ours, link in replaced:
            later: ChainedPatch | None = getattr(getattr(home, name), LINK, None)
            while later is not None:
                if later.original is ours:
                    later.original = link.original
                later = getattr(later.original, LINK, None)


Patch = Callable[[], Callable[[], None]]
"""Applies a patch, and returns its undo."""


class StepPatches:
    """Patches of a model besides attention, applied when a step begins and undone in reverse when it ends."""

    def __init__(self) -> None:
        self._patches: list[Patch] = []
        self._leave: list[Callable[[], None]] = []
        self._reports: list[Callable[[], str | None]] = []

    def add(self, patch: Patch, report: Callable[[], str | None] | None = None) -> None:
        """Add a patch; ``report`` returns a line about its effect in a step, to be shown once."""
        self._patches.append(patch)
        if report is not None:
            self._reports.append(report)

    def begin(self) -> None:
        """Begin a step; end the previous one if that has not happened."""
        self.end()
        for enter in self._patches:
            self._leave.append(enter())

    def end(self) -> None:
        """End the step: undo the patches."""
        while self._leave:
            self._leave.pop()()

    def told(self) -> list[str]:
        """Return lines about the step that ends now, each kind once."""
        said = [(report, line) for report in self._reports if (line := report()) is not None]
        for report, _ in said:
            self._reports.remove(report)
        return [line for _, line in said]
