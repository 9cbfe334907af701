"""A user's plan: patterns of module names, with a style for each."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from lightning_cp.engines.tensor_parallel.auto_plan import (
    MLP,
    Attention,
    TensorParallelPlan,
    attention_in,
    attention_styles,
    check_heads,
    dotted,
    heads_in,
    mlp_styles,
    mlps_in,
)
from lightning_cp.engines.tensor_parallel.styles import (
    STYLES,
    ColwiseLinear,
    FusedColwiseLinear,
    RowwiseLinear,
    VocabularyEmbedding,
    VocabularyHead,
)
from lightning_cp.errors import ConfigError

# Checks of a user's plan, made before PyTorch fails on shapes without naming the cause.


_KINDS: tuple[tuple[tuple[type[ParallelStyle], ...], tuple[type[nn.Module], ...]], ...] = (
    ((ColwiseLinear, RowwiseLinear, FusedColwiseLinear, VocabularyHead), (nn.Linear,)),
    ((VocabularyEmbedding,), (nn.Embedding,)),
    ((ColwiseParallel, RowwiseParallel), (nn.Linear, nn.Embedding)),
)
"""Styles, and the module types that each can share."""


def check_style(pattern: str, style: object) -> None:
    """Check that ``style`` is a style; needs no model.

    Raises:
        ConfigError: naming the known styles.
    """
    names = (*STYLES, "fused_colwise")
    if not isinstance(style, ParallelStyle) and not (isinstance(style, str) and style in names):
        raise ConfigError(
            f"tensor_parallel_plan[{pattern!r}] must be a torch.distributed.tensor.parallel.ParallelStyle or "
            f"one of {', '.join(names)}, got {style!r}. "
            "Name one of these styles."
        )


def check_module_type(name: str, module: nn.Module, style: ParallelStyle) -> None:
    """Check that a style can share this type of module.

    Raises:
        ConfigError: naming the module, its type, and the types that can be shared.
    """
    for styles, kinds in _KINDS:
        if isinstance(style, styles) and not isinstance(module, kinds):
            raise ConfigError(
                f"tensor_parallel_plan: {name} is a {type(module).__name__}, but {style_name(style)} is for "
                f"{' and '.join(f'nn.{kind.__name__}' for kind in kinds)}. Linear layers and embeddings can "
                "be shared, and norms within heads take head_norm; leave anything else out: it stays whole."
            )


def check_neighbours(model: nn.Module, styles: Mapping[str, ParallelStyle]) -> None:
    """Check that no layer passes a part of its features to a layer that takes all of them, where names are
    known.

    Raises:
        ConfigError: naming the layers, and styles that fit.
    """
    for name, input_layers, output_layer in _chains(model, styles):
        first = [styles.get(dotted(name, layer)) for layer in input_layers]
        last = styles.get(dotted(name, output_layer))
        parts = {*map(_hands_on_parts, first), _takes_parts(last)}
        if len(parts) > 1 or any(map(_takes_parts, first)) or _hands_on_parts(last):
            got = zip((*input_layers, output_layer), (*first, last), strict=True)
            raise ConfigError(
                f"tensor_parallel_plan: the layers of {name or type(model).__name__} do not fit each other "
                f"({', '.join(f'{layer}: {style_name(style)}' for layer, style in got)}). "
                f"{', '.join(input_layers)} {'takes' if len(input_layers) == 1 else 'take'} colwise "
                f"(fused_colwise if it makes several things in one) and "
                f"{output_layer} takes rowwise; or leave all of them out."
            )
    for name in heads_in(model):
        style = styles.get(name)
        if not isinstance(style, VocabularyHead) and (
            _hands_on_parts(style) or _takes_parts(style)
        ):
            raise ConfigError(
                f"tensor_parallel_plan: {name} makes logits, and with {style_name(style)} a rank would have "
                "or take a part of them for the whole. Use vocabulary_head, or leave it out."
            )


def _chains(
    model: nn.Module, styles: Mapping[str, ParallelStyle]
) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Names of modules, and of their layers before and behind the divided features."""
    for found in attention_in(model, fused=True, among=styles):
        if isinstance(found, Attention):
            yield found.name, found.input_layers, found.output_layer
    for found in mlps_in(model, fused=True):
        if isinstance(found, MLP):
            sizes = {
                layer: getattr(found.module, layer).out_features for layer in found.input_layers
            }
            wide = getattr(found.module, found.output_layer).in_features
            input_layers = [layer for layer, size in sizes.items() if found.fused or size == wide]
            yield found.name, tuple(input_layers), found.output_layer


def _hands_on_parts(style: ParallelStyle | None) -> bool:
    if isinstance(style, ColwiseParallel):
        return _are_parts(style.output_layouts)
    return isinstance(style, (ColwiseLinear, FusedColwiseLinear))


def _takes_parts(style: ParallelStyle | None) -> bool:
    if isinstance(style, RowwiseParallel):
        return _are_parts(style.input_layouts)
    return isinstance(style, RowwiseLinear)


def _are_parts(layouts: Sequence[Any]) -> bool:
    """True if the features are divided; PyTorch's styles also divide sequences, or gather."""
    return any(layout.is_shard(-1) or layout.is_shard(2) for layout in layouts)


def style_name(style: ParallelStyle | None) -> str:
    """The name of a style as a plan writes it."""
    names = {kind: name for name, kind in STYLES.items()} | {FusedColwiseLinear: "fused_colwise"}
    return "whole" if style is None else names.get(type(style), type(style).__name__)


