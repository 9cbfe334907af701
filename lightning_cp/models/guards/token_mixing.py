"""Checks for layers that mix tokens outside of attention: a rank would mix its local tokens only.

Mixers (convolutions, recurrent layers, state-space models) are refused by the model's structure. Norms and
pools are refused when they are called, since only the call shows whether they go over tokens: BatchNorm
takes statistics over all tokens in training and none in evaluation; GroupNorm treats the rows of
[tokens, features] alone, and goes over the tokens of [batch, features, tokens].
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from lightning_cp.errors import ConfigError
from lightning_cp.models.handle import SwapHandle
from lightning_cp.utils.patching import add_hook
from lightning_cp.utils.tracing import exclude_from_compile

LOCAL = "context_parallel_local"
"""Attribute of a module whose inputs each rank may mix by itself (or whose inputs are not tokens)."""

_NAMES = re.compile(
    r"Mamba|SSM|StateSpace|Rwkv|RWKV|Delta(Net|Attention)|ShortConv|Linear(Self)?Attention"
    r"|LightningAttention|Rglru|RGLRU|RecurrentBlock|LSTM|Retention|Hyena|TimeMix|TimeShift|CausalConv1d"
)
"""Names of classes of state-space models, linear attention, short convolutions and recurrent layers."""

_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
"""``layer_types`` of Hugging Face configs that are attention; the masks decide later if it is sharded."""

_POOLS = (
    nn.AvgPool1d,
    nn.MaxPool1d,
    nn.LPPool1d,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveMaxPool1d,
)
_KINDS = (nn.BatchNorm1d, nn.InstanceNorm1d, nn.GroupNorm, *_POOLS)


def check_no_mixing(model: nn.Module, skip: Iterable[nn.Module] = ()) -> None:
    """Check that no layer other than attention makes a token depend on others.

    Refused: a convolution over time with a kernel longer than 1, PyTorch's recurrent layers, classes
    named like a known mixer, and ``layer_types`` in a Hugging Face config that are not attention. Accepted:
    a module with ``context_parallel_local = True``, on it or on a module around it.

    Args:
        model: everything that a step calls.
        skip: modules inside that are not swapped on purpose.

    Raises:
        ConfigError: naming the modules.
    """
    found = list(_mixers(model, set(skip)))
    if not found:
        return
    shown = ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
    raise ConfigError(
        f"these modules mix tokens along the sequence outside of attention: {shown}. Under context "
        "parallelism each rank would see its own tokens only, which is silently wrong. What is sharded is "
        "attention and whatever treats every token alone. If a module does not run along the sequence, set "
        f"{LOCAL} = True on it; otherwise pass context_parallel_size=1 and data_parallel_size=<number of "
        "ranks>, which shares no sample."
    )


def _mixers(model: nn.Module, skip: set[nn.Module]) -> Iterator[str]:
    accepted: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in skip or getattr(module, LOCAL, False):
            accepted.update(module.modules())
        why = None if module in accepted else _mixing_reason(module)
        if why is not None:
            yield f"{name or 'the model'} ({type(module).__name__}{why})"


def _mixing_reason(module: nn.Module) -> str | None:
    """Return the reason that makes a module a mixer, as text behind its class, or ``None``."""
    if isinstance(module, (nn.Conv1d, nn.ConvTranspose1d)):
        return f", kernel {module.kernel_size[0]}" if module.kernel_size[0] > 1 else None
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return ""
    if getattr(module, "trigram_input", False):  # MobileBERT
        return ", which joins neighbouring tokens (trigram_input)"
    types: Any = getattr(getattr(module, "config", None), "layer_types", None)
    if isinstance(types, (list, tuple)) and hasattr(module, "_can_set_attn_implementation"):
        other = sorted({str(kind) for kind in types} - _ATTENTION)
        return f", layers of type {', '.join(other)}" if other else None
    return "" if _NAMES.search(type(module).__name__) else None


def watch_pooling(model: nn.Module, handle: SwapHandle, skip: Iterable[nn.Module] = ()) -> None:
    """Add hooks to norms and pools that refuse a call, within a step, which goes over tokens.

    Args:
        model: everything that a step calls.
        handle: knows whether a step is active.
        skip: modules inside that are not swapped on purpose.
    """
    accepted = set(skip)
    for name, module in model.named_modules():
        if module in accepted or getattr(module, LOCAL, False):
            accepted.update(module.modules())
        elif isinstance(module, _KINDS):
            hook = _pooling_check(handle, name)
            handle.on_undo(add_hook(module.register_forward_pre_hook, hook, with_kwargs=True))


def _pooling_check(handle: SwapHandle, name: str) -> Any:
    @exclude_from_compile
    def refuse(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not handle.active:
            return
        x: torch.Tensor = args[0] if args else kwargs["input"]
        if _pools_over_tokens(module, x.dim()):
            raise ConfigError(
                f"{name or 'the model'} ({type(module).__name__}, called with {tuple(x.shape)}) goes over "
                "tokens: each rank would take its own only, which is silently wrong. What treats every token "
                "alone is LayerNorm or RMSNorm over the features. If its input does not run along the "
                f"sequence, set {LOCAL} = True on it."
            )

    return refuse


def _pools_over_tokens(module: nn.Module, dims: int) -> bool:
    if isinstance(module, (nn.BatchNorm1d, nn.InstanceNorm1d)):
        return module.training or module.running_mean is None
    if isinstance(module, nn.GroupNorm):
        return dims == 3
    size = getattr(module, "kernel_size", 0)  # adaptive pools have none
    return size not in (1, (1,))
