"""Layers that mix tokens along the sequence outside of attention: a rank would mix its own tokens only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from lightning_cp.errors import ConfigError

LOCAL = "context_parallel_local"
"""Attribute of a module that says: let its tokens (or what is no token) mix on each rank alone."""

_NAMES = re.compile(
    r"Mamba|SSM|StateSpace|Rwkv|RWKV|Delta(Net|Attention)|ShortConv|Linear(Self)?Attention"
    r"|LightningAttention|Rglru|RGLRU|RecurrentBlock|LSTM|Retention|Hyena|TimeMix|TimeShift|CausalConv1d"
)
"""Names of classes of state-space models, linear attention, short convolutions and recurrent layers."""

_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
"""``layer_types`` of Hugging Face configs that are attention; masks say later which of it is sharded."""


def refuse_mixing(model: nn.Module, skip: Iterable[nn.Module] = ()) -> None:
    """Refuse layers other than attention through which a token depends on others.

    The rule: a convolution over time with a kernel longer than 1, PyTorch's recurrent layers, classes
    named like a known mixer, and ``layer_types`` in a Hugging Face config that are not attention. A
    module, or any around it, with ``context_parallel_local = True`` is accepted as it is.

    Args:
        model: everything that will be called in a step.
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
        why = None if module in accepted else _why(module)
        if why is not None:
            yield f"{name or 'the model'} ({type(module).__name__}{why})"


def _why(module: nn.Module) -> str | None:
    """The reason that makes a module a mixer, to be shown behind its class; ``None`` if there is none."""
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
