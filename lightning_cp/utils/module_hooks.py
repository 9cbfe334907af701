"""Hooks of users' modules for the duration of a run.

A pickle names nothing of this package, so it loads where the package is not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any


def add_hook(
    register: Callable[..., Any], function: Callable[..., Any], **options: Any
) -> Callable[[], None]:
    """Register ``function`` by a module's ``register_forward_hook`` or the like; return its removal."""
    hook = ModuleHook(function)
    handle = register(hook, **options)

    def remove() -> None:
        handle.remove()
        hook.function = _do_nothing  # deep copies still have the hook

    return remove


class ModuleHook:
    """A function that PyTorch calls around a module's forward.

    A deep copy of the module shares it for the rest of the run, because steps observe copies too; the hook of
    a pickle does nothing.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleHook:
        return self

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")  # accepts any arguments, and returns nothing


def _do_nothing(*_: Any) -> None:
    """Do nothing, after the run."""


WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""Parts of names that PyTorch's wrappers insert."""


def strip_wrappers(name: str) -> str:
    """Remove the parts of a name that wrappers insert."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name
