"""A user's own plan: patterns of module names, with a style for each."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from lightning_cp.errors import ConfigError
from lightning_cp.strategies.engines.tensor_parallel.automatic import Plan, require_heads
from lightning_cp.strategies.engines.tensor_parallel.blocks import Attention, attention_in
from lightning_cp.strategies.engines.tensor_parallel.styles import STYLES


def given_plan(model: nn.Module, patterns: Mapping[str, Any], size: int) -> Plan:
    """The plan that ``patterns`` describe; where a module's queries are among them, its heads are shared.

    Args:
        model: a module.
        patterns: dotted names, or their last parts, with ``*`` for any part of one: ``layers.*.mlp.up_proj``;
            to each a ``ParallelStyle`` or one of the names in ``STYLES``. Later ones win.
        size: tensor-parallel ranks.

    Raises:
        ConfigError: a pattern that nothing has, what is no style, or heads that do not divide.
    """
    names = [name for name, _ in model.named_modules() if name]
    plan = Plan()
    for pattern, style in patterns.items():
        matching = [name for name in names if _matches(name, pattern)]
        if not matching:
            near = get_close_matches(pattern, names, n=1, cutoff=0.3)
            raise ConfigError(
                f"tensor_parallel_plan: no module is named {pattern!r}."
                + (f" Did you mean {near[0]!r}?" if near else "")
            )
        plan.styles.update((name, _style(pattern, style)) for name in matching)
    for found in attention_in(model, fused=True):
        if (
            isinstance(found, Attention)
            and f"{found.name}.{found.ways_in[0]}".strip(".") in plan.styles
        ):
            require_heads(found, size)
            plan.attention.append(found)
    return plan


def _matches(name: str, pattern: str) -> bool:
    """Part by part, from the end."""
    parts, wanted = name.split("."), pattern.split(".")
    if len(wanted) > len(parts):
        return False
    return all(map(fnmatchcase, parts[-len(wanted) :], wanted))


def _style(pattern: str, style: Any) -> ParallelStyle:
    if isinstance(style, str) and style in STYLES:
        return STYLES[style]()
    if isinstance(style, ParallelStyle):
        return style
    raise ConfigError(
        f"tensor_parallel_plan[{pattern!r}] must be a torch.distributed.tensor.parallel.ParallelStyle or one "
        f"of {', '.join(STYLES)}, got {style!r}."
    )
