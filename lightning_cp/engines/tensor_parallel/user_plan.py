"""A user's own plan: patterns of module names, with a style for each."""

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
    heads_in,
    joined,
    mlp_styles,
    mlps_in,
    require_heads,
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

# Checks of a user's plan, before PyTorch fails on shapes that do not say why.


_KINDS: tuple[tuple[tuple[type[ParallelStyle], ...], tuple[type[nn.Module], ...]], ...] = (
    ((ColwiseLinear, RowwiseLinear, FusedColwiseLinear, VocabularyHead), (nn.Linear,)),
    ((VocabularyEmbedding,), (nn.Embedding,)),
    ((ColwiseParallel, RowwiseParallel), (nn.Linear, nn.Embedding)),
)
"""Styles, and the modules that they share."""


def require_style(pattern: str, style: object) -> None:
    """Refuse what is no style; known before there is a model.

    Raises:
        ConfigError: naming those that there are.
    """
    names = (*STYLES, "fused_colwise")
    if not isinstance(style, ParallelStyle) and not (isinstance(style, str) and style in names):
        raise ConfigError(
            f"tensor_parallel_plan[{pattern!r}] must be a torch.distributed.tensor.parallel.ParallelStyle or "
            f"one of {', '.join(names)}, got {style!r}. "
            "Name one of these styles."
        )


def require_kind(name: str, module: nn.Module, style: ParallelStyle) -> None:
    """Refuse a style for a module that it cannot share.

    Raises:
        ConfigError: naming the module, its type, and what can be shared.
    """
    for styles, kinds in _KINDS:
        if isinstance(style, styles) and not isinstance(module, kinds):
            raise ConfigError(
                f"tensor_parallel_plan: {name} is a {type(module).__name__}, but {named(style)} is for "
                f"{' and '.join(f'nn.{kind.__name__}' for kind in kinds)}. Linear layers and embeddings can "
                "be shared, and norms within heads take head_norm; leave anything else out: it stays whole."
            )


def require_fitting(model: nn.Module, styles: Mapping[str, ParallelStyle]) -> None:
    """Refuse layers that hand on parts to others that take the whole, where their names are known.

    Raises:
        ConfigError: naming the layers, and styles that fit.
    """
    for name, ways_in, way_out in _chains(model, styles):
        first = [styles.get(joined(name, layer)) for layer in ways_in]
        last = styles.get(joined(name, way_out))
        parts = {*map(_hands_on_parts, first), _takes_parts(last)}
        if len(parts) > 1 or any(map(_takes_parts, first)) or _hands_on_parts(last):
            got = zip((*ways_in, way_out), (*first, last), strict=True)
            raise ConfigError(
                f"tensor_parallel_plan: the layers of {name or type(model).__name__} do not fit each other "
                f"({', '.join(f'{layer}: {named(style)}' for layer, style in got)}). "
                f"{', '.join(ways_in)} {'takes' if len(ways_in) == 1 else 'take'} colwise (fused_colwise if "
                f"it makes several things in one) and {way_out} takes rowwise; or leave all of them out."
            )
    for name in heads_in(model):
        style = styles.get(name)
        if not isinstance(style, VocabularyHead) and (
            _hands_on_parts(style) or _takes_parts(style)
        ):
            raise ConfigError(
                f"tensor_parallel_plan: {name} makes logits, and with {named(style)} a rank would have or "
                "take a part of them for the whole. Use vocabulary_head, or leave it out."
            )


def _chains(
    model: nn.Module, styles: Mapping[str, ParallelStyle]
) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Names of modules, and of their layers before and behind what ranks have parts of."""
    for found in attention_in(model, fused=True, among=styles):
        if isinstance(found, Attention):
            yield found.name, found.ways_in, found.way_out
    for found in mlps_in(model, fused=True):
        if isinstance(found, MLP):
            sizes = {layer: getattr(found.module, layer).out_features for layer in found.ways_in}
            wide = getattr(found.module, found.way_out).in_features
            ways_in = [layer for layer, size in sizes.items() if found.fused or size == wide]
            yield found.name, tuple(ways_in), found.way_out


def _hands_on_parts(style: ParallelStyle | None) -> bool:
    if isinstance(style, ColwiseParallel):
        return _are_parts(style.output_layouts)
    return isinstance(style, (ColwiseLinear, FusedColwiseLinear))


def _takes_parts(style: ParallelStyle | None) -> bool:
    if isinstance(style, RowwiseParallel):
        return _are_parts(style.input_layouts)
    return isinstance(style, RowwiseLinear)


def _are_parts(layouts: Sequence[Any]) -> bool:
    """Of the features; PyTorch's styles also share sequences, or gather."""
    return any(layout.is_shard(-1) or layout.is_shard(2) for layout in layouts)


