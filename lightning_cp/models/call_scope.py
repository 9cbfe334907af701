"""Scope of the swap: attention calls of local modules are not intercepted.

An attention call does not name its module, so hooks track which module is being called. All modules inside
are tracked, not only the outermost: a checkpoint calls its content again, without the modules around it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from lightning_cp.errors import ConfigError
from lightning_cp.models.guards.token_mixing import LOCAL
from lightning_cp.models.handle import SwapHandle
from lightning_cp.utils.patching import add_hook
from lightning_cp.utils.tracing import exclude_from_compile


def local_modules(
    model: nn.Module, listed: Sequence[nn.Module] | None, others: Iterable[nn.Module] = ()
) -> set[nn.Module]:
    """Return the modules whose attention each rank computes by itself.

    Args:
        model: everything that a step calls.
        listed: the modules to swap; ``None``: all.
        others: modules inside that are not swapped on purpose.
    """
    inside = {part for module in listed or () for part in module.modules()}
    local = set() if listed is None else set(model.modules()) - inside
    for module in model.modules():
        if getattr(module, LOCAL, False):
            local.update(module.modules())
    return local.union(*(other.modules() for other in others))


def track_calls(
    model: nn.Module,
    handle: SwapHandle,
    listed: Sequence[nn.Module] | None,
    local: set[nn.Module],
) -> None:
    """Track on the handle, while a step is active, whether a local module is being called."""
    if not local:
        return
    handle.intercepts_outside = listed is None
    followed = local if listed is None else {part for one in listed for part in one.modules()}
    for module in followed:  # modules in which interception may differ from that outside of all
        _track(module, handle, module not in local)


def _track(module: nn.Module, handle: SwapHandle, intercepts: bool) -> None:
    @exclude_from_compile
    def enter(module: nn.Module, args: Any) -> None:
        if handle.active:
            handle.scopes.append((module, intercepts))

    @exclude_from_compile
    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if handle.scopes and handle.scopes[-1][0] is module:
            handle.scopes.pop()

    handle.on_undo(add_hook(module.register_forward_pre_hook, enter))
    handle.on_undo(add_hook(module.register_forward_hook, leave, always_call=True))


def check_roots(
    listed: Sequence[nn.Module], found: Iterable[nn.Module], litgpts: Iterable[nn.Module]
) -> None:
    """Check that a list of modules to swap is not empty and names no part of a Hugging Face or LitGPT model.

    Args:
        listed: the modules to swap.
        found: the Hugging Face models.
        litgpts: the LitGPT models.

    Raises:
        ConfigError: an empty list, or a part: a model makes masks or rotary rows for all its attention, so
            it can be swapped as a whole only.
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
    """True for a Hugging Face model: only ``PreTrainedModel`` has this attribute."""
    return hasattr(module, "_can_set_attn_implementation")
