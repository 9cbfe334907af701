"""Attention functions that are not sharded: a call of one, while a step is active, is refused by its name.

Where some attention of a model is intercepted, other attention beside it would be over a rank's own tokens,
silently.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

from lightning_cp.errors import ConfigError
from lightning_cp.models.functions import LINK, Function, Link, Replaced, globals_of_all
from lightning_cp.models.handle import SwapHandle
from lightning_cp.untraced import untraced

_FLASH = tuple(
    f"flash_attn_{kind}func"
    for kind in ("", "varlen_", "qkvpacked_", "kvpacked_", "varlen_qkvpacked_", "varlen_kvpacked_")
)
_FUNCTIONS: dict[str, tuple[str, ...]] = {
    "torch.nn.attention.flex_attention": ("flex_attention",),
    "torch.nn.attention.varlen": ("varlen_attn",),
    "flash_attn": _FLASH,
    "flash_attn_interface": _FLASH,
    "xformers.ops": ("memory_efficient_attention",),
}
"""Of files that are loaded when attention is swapped; a package that is not is not used by the model yet."""

_WEIGHTS = ("torch.nn.functional", "multi_head_attention_forward")
"""Computes by itself where the weights are asked for, which is the default."""


def refused_others(handle: SwapHandle) -> list[Replaced]:
    """All of them, refusing calls that ``handle`` would intercept."""
    own = dict(_loaded())
    replaced: list[Replaced] = []
    for function, (home, name) in {**own, **_compiled(own)}.items():
        link = Link(function)
        ours = _refusing(f"{home.__name__}.{name}", link, weakref.ref(handle))
        replaced.append(Replaced(home, name, ours, link))
    return replaced


Place = tuple[ModuleType, str]


def _loaded() -> Iterator[tuple[Function, Place]]:
    for file, names in (*_FUNCTIONS.items(), (_WEIGHTS[0], _WEIGHTS[1:])):
        home = sys.modules.get(file)
        for name in names:
            function = getattr(home, name, None)
            if home is not None and isinstance(function, FunctionType):
                yield function, (home, name)


def _compiled(own: Mapping[Function, Place]) -> dict[Function, Place]:
    """The compiled forms of them, where a module's globals hold any."""
    return {
        value: own[getattr(value, _ORIGINAL)]
        for _, names in globals_of_all(without=_LIBRARIES)
        for value in list(names.values())
        if type(value) is FunctionType and getattr(value, _ORIGINAL, None) in own
    }


_LIBRARIES = ("torch.", "transformers.")
"""There are many of their files, and these compile none of the functions before they are called."""

_ORIGINAL = "_torchdynamo_orig_callable"


def _refusing(name: str, link: Link, held: weakref.ref[SwapHandle]) -> Function:
    @untraced
    def check(kwargs: dict[str, Any]) -> None:
        handle = held()
        if handle is not None and handle.intercepts and _computes_alone(name, kwargs):
            raise ConfigError(
                f"{name} was called within a step{_how(name)}: it is not sharded, so each rank would attend "
                "to its own tokens only. Call torch.nn.functional.scaled_dot_product_attention, or "
                "context_parallel_attention; or set context_parallel_local = True on the module that makes "
                "the call, if it does not attend along the sequence."
            )

    @functools.wraps(link.original)
    def function(*args: Any, **kwargs: Any) -> Any:
        check(kwargs)
        return link.original(*args, **kwargs)

    setattr(function, LINK, link)
    return function


def _computes_alone(name: str, kwargs: dict[str, Any]) -> bool:
    """``need_weights`` is given by name by whoever gives it."""
    return name != ".".join(_WEIGHTS) or kwargs.get("need_weights", True)


def _how(name: str) -> str:
    return " with need_weights=True, its default" if name == ".".join(_WEIGHTS) else ""
