"""Calls in which attention may have computed by itself, and was not intercepted."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from lightning_cp.errors import ConfigError
from lightning_cp.models.blocks import members
from lightning_cp.models.handle import SwapHandle
from lightning_cp.models.mixing import LOCAL
from lightning_cp.models.report import ATTENTION
from lightning_cp.module_hooks import add_hook
from lightning_cp.untraced import untraced


def watch_attention(model: nn.Module, handle: SwapHandle, skip: Collection[nn.Module] = ()) -> None:
    """Have every attention module notice a call of it in which no attention was intercepted.

    Args:
        model: everything that will be called in a step.
        handle: counts intercepted calls.
        skip: modules that are left alone, each by itself.
    """
    for name, module in model.named_modules():
        if module in skip:
            continue
        if isinstance(module, nn.MultiheadAttention):
            hook = _refuse_weights(handle, name)
            handle.on_undo(add_hook(module.register_forward_pre_hook, hook, with_kwargs=True))
        if ATTENTION.search(type(module).__name__):
            _watch(module, name, handle)


def watch_calls(model: nn.Module, handle: SwapHandle, skip: Collection[nn.Module] = ()) -> None:
    """Have a step know whether anything of the model was called that could attend to a rank's own tokens.

    Args:
        model: everything that will be called in a step.
        handle: of whose step it is noted.
        skip: modules of which a call says nothing.
    """

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        handle.note_call(module, [args, kwargs])

    def note_uncompiled(module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            note(module, args, kwargs)

    outermost, at_once = {model, *members(model)}, untraced(note)
    for module in model.modules():
        if module not in skip and _may_attend(module):
            hook = (
                at_once if module in outermost else note_uncompiled
            )  # compiled inside of one, mostly
            handle.on_undo(add_hook(module.register_forward_pre_hook, hook, with_kwargs=True))


def _may_attend(module: nn.Module) -> bool:
    """False for losses, metrics, dropout and activations of torch and torchmetrics."""
    known = type(module).__module__.startswith(("torch.", "torchmetrics."))
    return not known or next(module.parameters(), None) is not None


def _watch(module: nn.Module, name: str, handle: SwapHandle) -> None:
    before: list[int] = []  # a stack: recomputation may call the module within another call of it

    @untraced
    def enter(module: nn.Module, args: Any) -> None:
        if handle.state is not None:
            before.append(handle.state.calls)

    @untraced
    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if handle.state is None or not before:
            return
        if handle.state.calls == before.pop():
            raise ConfigError(
                f"{name or 'the model'} ({type(module).__name__}) computed attention by itself: none of its "
                "calls was intercepted, so each rank would attend to its own tokens only. Attention must go "
                "through transformers' attention interface or torch's scaled_dot_product_attention. If this "
                f"module does not attend along the sequence, set {LOCAL} = True on it."
            )

    handle.on_undo(add_hook(module.register_forward_pre_hook, enter))
    handle.on_undo(add_hook(module.register_forward_hook, leave))
    handle.on_activate(lambda: before.clear)  # what an error left there


def _refuse_weights(handle: SwapHandle, name: str) -> Any:
    parameters = inspect.signature(nn.MultiheadAttention.forward)

    @untraced
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
