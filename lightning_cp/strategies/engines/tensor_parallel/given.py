"""A user's own plan: patterns of module names, with a style for each."""

from __future__ import annotations

from collections.abc import Container, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle

from lightning_cp.errors import ConfigError
from lightning_cp.strategies.engines.tensor_parallel.automatic import (
    Plan,
    attention_styles,
    mlp_styles,
    require_heads,
)
from lightning_cp.strategies.engines.tensor_parallel.blocks import (
    MLP,
    Attention,
    attention_in,
    joined,
    mlps_in,
)
from lightning_cp.strategies.engines.tensor_parallel.fits import (
    require_fitting,
    require_kind,
    require_style,
)
from lightning_cp.strategies.engines.tensor_parallel.styles import (
    STYLES,
    ColwiseLinear,
    FusedColwiseLinear,
)


def given_plan(model: nn.Module, patterns: Mapping[str, Any], size: int) -> Plan:
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
    plan, fused = Plan(), _fused_in(model, asked)
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
                "FusedColwiseLinear(parts), of lightning_cp.strategies.engines.tensor_parallel, with the "
                "number of features of each part."
            )
        return fused[name]
    return style if isinstance(style, ParallelStyle) else STYLES[style]()
