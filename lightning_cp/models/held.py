"""PyTorch's attention function, kept where a swap would not reach it.

A module's globals are replaced, in whatever way they were imported. What was copied from them is not: an
attribute, an entry of a dict, a default argument. A call of it would attend to a rank's own tokens, silently.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from lightning_cp.errors import ConfigError
from lightning_cp.models.sdpa import is_sdpa

_LIBRARIES = ("torch", "transformers")
"""Their files look the function up when they call it."""


def refuse_held(model: nn.Module, alone: Collection[nn.Module]) -> None:
    """Refuse modules that keep ``scaled_dot_product_attention`` itself.

    Looked at: attributes of modules and of their classes, entries of lists and dicts among them and among the
    globals of the classes' files, default arguments, what functions enclose, and ``functools.partial``.

    Args:
        model: everything that will be called in a step.
        alone: modules whose attention is not swapped.

    Raises:
        ConfigError: naming the place.
    """
    modules = {module: name for name, module in model.named_modules() if module not in alone}
    kinds = dict.fromkeys(kind for module in modules for kind in type(module).__mro__)
    own = [kind for kind in kinds if kind.__module__.split(".")[0] not in _LIBRARIES]
    files = dict.fromkeys(kind.__module__ for kind in own)
    for module, name in modules.items():
        _refuse(f"{name or 'the model'} ({type(module).__name__})", vars(module))
    for kind in own:
        _refuse(f"class {kind.__name__}", vars(kind))
    for file in files:
        names = vars(sys.modules[file]) if file in sys.modules else {}
        held = {key: value for key, value in names.items() if not is_sdpa(value)}  # is replaced
        _refuse(f"file {file}", held)


def _refuse(holder: str, names: Mapping[str, Any]) -> None:
    for name, value in names.items():
        where = next(_places(value), None)
        if where is not None:
            raise ConfigError(
                f"{holder} keeps torch's scaled_dot_product_attention itself in {name}{where}, where it "
                "cannot be replaced, so each rank would attend to its own tokens only. Keep a function that "
                "looks it up when it is called: lambda *args, **options: "
                "torch.nn.functional.scaled_dot_product_attention(*args, **options)."
            )


def _places(value: Any) -> Iterator[str]:
    """Where in ``value`` it is, in words to be put behind its name; "" if it is the value."""
    if isinstance(value, (staticmethod, classmethod, MethodType)):
        value = value.__func__
    if is_sdpa(value):
        yield ""
    elif isinstance(value, functools.partial):
        yield from _among({"partial": value.func}, "'s ")
    elif isinstance(value, dict):
        yield from _among(value, ", at key ")
    elif isinstance(value, (list, tuple)):
        yield from _among(dict(enumerate(value)), ", at index ")
    elif isinstance(value, FunctionType):
        yield from _among(_defaults(value), "'s default of ")
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        yield from _among({name: _content(cell) for name, cell in cells}, ", which encloses ")


def _among(values: Mapping[Any, Any], words: str) -> Iterator[str]:
    return (f"{words}{name}" for name, value in values.items() if is_sdpa(value))


def _defaults(function: FunctionType) -> dict[str, Any]:
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    given = function.__defaults__ or ()
    by_place = dict(zip(names[len(names) - len(given) :], given, strict=True))
    return {**by_place, **(function.__kwdefaults__ or {})}


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return None