def check_widths_in_forward(
    model: nn.Module, styles: Mapping[str, ParallelStyle], size: int
) -> None:
    """Have layers raise if an input has the width of a part instead of the whole, or the reverse."""
    for name, style in styles.items():
        layer: Any = model.get_submodule(name)
        if isinstance(style, _KINDS[0][0]):
            share = size if isinstance(style, RowwiseLinear) else 1
            what = (name, style_name(style), layer.in_features // share)
            layer.register_forward_pre_hook(partial(_check_width, *what))


def _check_width(name: str, style: str, wanted: int, _: nn.Module, args: tuple[Any, ...]) -> None:
    if args and args[0].shape[-1] != wanted:
        raise ConfigError(
            f"tensor_parallel_plan: {name} is {style} and takes {wanted} features, but was given "
            f"{args[0].shape[-1]}. A rowwise layer takes a rank's part, as colwise layers before it make it; "
            "all others take the whole."
        )


def plan_from_patterns(
    model: nn.Module, patterns: Mapping[str, Any], size: int
) -> TensorParallelPlan:
    """The plan of these ``patterns``; the heads of attention modules that it shares are divided.

    Args:
        model: the model or a part of it.
        patterns: dotted names, or their last parts, with ``*`` for any part of one:
            ``layers.*.mlp.up_proj``; each with a ``ParallelStyle`` or one of the names in ``STYLES``. Later
            ones win.
        size: tensor-parallel ranks.

    Raises:
        ConfigError: a pattern without a match, an unknown style or one that does not fit its module,
            heads that do not divide, or layers whose parts do not belong together.
    """
    names = [name for name, _ in model.named_modules() if name]
    asked: dict[str, tuple[str, Any]] = {}
    for pattern, style in patterns.items():
        matching = [name for name in names if _matches(name, pattern)]
        if not matching:
            near = get_close_matches(pattern, names, n=1, cutoff=0.3)
            raise ConfigError(
                f"tensor_parallel_plan: no module is named {pattern!r}."
                + (f" Did you mean {near[0]!r}?" if near else "")
            )
        check_style(pattern, style)
        asked.update((name, (pattern, style)) for name in matching)
    plan, fused = TensorParallelPlan(), _fused_in(model, asked)
    plan.styles.update((name, _style(name, *asked[name], fused)) for name in asked)
    for name, style in plan.styles.items():
        check_module_type(name, model.get_submodule(name), style)
        if isinstance(style, FusedColwiseLinear):
            _check_parts(name, model.get_submodule(name), style, size)
    for found in attention_in(model, fused=True, among=asked):
        if isinstance(found, Attention):
            _check_all_layers(found, asked)
            check_heads(found, size)
            plan.attention.append(found)
    check_neighbours(model, plan.styles)
    return plan


def _fused_in(model: nn.Module, asked: Container[str]) -> dict[str, FusedColwiseLinear]:
    """The styles of fused layers in the usual order, by name."""
    styles: dict[str, ParallelStyle] = {}
    for found in attention_in(model, fused=True, among=asked):
        if isinstance(found, Attention):
            styles.update(attention_styles(found))
    for found in mlps_in(model, fused=True):
        if isinstance(found, MLP):
            styles.update(mlp_styles(found))
    return {name: style for name, style in styles.items() if isinstance(style, FusedColwiseLinear)}


def _check_all_layers(found: Attention, asked: Container[str]) -> None:
    """Check that a plan shares queries, keys and values of the same heads, and the layers behind them."""
    layers = (*found.input_layers, *found.norms, found.output_layer)
    missing = [name for name in layers if dotted(found.name, name) not in asked]
    if missing:
        raise ConfigError(
            f"tensor_parallel_plan shares {found.name or type(found.module).__name__} in part: "
            f"{', '.join(missing)} would stay whole, so a rank's queries, keys and values would be those of "
            f"different heads. Give all of {', '.join(layers)} a style (colwise or fused_colwise, head_norm "
            "for norms, rowwise for the last one), or none."
        )


def _check_parts(name: str, layer: Any, style: FusedColwiseLinear, size: int) -> None:
    if sum(style.parts) != layer.out_features or any(part % size for part in style.parts):
        raise ConfigError(
            f"tensor_parallel_plan: parts of {', '.join(map(str, style.parts))} features do not fit {name}, "
            f"which has {layer.out_features} for {size} ranks. They add up to its features, and each divides "
            "by tensor_parallel_size."
        )


def _matches(name: str, pattern: str) -> bool:
    """True if a name matches a pattern, compared part by part from the end."""
    parts, wanted = name.split("."), pattern.split(".")
    if len(wanted) > len(parts):
        return False
    return all(map(fnmatchcase, parts[-len(wanted) :], wanted))


def _style(
    name: str, pattern: str, style: Any, fused: Mapping[str, FusedColwiseLinear]
) -> ParallelStyle:
    if style == "colwise" or isinstance(style, (ColwiseLinear, ColwiseParallel)):
        if name in fused:
            raise ConfigError(
                f"tensor_parallel_plan[{pattern!r}]: {name} makes several things in one, so a rank's rows of "
                "it are not those of its heads or features, and colwise would be silently wrong. Use "
                "fused_colwise."
            )
        return style if isinstance(style, ParallelStyle) else ColwiseLinear()
    if style == "fused_colwise":
        if name not in fused:
            raise ConfigError(
                f"tensor_parallel_plan[{pattern!r}]: what {name} makes is not known by its name. Pass "
                "FusedColwiseLinear(parts), of lightning_cp.engines.tensor_parallel, with the "
                "number of features of each part."
            )
        return fused[name]
    return style if isinstance(style, ParallelStyle) else STYLES[style]()
