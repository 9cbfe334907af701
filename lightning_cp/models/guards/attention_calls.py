"""Checks for attention that the swap does not intercept and that would silently see local tokens only.

Three cases: calls of unsupported attention functions (flex, varlen, flash-attn, xformers), references to
``scaled_dot_product_attention`` that a swap cannot replace, and attention modules that compute by
themselves.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Collection, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from lightning_cp.errors import ConfigError
from lightning_cp.models.blocks import members
from lightning_cp.models.guards.token_mixing import LOCAL
from lightning_cp.models.handle import ATTENTION, SwapHandle
from lightning_cp.models.sdpa import is_sdpa
from lightning_cp.utils.patching import (
    ChainedPatch,
    Function,
    ReplacedFunction,
    add_hook,
    module_globals,
)
from lightning_cp.utils.tracing import exclude_from_compile

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
"""Unsupported functions by file; a file that is not loaded at the swap is not used by the model yet."""

_WEIGHTS = ("torch.nn.functional", "multi_head_attention_forward")
"""Function that computes attention itself if the weights are requested, which is the default."""

_LIBRARIES = ("torch.", "transformers.")
"""Libraries whose many files are not searched: they do not compile the functions before the first call."""

_LIBRARY_ROOTS = ("torch", "transformers")
"""Libraries that look the function up at each call."""

_ORIGINAL = "_torchdynamo_orig_callable"

FunctionName = tuple[ModuleType, str]


def unsupported_replacements(handle: SwapHandle) -> list[ReplacedFunction]:
    """Return replacements of unsupported functions, which refuse calls that ``handle`` would intercept."""
    own = dict(_loaded())
    replaced: list[ReplacedFunction] = []
    for function, (home, name) in {**own, **_compiled(own)}.items():
        link = ChainedPatch(function)
        ours = _refusing_function(f"{home.__name__}.{name}", link, weakref.ref(handle))
        replaced.append(ReplacedFunction(home, name, ours, link))
    return replaced


def _loaded() -> Iterator[tuple[Function, FunctionName]]:
    for file, names in (*_FUNCTIONS.items(), (_WEIGHTS[0], _WEIGHTS[1:])):
        home = sys.modules.get(file)
        for name in names:
            function = getattr(home, name, None)
            if home is not None and isinstance(function, FunctionType):
                yield function, (home, name)


def _compiled(own: Mapping[Function, FunctionName]) -> dict[Function, FunctionName]:
    """Return the compiled forms of the functions that the globals of loaded modules hold."""
    return {
        value: own[getattr(value, _ORIGINAL)]
        for _, names in module_globals(without=_LIBRARIES)
        for value in list(names.values())
        if type(value) is FunctionType and getattr(value, _ORIGINAL, None) in own
    }


def _refusing_function(name: str, link: ChainedPatch, held: weakref.ref[SwapHandle]) -> Function:
    @exclude_from_compile
    def check(kwargs: dict[str, Any]) -> None:
        handle = held()
        if handle is not None and handle.intercepts and _computes_alone(name, kwargs):
            raise ConfigError(
                f"{name} was called within a step{_how(name)}: it is not sharded, so each rank would attend "
                "to its own tokens only. Call torch.nn.functional.scaled_dot_product_attention, or "
                "context_parallel_attention(q, k, v, spec=AttentionSpec(...)); or set "
                "context_parallel_local = True on the module that makes the call, if it does not attend "
                "along the sequence."
            )

    @functools.wraps(link.original)
    def function(*args: Any, **kwargs: Any) -> Any:
        check(kwargs)
        return link.original(*args, **kwargs)

    return function


def _computes_alone(name: str, kwargs: dict[str, Any]) -> bool:
    """True unless the function uses SDPA, without ``need_weights``, which callers pass by name."""
    return name != ".".join(_WEIGHTS) or kwargs.get("need_weights", True)


def _how(name: str) -> str:
    return " with need_weights=True, its default" if name == ".".join(_WEIGHTS) else ""


def check_sdpa_references(model: nn.Module, local: Collection[nn.Module]) -> None:
    """Check that no module holds a reference to ``scaled_dot_product_attention`` that a swap cannot replace.

    The swap replaces globals of modules, in any import style, but not copies of them. Searched for copies:
    attributes of modules and of their classes, entries of lists and dicts among them and among the globals
    of the classes' files, default arguments, closures of functions, and ``functools.partial``.

    Args:
        model: everything that a step calls.
        local: modules whose attention is not swapped.

    Raises:
        ConfigError: naming the place.
    """
    modules = {module: name for name, module in model.named_modules() if module not in local}
    kinds = dict.fromkeys(kind for module in modules for kind in type(module).__mro__)
    own = [kind for kind in kinds if kind.__module__.split(".")[0] not in _LIBRARY_ROOTS]
    files = dict.fromkeys(kind.__module__ for kind in own)
    for module, name in modules.items():
        _check_references(f"{name or 'the model'} ({type(module).__name__})", vars(module))
    for kind in own:
        _check_references(f"class {kind.__name__}", vars(kind))
    for file in files:
        names = vars(sys.modules[file]) if file in sys.modules else {}
        held = {
            key: value for key, value in names.items() if not is_sdpa(value)
        }  # the swap replaces it
        _check_references(f"file {file}", held)


def _check_references(holder: str, names: Mapping[str, Any]) -> None:
    for name, value in names.items():
        where = next(_reference_paths(value), None)
        if where is not None:
            raise ConfigError(
                f"{holder} keeps torch's scaled_dot_product_attention itself in {name}{where}, where it "
                "cannot be replaced, so each rank would attend to its own tokens only. Keep a function that "
                "looks it up when it is called: lambda *args, **options: "
                "torch.nn.functional.scaled_dot_product_attention(*args, **options)."
            )


def _reference_paths(value: Any) -> Iterator[str]:
    """Yield the places of the function inside ``value``, as text to append to its name; "" for ``value``."""
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
    except ValueError:  # an empty cell
        return None


def watch_attention(model: nn.Module, handle: SwapHandle, skip: Collection[nn.Module] = ()) -> None:
    """Add hooks that refuse a call of an attention module in which no attention call was intercepted.

    Args:
        model: everything that a step calls.
        handle: counts intercepted calls.
        skip: local modules, without the modules inside them.
    """
    for name, module in model.named_modules():
        if module in skip:
            continue
        if isinstance(module, nn.MultiheadAttention):
            hook = _weights_check(handle, name)
            handle.on_undo(add_hook(module.register_forward_pre_hook, hook, with_kwargs=True))
        if ATTENTION.search(type(module).__name__):
            _watch(module, name, handle)


def watch_calls(model: nn.Module, handle: SwapHandle, skip: Collection[nn.Module] = ()) -> None:
    """Add hooks that record, in the step, a call of any module that could attend to local tokens.

    Args:
        model: everything that a step calls.
        handle: handle whose step records it.
        skip: modules whose calls are not recorded.
    """

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        handle.note_call(module, [args, kwargs])

    def note_uncompiled(module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            note(module, args, kwargs)

    outermost, at_once = {model, *members(model)}, exclude_from_compile(note)
    for module in model.modules():
        if module not in skip and _may_attend(module):
            # Modules inside are mostly compiled as a part of an outermost one.
            hook = at_once if module in outermost else note_uncompiled
            handle.on_undo(add_hook(module.register_forward_pre_hook, hook, with_kwargs=True))


def _may_attend(module: nn.Module) -> bool:
    """False for losses, metrics, dropout and activations of torch and torchmetrics."""
    known = type(module).__module__.startswith(("torch.", "torchmetrics."))
    return not known or next(module.parameters(), None) is not None


def _watch(module: nn.Module, name: str, handle: SwapHandle) -> None:
    @exclude_from_compile
    def enter(module: nn.Module, args: Any) -> None:
        state = handle.state
        if state is not None:
            state.begun_calls.setdefault(module, []).append(state.calls)

    @exclude_from_compile
    def leave(module: nn.Module, args: Any, output: Any) -> None:
        state = handle.state
        if state is None or not state.begun_calls.get(module):
            return
        if state.calls == state.begun_calls[module].pop():
            raise ConfigError(
                f"{name or 'the model'} ({type(module).__name__}) computed attention by itself: none of its "
                "calls was intercepted, so each rank would attend to its own tokens only. Attention must go "
                "through transformers' attention interface, torch's scaled_dot_product_attention or "
                "context_parallel_attention(q, k, v, spec=AttentionSpec(...)). If this module does not "
                f"attend along the sequence, set {LOCAL} = True on it."
            )

    handle.on_undo(add_hook(module.register_forward_pre_hook, enter))
    handle.on_undo(add_hook(module.register_forward_hook, leave))


def _weights_check(handle: SwapHandle, name: str) -> Any:
    parameters = inspect.signature(nn.MultiheadAttention.forward)

    @exclude_from_compile
    def refuse(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not handle.active:
            return
        given = parameters.bind(module, *args, **kwargs).arguments
        if given.get("need_weights", True):
            raise ConfigError(
                f"{name or 'the model'} (nn.MultiheadAttention) is called with need_weights=True, its "
                "default: it would compute attention by itself, over a rank's own tokens, because the "
                "weights are asked for. Call it with need_weights=False."
            )

    return refuse
