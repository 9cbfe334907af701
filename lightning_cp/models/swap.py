"""Attention swap of a whole model: its Hugging Face, LitGPT and plain PyTorch parts; and its scope.

Attention calls of local modules are not intercepted. An attention call does not name its module, so hooks
track which module is being called. All modules inside are tracked, not only the outermost: a checkpoint calls
its content again, without the modules around it. Cross-entropy is replaced, in any import style, by functions
that record the number of targets of their mean.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from math import gcd
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor

from lightning_cp.batch.step_state import StepState as StepState
from lightning_cp.errors import ConfigError, UndeclaredError
from lightning_cp.layout.exchange import Exchange
from lightning_cp.loss.terms import targets_of
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.models.guards.attention_calls import (
    check_sdpa_references,
    unsupported_replacements,
    watch_attention,
    watch_calls,
)
from lightning_cp.models.guards.shifts import shift_replacements
from lightning_cp.models.guards.token_mixing import LOCAL, check_no_mixing, watch_pooling
from lightning_cp.models.handle import Listener as Listener
from lightning_cp.models.handle import (
    SwapHandle,
    SwapMethod,
    SwapReport,
    SwapReportRow,
    attention_modules,
    install_replacements,
)
from lightning_cp.models.hf.router_loss import router_replacements
from lightning_cp.models.hf.swap import swap_hf
from lightning_cp.models.litgpt import check_no_local_attention, litgpt_models, swap_litgpt
from lightning_cp.models.sdpa import SDPA, sdpa_replacements
from lightning_cp.utils.autograd_notes import Count, note_origin
from lightning_cp.utils.labels import IGNORED_LABEL
from lightning_cp.utils.patching import ChainedPatch, ReplacedFunction, add_hook
from lightning_cp.utils.tracing import exclude_from_compile, is_traced

CountTargets = Callable[..., Count | None]
"""Returns the target count of a mean, ``SUM`` for a sum, ``None`` for losses that are not reduced."""

SUM = -1.0


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


def loss_replacements(handle: SwapHandle) -> list[ReplacedFunction]:
    """Return loss functions that record their target count while a step is active.

    In training the count goes onto the autograd graph; in evaluation, without a graph, to the step's record
    of losses, which logged values are compared with.
    """
    held = weakref.ref(handle)  # a global must not keep a model alive
    known: list[tuple[Any, str, CountTargets]]
    known = [(F, name, _count_cross_entropy) for name in ("cross_entropy", "nll_loss")]
    known.append((F, "linear_cross_entropy", _count_linear))
    known.append((sys.modules.get("litgpt.utils"), "chunked_cross_entropy", _count_litgpt))
    return [
        _noting_replacement(home, name, counted, held)
        for home, name, counted in known
        if hasattr(home, name)
    ]


def _noting_replacement(
    home: Any, name: str, counted: CountTargets, held: Callable[[], SwapHandle | None]
) -> ReplacedFunction:
    original = getattr(home, name)
    link = ChainedPatch(original)

    @functools.wraps(original)
    def noting(*args: Any, **kwargs: Any) -> torch.Tensor:
        if is_traced(args[0] if args else None):
            return link.original(*args, **kwargs)
        handle = held()
        state = None if handle is None else handle.state
        if state is not None and counted is _count_cross_entropy:
            args, kwargs = _with_padding_ignored(*args, **kwargs)
        loss = link.original(*args, **kwargs)
        if state is None or not (loss.requires_grad or state.losses is not None):
            return loss
        if is_functorch_wrapped_tensor(
            loss
        ):  # inside vmap or grad: no final loss, no own token count
            return loss
        count = counted(*args, **kwargs)
        if count is None:
            if state.losses is not None and state.has_target is not None:
                state.losses.note_each(loss, state.has_target)
            return loss
        if count is not SUM:
            note_origin(loss, count)
        if state.losses is not None:
            state.losses.note(loss, None if count is SUM else count)
        return loss

    return ReplacedFunction(home, name, noting, link)


def _with_padding_ignored(
    input: Any, target: Any, *args: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a loss of classes with the strategy's padding, -100, as its ignored class.

    PyTorch refuses targets of -100 where another class is ignored, so no target of one process is changed.
    """
    ignored = args[2] if len(args) > 2 else kwargs.get("ignore_index", IGNORED_LABEL)
    if ignored != IGNORED_LABEL and not target.is_floating_point():
        target = target.masked_fill(target == IGNORED_LABEL, ignored)
    return (input, target, *args), kwargs


def _count_cross_entropy(
    input: Any,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: object = None,
    ignore_index: int = -100,
    reduce: object = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Count | None:
    if size_average is not None or reduce is not None or reduction == "none":
        return None
    if reduction == "sum":
        return SUM
    classes = input.shape[1 if len(input.shape) > 1 else 0]
    return targets_of(target, weight, ignore_index, classes)


def _count_linear(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    **kwargs: Any,
) -> Count | None:
    if reduction != "mean":
        return SUM if reduction == "sum" else None
    ignored = -100 if ignore_index is None else ignore_index
    return targets_of(target, weight, ignored, linear_weight.shape[0])


def _count_litgpt(
    logits: Any, targets: torch.Tensor, chunk_size: int = 128, ignore_index: int = -100
) -> Count:
    """Return the target count of LitGPT's ``chunked_cross_entropy``."""
    return targets_of(targets, None, ignore_index)


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
        of_routers = functools.partial(router_replacements, model.modules())
        known = (sdpa_replacements, loss_replacements, unsupported_replacements)
        install_replacements(handle, *known, of_routers, shift_replacements)
        track_calls(handle, listed, local)
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
