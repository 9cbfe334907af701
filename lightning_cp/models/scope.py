"""The calls of attention that are the sequence's: not those of modules that are left alone.

A call does not say where it comes from, so modules tell when they are entered and left. All that are inside
tell, not the outermost alone: a checkpoint calls again what it holds, and not what is around it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from lightning_cp.errors import ConfigError
from lightning_cp.models.handle import SwapHandle
from lightning_cp.models.mixing import LOCAL
from lightning_cp.module_hooks import add_hook
from lightning_cp.untraced import untraced


def left_alone(
    model: nn.Module, listed: Sequence[nn.Module] | None, others: Iterable[nn.Module] = ()
) -> set[nn.Module]:
    """The modules whose attention each rank computes by itself.

    Args:
        model: everything that will be called in a step.
        listed: the modules that are swapped; ``None``: all.
        others: modules inside that are not swapped on purpose.
    """
    inside = {part for module in listed or () for part in module.modules()}
    alone = set() if listed is None else set(model.modules()) - inside
    for module in model.modules():
        if getattr(module, LOCAL, False):
            alone.update(module.modules())
    return alone.union(*(other.modules() for other in others))


def follow_calls(
    model: nn.Module,
    handle: SwapHandle,
    listed: Sequence[nn.Module] | None,
    alone: set[nn.Module],
) -> None:
    """Have the handle know, while a step is active, whether a module is being called that is left alone."""
    if not alone:
        return
    handle.intercepts_outside = listed is None
    followed = alone if listed is None else {part for one in listed for part in one.modules()}
    for module in followed:  # those in which it is another answer than outside of all, or may be
        _follow(module, handle, module not in alone)


def _follow(module: nn.Module, handle: SwapHandle, intercepts: bool) -> None:
    @untraced
    def enter(module: nn.Module, args: Any) -> None:
        if handle.active:
            handle.scopes.append((module, intercepts))

    @untraced
    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if handle.scopes and handle.scopes[-1][0] is module:
            handle.scopes.pop()

    handle.on_undo(add_hook(module.register_forward_pre_hook, enter))
    handle.on_undo(add_hook(module.register_forward_hook, leave, always_call=True))


def require_roots(
    listed: Sequence[nn.Module], found: Iterable[nn.Module], litgpts: Iterable[nn.Module]
) -> None:
    """Refuse a list that names nothing, or a part of a Hugging Face or LitGPT model.

    Args:
        listed: what shall be swapped.
        found: the Hugging Face models there are.
        litgpts: the LitGPT models.

    Raises:
        ConfigError: masks, or rotary rows, are made for a whole model, so that no part of it can be swapped
            alone.
    """
    if not listed:
        raise ConfigError(
            "no module is listed whose attention shall be swapped. List the modules that attend along the "
            "sequence, or leave the list away, which swaps all."
        )
    models = [part for root in found for part in root.modules() if _is_model(part)]
    for module in listed:
        around = [model for model in models if module in set(model.modules())]
        if around and not _is_model(module):
            raise ConfigError(
                f"{type(module).__name__} is a part of {type(around[0]).__name__}, a Hugging Face model that "
                "makes masks for all of its attention: it is swapped whole. List the model, or a model in it."
            )
    for root in litgpts:
        if any(module is not root and module in set(root.modules()) for module in listed):
            raise ConfigError(
                f"a part of {type(root).__name__}, a LitGPT model, is listed: the model makes the rotary "
                "rows of all its attention, so it is swapped whole. List the model."
            )


def _is_model(module: nn.Module) -> bool:
    """A Hugging Face one: ``PreTrainedModel`` has this, and nothing else."""
    return hasattr(module, "_can_set_attn_implementation")
