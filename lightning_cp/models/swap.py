"""Swapping the attention of a whole model: which models there are inside, and what is replaced."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import reduce
from math import gcd
from typing import Any

from torch import nn

from lightning_cp.attention.exchange import Exchange
from lightning_cp.errors import ConfigError
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.models.handle import StepState as StepState
from lightning_cp.models.handle import SwapHandle as SwapHandle
from lightning_cp.models.hf import swap_hf
from lightning_cp.models.mixing import refuse_mixing
from lightning_cp.models.pooling import watch_pooling
from lightning_cp.models.sdpa import swap_sdpa
from lightning_cp.models.watch import watch_attention


def swap_attention(
    model: nn.Module,
    mesh: ContextParallelMesh,
    kernel: str = "auto",
    roots: Iterable[nn.Module] | None = None,
    *,
    exchange: Exchange | None = None,
) -> SwapHandle:
    """Route the model's attention through context parallelism while a step is active.

    Args:
        model: a module, with or without Hugging Face models inside.
        mesh: the process groups.
        kernel: which kernel to use.
        roots: the Hugging Face models to swap; all inside ``model`` by default.
        exchange: how keys reach the queries over the ring axis; hop by hop by default.

    Returns:
        The handle; ``report`` says what was replaced, ``undo()`` restores it.

    Raises:
        ConfigError: a Hugging Face model that does not use transformers' attention interface or is
            compiled, or a layer that mixes tokens outside of attention.
    """
    found = hf_models(model)
    chosen = found if roots is None else list(roots)
    others = _apart(found, chosen)
    refuse_mixing(model, others)
    _refuse_compiled(model, chosen)
    handle = SwapHandle(mesh, kernel, exchange)
    try:
        for root in chosen:
            swap_hf(root, handle)
        swap_sdpa(handle)
        watch_attention(model, handle, others)
        watch_pooling(model, handle, others)
    except BaseException:
        handle.undo()
        raise
    return handle


def hf_models(model: nn.Module) -> list[Any]:
    """The outermost Hugging Face models inside ``model``; none if transformers was never imported."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return []
    found: list[Any] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, transformers.PreTrainedModel) and module not in inside:
            found.append(module)
            inside.update(module.modules())
    return found


def _apart(found: list[Any], chosen: Iterable[nn.Module]) -> list[nn.Module]:
    """Hugging Face models that are not swapped, and hold none that is."""
    inside = {part for root in chosen for part in root.modules()}
    return [model for model in found if inside.isdisjoint(model.modules())]


def _refuse_compiled(model: nn.Module, chosen: Iterable[nn.Module]) -> None:
    """A compiled Hugging Face model cannot be watched: what it asks of each call is decided in Python."""
    inside = {part for root in chosen for part in root.modules()}
    for module in model.modules():
        whole = type(module).__name__ == "OptimizedModule"
        if (whole or module._compiled_call_impl is not None) and not inside.isdisjoint(
            module.modules()
        ):
            raise ConfigError(
                "torch.compile of a Hugging Face model, or of parts of it, is not available yet under "
                "context parallelism: its masks and labels are read in Python at every call. Leave "
                "torch.compile away, or use a strategy without context parallelism. Plain modules may "
                "be compiled."
            )


def told(config: Any, name: str) -> Any:
    """What a config says of ``name``; ``None`` if nothing, or if it is another thing in each layer.

    Some of transformers raise errors of other kinds than AttributeError where layers differ.
    """
    try:
        return getattr(config, name, None)
    except Exception:
        return None


_HEAD_NAMES = ("num_attention_heads", "num_heads", "n_heads", "n_head", "nhead", "num_q_heads")


def num_heads_of(model: nn.Module) -> int:
    """Query heads of the model's attention, from its config or from its modules' attributes.

    Raises:
        ConfigError: nothing in the model says how many heads it has.
    """
    counts: set[int] = set()
    for module in model.modules():
        for holder in (getattr(module, "config", None), module):
            values = [told(holder, name) for name in _HEAD_NAMES]
            counts.update(value for value in values if type(value) is int and value > 0)
    if not counts:
        raise ConfigError(
            "mode='auto' needs the number of attention heads, but no module of the model has an attribute "
            f"named {', '.join(_HEAD_NAMES)}. Pass num_heads=, or ulysses_size= and ring_size=."
        )
    return reduce(gcd, counts)
