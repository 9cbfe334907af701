"""Hooks of users' modules and replaced methods of one instance, for the duration of a run; copies lack them.

A pickle names nothing of this package, so it loads where the package is not installed.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from contextlib import nullcontext
from types import MethodType
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


def replace_method(
    owner: Any, name: str, value: Callable[..., Any], *, plain: Callable[..., Any] | None = None
) -> Callable[[], None]:
    """Replace ``owner.name`` by ``value`` for this one instance; return a function that restores it.

    Args:
        owner: a module, or any other object.
        name: the method's name; a later replacement by other code is left in place.
        value: called without the owner.
        plain: the method of a copy, if the owner's class has no such method.
    """
    before = vars(owner).get(name)
    ours = InstanceMethod(owner, name, value, plain if before is None else before)
    object.__setattr__(owner, name, ours)

    def put_back() -> None:
        if vars(owner).get(name) is not ours:
            return
        if before is None:
            del vars(owner)[name]
        else:
            object.__setattr__(owner, name, before)

    return put_back


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


class InstanceMethod:
    """A function in place of one instance's method; a copy of the instance has its original method."""

    def __init__(
        self, owner: Any, name: str, value: Callable[..., Any], own: Callable[..., Any] | None
    ) -> None:
        self._owner, self._name, self._value, self._own = owner, name, value, own
        self.__wrapped__ = getattr(value, "__wrapped__", value)  # Lightning asks what is overridden
        self.__name__ = getattr(value, "__name__", name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._value(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = copy.deepcopy(self._owner, memo)
        if self._own is not None:
            return copy.deepcopy(self._own, memo)
        method = getattr(type(self._owner), self._name, None)
        return None if method is None else MethodType(method, copied)

    def __reduce__(self) -> Any:
        if self._own is not None:
            return operator.getitem, ((self._own,), 0)
        return getattr, (
            self._owner,
            self._name,
            None,
        )  # of an instance without its state: its class's


def _do_nothing(*_: Any) -> None:
    """Do nothing, after the run."""


WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""Parts of names that PyTorch's wrappers insert."""


def strip_wrappers(name: str) -> str:
    """Remove the parts of a name that wrappers insert."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name
