"""Traversal of the tensors of a batch or output: dicts, tuples, lists, named tuples, dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, cast

import torch

from lightning_cp.errors import ConfigError

Visit = Callable[[str, torch.Tensor], Any]

ROOT = "batch"
"""The name of a batch that is a bare tensor."""


def is_container(value: object) -> bool:
    """True if ``value`` can contain tensors."""
    return isinstance(value, (Mapping, list, tuple)) or _is_dataclass(value)


def tensors_of(value: Any) -> list[tuple[str, torch.Tensor]]:
    """Return every tensor with its dotted name: keys, field names and indices joined by dots."""
    return [(name, x) for name, x in nodes_of(value) if isinstance(x, torch.Tensor)]


def memory_of(x: torch.Tensor) -> int:
    """Return an identity that a tensor shares with its views and with its ``torch.func`` wrappers."""
    functorch = cast(Any, torch._C)._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        x = functorch.get_unwrapped(x)
    return x.untyped_storage()._cdata if torch._C._has_storage(x) else id(x)


def nodes_of(value: Any) -> list[tuple[str, Any]]:
    """Return a value and everything inside it, containers included, with dotted names; the value first."""
    found: list[tuple[str, Any]] = []
    ahead = [("", value)]
    while ahead:
        name, node = ahead.pop()
        found.append((name or ROOT, node))
        if not isinstance(node, torch.Tensor):
            for key, inner in reversed(items_of(node)):
                ahead.append((f"{name}.{key}" if name else str(key), inner))
    return found


def map_tensors(value: Any, visit: Visit, name: str = "") -> Any:
    """Return a copy of the container with every tensor replaced by ``visit(name, tensor)``.

    Raises:
        ConfigError: an object of a kind that may hide tensors.
    """
    if isinstance(value, torch.Tensor):
        return visit(name or ROOT, value)
    if value is None or isinstance(value, (str, bytes, int, float, bool, complex)):
        return value
    if not is_container(value):
        raise ConfigError(
            f"cannot look for tensors inside {name or ROOT!r}, a {type(value).__name__}. What "
            "works: tensors in dicts, tuples, lists, named tuples and dataclasses, nested in any "
            "way."
        )
    new: dict[Any, Any] = {}
    for key, item in items_of(value):
        new[key] = map_tensors(item, visit, f"{name}.{key}" if name else str(key))
    return _rebuild(value, new)


def items_of(value: Any) -> list[tuple[Any, Any]]:
    """Return the items of a container by key, field name or index; none for other values."""
    if isinstance(value, Mapping):
        return list(value.items())
    if _is_named_tuple(value):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if _is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return []


def _rebuild(value: Any, new: dict[Any, Any]) -> Any:
    rebuilt: Any
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return type(value)(new)  # type: ignore[call-arg]
    if isinstance(value, Mapping):
        rebuilt = copy.copy(value)
        for key, item in new.items():
            rebuilt[key] = item
        return rebuilt
    if _is_named_tuple(value):
        return type(value)(*new.values())
    if isinstance(value, (list, tuple)):
        return type(value)(new.values())
    rebuilt = copy.copy(value)
    for key, item in new.items():
        object.__setattr__(rebuilt, key, item)  # frozen dataclasses too
    return rebuilt


def _is_named_tuple(value: object) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _is_dataclass(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
