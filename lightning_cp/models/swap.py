"""Attention swap of a whole model: its Hugging Face, LitGPT and plain PyTorch parts."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from functools import reduce
from math import gcd
from typing import Any

from torch import nn

from lightning_cp.batch.step_state import StepState as StepState
from lightning_cp.errors import UndeclaredError
from lightning_cp.layout.exchange import Exchange
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.models.call_scope import check_roots, local_modules, track_calls
from lightning_cp.models.guards.attention_calls import (
    check_sdpa_references,
    unsupported_replacements,
    watch_attention,
    watch_calls,
)
from lightning_cp.models.guards.token_mixing import check_no_mixing, watch_pooling
from lightning_cp.models.handle import Listener as Listener
from lightning_cp.models.handle import SwapHandle as SwapHandle
from lightning_cp.models.handle import (
    SwapMethod,
    SwapReport,
    SwapReportRow,
    attention_modules,
    install_replacements,
)
from lightning_cp.models.hf.swap import swap_hf
from lightning_cp.models.litgpt import check_no_local_attention, litgpt_models, swap_litgpt
from lightning_cp.models.loss_functions import loss_replacements
from lightning_cp.models.sdpa import SDPA, sdpa_replacements


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
        kernel: name of the kernel.
        roots: the modules whose attention is swapped, Hugging Face or LitGPT models or any others; by
            default all attention inside ``model``. A module that is not listed, or has
            ``context_parallel_local = True``, stays local: it attends to the tokens of its rank only, as
            cross-attention to keys that all ranks hold should.
        exchange: how keys reach the queries over the ring axis; hop by hop by default.

    Returns:
        The handle; ``print(handle.report)`` shows a table of what was swapped, ``undo()`` restores it.

    Raises:
        ConfigError: a Hugging Face model that does not use transformers' attention interface, attention of
            a LitGPT model that is not its own, one of them that is compiled, a layer that mixes tokens
            outside of attention, a part of one of these models in ``roots``, or a reference to PyTorch's
            attention function that cannot be replaced.
    """
    found, litgpts = hf_models(model), litgpt_models(model)
    listed = None if roots is None else list(roots)
    if listed is not None:
        check_roots(listed, found, litgpts)
    chosen, others = _selected_hf_models(found, listed), unswapped_hf_models(model, listed)
    local = local_modules(model, listed, others)
    check_no_mixing(model, others)
    litgpts = [root for root in litgpts if root not in local]
    check_sdpa_references(model, local)
    check_no_local_attention(litgpts, local)
    handle = SwapHandle(mesh, kernel, exchange)
    handle.provides_position_ids, handle.local_modules = bool(found or litgpts), local
    try:
        swaps = {root: swap_hf(root, handle) for root in chosen}
        swaps.update({root: swap_litgpt(root, handle) for root in litgpts})
        install_replacements(handle, sdpa_replacements, loss_replacements, unsupported_replacements)
        track_calls(model, handle, listed, local)
        watch_attention(model, handle, local)
        watch_calls(model, handle, local | _modules_to_skip(model, swaps))
        watch_pooling(model, handle, others)
    except BaseException:
        handle.undo()
        raise
    _fill_report(handle.report, model, swaps, local)
    where = "every call" if listed is None else "calls in listed modules"
    handle.report.append(SwapReportRow("torch.nn.functional", None, SDPA, where, "torch's"))
    return handle


def _modules_to_skip(model: nn.Module, roots: Iterable[nn.Module]) -> set[nn.Module]:
    """Return the modules whose call need not be recorded.

    These are the parts of models that are swapped as a whole, and ``model`` itself: the call of a
    LightningModule is the Trainer's step.
    """
    roots = set(roots)
    return {model, *(part for root in roots for part in root.modules())} - roots


def _fill_report(
    report: SwapReport,
    model: nn.Module,
    swaps: Mapping[nn.Module, SwapMethod],
    local: set[nn.Module],
) -> None:
    """Add report rows for all attention in the model, swapped or not."""
    inside = {part for root in swaps for part in root.modules()}
    plain = [part for part in attention_modules(model) if part not in inside]
    for root, swap in swaps.items():
        report.add(model, list(attention_modules(root)) or [root], *swap)
    report.add(model, [part for part in plain if part not in local], "calls of torch's", "torch's")
    report.add(model, [part for part in plain if part in local], "left alone", "its own")


def hf_models(model: nn.Module) -> list[Any]:
    """Return the outermost Hugging Face models inside ``model``; none if transformers was never imported."""
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


def _selected_hf_models(found: list[Any], listed: Iterable[nn.Module] | None) -> list[Any]:
    return found if listed is None else [part for root in listed for part in hf_models(root)]


def unswapped_hf_models(model: nn.Module, listed: Iterable[nn.Module] | None) -> list[nn.Module]:
    """Return the Hugging Face models inside ``model`` that are not swapped and contain no swapped model."""
    found = hf_models(model)
    inside = {part for root in _selected_hf_models(found, listed) for part in root.modules()}
    return [model for model in found if inside.isdisjoint(model.modules())]


def config_value(config: Any, name: str) -> Any:
    """Return a config's value of ``name``; ``None`` if it has none, or if layers differ.

    Some transformers configs raise other errors than AttributeError where layers differ.
    """
    try:
        return getattr(config, name, None)
    except Exception:
        return None


_HEAD_NAMES = ("num_attention_heads", "num_heads", "n_heads", "n_head", "nhead", "num_q_heads")


def num_heads_of(model: nn.Module) -> int:
    """Return the number of query heads, from the model's config or its modules' attributes.

    Raises:
        UndeclaredError: no module has such an attribute.
    """
    counts: set[int] = set()
    for module in model.modules():
        for holder in (getattr(module, "config", None), module):
            values = [config_value(holder, name) for name in _HEAD_NAMES]
            counts.update(value for value in values if type(value) is int and value > 0)
    if not counts:
        question = (
            "mode='auto' needs the number of attention heads, but no module of the model has an attribute "
            f"named {', '.join(_HEAD_NAMES)}. Pass num_heads=, or ulysses_size= and ring_size=."
        )
        raise UndeclaredError([question], {"num_heads": ...})
    return reduce(gcd, counts)
