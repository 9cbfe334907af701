"""Norms and pools that go over tokens, which is known only once they are called.

BatchNorm takes statistics over all tokens in training and none in evaluation; GroupNorm treats the rows
of [tokens, features] alone, and goes over the tokens of [batch, features, tokens].
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from lightning_cp.errors import ConfigError
from lightning_cp.models.handle import SwapHandle
from lightning_cp.models.mixing import LOCAL
from lightning_cp.module_hooks import add_hook
from lightning_cp.untraced import untraced

_POOLS = (
    nn.AvgPool1d,
    nn.MaxPool1d,
    nn.LPPool1d,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveMaxPool1d,
)
_KINDS = (nn.BatchNorm1d, nn.InstanceNorm1d, nn.GroupNorm, *_POOLS)


def watch_pooling(model: nn.Module, handle: SwapHandle, skip: Iterable[nn.Module] = ()) -> None:
    """Have every norm and pool refuse a call, within a step, that goes over tokens.

    Args:
        model: everything that will be called in a step.
        handle: knows whether a step is active.
        skip: modules inside that are not swapped on purpose.
    """
    accepted = set(skip)
    for name, module in model.named_modules():
        if module in accepted or getattr(module, LOCAL, False):
            accepted.update(module.modules())
        elif isinstance(module, _KINDS):
            hook = _refuse_tokens(handle, name)
            handle.on_undo(add_hook(module.register_forward_pre_hook, hook, with_kwargs=True))


def _refuse_tokens(handle: SwapHandle, name: str) -> Any:
    @untraced
    def refuse(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not handle.active:
            return
        x: torch.Tensor = args[0] if args else kwargs["input"]
        if _goes_over_tokens(module, x.dim()):
            raise ConfigError(
                f"{name or 'the model'} ({type(module).__name__}, called with {tuple(x.shape)}) goes over "
                "tokens: each rank would take its own only, which is silently wrong. What treats every token "
                "alone is LayerNorm or RMSNorm over the features. If its input does not run along the "
                f"sequence, set {LOCAL} = True on it."
            )

    return refuse


def _goes_over_tokens(module: nn.Module, dims: int) -> bool:
    if isinstance(module, (nn.BatchNorm1d, nn.InstanceNorm1d)):
        return module.training or module.running_mean is None
    if isinstance(module, nn.GroupNorm):
        return dims == 3
    size = getattr(module, "kernel_size", 0)  # adaptive pools have none
    return size not in (1, (1,))
