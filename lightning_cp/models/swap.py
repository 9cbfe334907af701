"""Swapping the attention of a whole model: which models there are inside, and what is replaced."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from functools import reduce
from math import gcd
from typing import Any

from torch import nn

from lightning_cp.attention.exchange import Exchange
from lightning_cp.errors import UndeclaredError
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.models.functions import replace_for
from lightning_cp.models.handle import Listener as Listener
from lightning_cp.models.handle import SwapHandle as SwapHandle
from lightning_cp.models.held import refuse_held
from lightning_cp.models.hf import swap_hf
from lightning_cp.models.litgpt import litgpt_models, require_whole, swap_litgpt
from lightning_cp.models.loss_functions import noted_losses
from lightning_cp.models.mixing import refuse_mixing
from lightning_cp.models.others import refused_others
from lightning_cp.models.pooling import watch_pooling
from lightning_cp.models.report import Swap, Swapped, SwapReport, attention_modules
from lightning_cp.models.scope import follow_calls, left_alone, require_roots
from lightning_cp.models.sdpa import SDPA, swapped_sdpa
from lightning_cp.models.step_state import StepState as StepState
from lightning_cp.models.watch import watch_attention, watch_calls


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
        model: a module, with or without Hugging Face or LitGPT models inside.
        mesh: the process groups.
        kernel: which kernel to use.
        roots: the modules whose attention is swapped, Hugging Face or LitGPT models or any others; by
            default all attention inside ``model``. What is not listed, or has ``context_parallel_local =
            True``, is left alone: on each rank it attends to what the rank holds, as cross-attention to
            keys that all ranks hold should.
        exchange: how keys reach the queries over the ring axis; hop by hop by default.

    Returns:
        The handle; ``print(handle.report)`` shows a table of what was swapped, ``undo()`` restores it.

    Raises:
        ConfigError: a Hugging Face model that does not use transformers' attention interface, attention of
            a LitGPT model that is not its own, one of them that is compiled, a layer that mixes tokens
            outside of attention, a part of one of these models in ``roots``, or PyTorch's attention function
            kept where it cannot be replaced.
    """
    found, litgpts = hf_models(model), litgpt_models(model)
    listed = None if roots is None else list(roots)
    if listed is not None:
        require_roots(listed, found, litgpts)
    chosen, others = _chosen(found, listed), left_out(model, listed)
    alone = left_alone(model, listed, others)
    refuse_mixing(model, others)
    litgpts = [root for root in litgpts if root not in alone]
    refuse_held(model, alone)
    require_whole(litgpts, alone)
    handle = SwapHandle(mesh, kernel, exchange)
    handle.tells_positions, handle.alone = bool(found or litgpts), alone
    try:
        swaps = {root: swap_hf(root, handle) for root in chosen}
        swaps.update({root: swap_litgpt(root, handle) for root in litgpts})
        replace_for(handle, swapped_sdpa, noted_losses, refused_others)
        follow_calls(model, handle, listed, alone)
        watch_attention(model, handle, alone)
        watch_calls(model, handle, alone | _follow_another(model, swaps))
        watch_pooling(model, handle, others)
    except BaseException:
        handle.undo()
        raise
    _fill(handle.report, model, swaps, alone)
    where = "every call" if listed is None else "calls in listed modules"
    handle.report.append(Swapped("torch.nn.functional", None, SDPA, where, "torch's"))
    return handle


def _follow_another(model: nn.Module, roots: Iterable[nn.Module]) -> set[nn.Module]:
    """Modules whose call says nothing: parts of what is swapped whole; and a LightningModule, whose call is
    the Trainer's step."""
    roots = set(roots)
    return {model, *(part for root in roots for part in root.modules())} - roots


def _fill(
    report: SwapReport, model: nn.Module, swaps: Mapping[nn.Module, Swap], alone: set[nn.Module]
) -> None:
    """Lines for all attention that is seen in the model, swapped or not."""
    inside = {part for root in swaps for part in root.modules()}
    plain = [part for part in attention_modules(model) if part not in inside]
    for root, swap in swaps.items():
        report.add(model, list(attention_modules(root)) or [root], *swap)
    report.add(model, [part for part in plain if part not in alone], "calls of torch's", "torch's")
    report.add(model, [part for part in plain if part in alone], "left alone", "its own")


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


def _chosen(found: list[Any], listed: Iterable[nn.Module] | None) -> list[Any]:
    return found if listed is None else [part for root in listed for part in hf_models(root)]


def left_out(model: nn.Module, listed: Iterable[nn.Module] | None) -> list[nn.Module]:
    """Hugging Face models inside ``model`` that are not swapped, and hold none that is."""
    found = hf_models(model)
    inside = {part for root in _chosen(found, listed) for part in root.modules()}
    return [model for model in found if inside.isdisjoint(model.modules())]


def told(config: Any, name: str) -> Any:
    """A config's value of ``name``; ``None`` if it has none, or another one in each layer.

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
        UndeclaredError: nothing in the model says how many heads it has.
    """
    counts: set[int] = set()
    for module in model.modules():
        for holder in (getattr(module, "config", None), module):
            values = [told(holder, name) for name in _HEAD_NAMES]
            counts.update(value for value in values if type(value) is int and value > 0)
    if not counts:
        question = (
            "mode='auto' needs the number of attention heads, but no module of the model has an attribute "
            f"named {', '.join(_HEAD_NAMES)}. Pass num_heads=, or ulysses_size= and ring_size=."
        )
        raise UndeclaredError([question], {"num_heads": ...})
    return reduce(gcd, counts)