def named(style: ParallelStyle | None) -> str:
    """As a plan would."""
    names = {kind: name for name, kind in STYLES.items()} | {FusedColwiseLinear: "fused_colwise"}
    return "whole" if style is None else names.get(type(style), type(style).__name__)


def watch_widths(model: nn.Module, styles: Mapping[str, ParallelStyle], size: int) -> None:
    """Have layers say so if they are given a part for the whole, or the whole for a part."""
    for name, style in styles.items():
        layer: Any = model.get_submodule(name)
        if isinstance(style, _KINDS[0][0]):
            share = size if isinstance(style, RowwiseLinear) else 1
            what = (name, named(style), layer.in_features // share)
            layer.register_forward_pre_hook(partial(_require_width, *what))


def _require_width(name: str, style: str, wanted: int, _: nn.Module, args: tuple[Any, ...]) -> None:
    if args and args[0].shape[-1] != wanted:
        raise ConfigError(
            f"tensor_parallel_plan: {name} is {style} and takes {wanted} features, but was given "
            f"{args[0].shape[-1]}. A rowwise layer takes a rank's part, as colwise layers before it make it; "
            "all others take the whole."
        )


def given_plan(model: nn.Module, patterns: Mapping[str, Any], size: int) -> TensorParallelPlan:
    """The plan that ``patterns`` describe; heads of the attention modules that it shares are divided.

    Args:
        model: a module.
        patterns: dotted names, or their last parts, with ``*`` for any part of one: ``layers.*.mlp.up_proj``;
            to each a ``ParallelStyle`` or one of the names in ``STYLES``. Later ones win.
        size: tensor-parallel ranks.

    Raises:
        ConfigError: a pattern that nothing has, what is no style or not one for this module, heads that do
            not divide, or layers of which a rank would have parts that do not belong together.
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
        require_style(pattern, style)
        asked.update((name, (pattern, style)) for name in matching)
    plan, fused = TensorParallelPlan(), _fused_in(model, asked)
    plan.styles.update((name, _style(name, *asked[name], fused)) for name in asked)
    for name, style in plan.styles.items():
        require_kind(name, model.get_submodule(name), style)
        if isinstance(style, FusedColwiseLinear):
            _require_parts(name, model.get_submodule(name), style, size)
    for found in attention_in(model, fused=True, among=asked):
        if isinstance(found, Attention):
            _require_all_layers(found, asked)
            require_heads(found, size)
            plan.attention.append(found)
    require_fitting(model, plan.styles)
    return plan


def _fused_in(model: nn.Module, asked: Container[str]) -> dict[str, FusedColwiseLinear]:
    """Of layers that make several things in one, in the usual order: the style that shares each of them."""
    styles: dict[str, ParallelStyle] = {}
    for found in attention_in(model, fused=True, among=asked):
        if isinstance(found, Attention):
            styles.update(attention_styles(found))
    for found in mlps_in(model, fused=True):
        if isinstance(found, MLP):
            styles.update(mlp_styles(found))
    return {name: style for name, style in styles.items() if isinstance(style, FusedColwiseLinear)}


def _require_all_layers(found: Attention, asked: Container[str]) -> None:
    """Queries, keys and values of the same heads, and what works on these."""
    layers = (*found.ways_in, *found.norms, found.way_out)
    missing = [name for name in layers if joined(found.name, name) not in asked]
    if missing:
        raise ConfigError(
            f"tensor_parallel_plan shares {found.name or type(found.module).__name__} in part: "
            f"{', '.join(missing)} would stay whole, so a rank's queries, keys and values would be those of "
            f"different heads. Give all of {', '.join(layers)} a style (colwise or fused_colwise, head_norm "
            "for norms, rowwise for the last one), or none."
        )


def _require_parts(name: str, layer: Any, style: FusedColwiseLinear, size: int) -> None:
    if sum(style.parts) != layer.out_features or any(part % size for part in style.parts):
        raise ConfigError(
            f"tensor_parallel_plan: parts of {', '.join(map(str, style.parts))} features do not fit {name}, "
            f"which has {layer.out_features} for {size} ranks. They add up to its features, and each divides "
            "by tensor_parallel_size."
        )


def _matches(name: str, pattern: str) -> bool:
    """Part by part, from the end."""
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
