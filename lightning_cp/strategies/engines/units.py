"""Units of modules that are sharded, gathered and freed together: a model's blocks, and the rest.

Lists within a block (experts, adapters) stay part of it, since ranks may each use others of them, and
gathering one takes all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn

from lightning_cp.errors import ConfigError
from lightning_cp.models.blocks import blocks_of, matches

_Place = tuple[str, nn.Module, int]
"""A parameter's dotted name, the module that holds it, and its id."""


def units_of(model: nn.Module, wanted: str | Sequence[str] | None) -> list[nn.Module]:
    """The modules to be wrapped one by one, innermost first; the model itself is not among them.

    Args:
        model: the user's.
        wanted: class names or patterns of dotted names; ``None`` finds the blocks.

    Raises:
        ConfigError: something wanted matches no module, or shares a parameter with a module outside of it.
    """
    several = _in_several(model)
    if wanted is None:
        return [unit for unit in blocks_of(model) if not _shared_outside(unit, several)]
    found: dict[str, nn.Module] = {}
    for each in [wanted] if isinstance(wanted, str) else wanted:
        named = {name: m for name, m in model.named_modules() if name and matches(each, name, m)}
        if not named:
            raise ConfigError(_nothing(each, model))
        found.update(named)
    for name, unit in found.items():
        shared = _shared_outside(unit, several)
        if shared:
            raise ConfigError(
                f"wrap_modules: {name!r} shares {shared!r} with a module outside of it, so the two cannot be "
                "gathered apart. Leave it to the model itself, or wrap a module that holds both."
            )
    deepest_first = sorted(found, key=lambda name: -name.count("."))
    return [found[name] for name in deepest_first]


def _nothing(wanted: str, model: nn.Module) -> str:
    blocks = sorted({type(unit).__name__ for unit in blocks_of(model)})
    classes = Counter(
        type(m).__name__ for m in model.modules() if any(True for _ in m.parameters())
    )
    known = blocks or [name for name, _ in classes.most_common(6)]
    return (
        f"wrap_modules: {wanted!r} is neither the class nor the name of a module of {type(model).__name__}. "
        f"Classes that could be wrapped: {', '.join(known)}; None finds the blocks by itself."
    )


def _in_several(model: nn.Module) -> list[_Place]:
    """Where the parameters are that more than one module holds."""
    places = [
        (f"{name}.{key}" if name else key, module, id(parameter))
        for name, module in model.named_modules()
        for key, parameter in module.named_parameters(recurse=False)
    ]
    holders = Counter(parameter for _, _, parameter in places)
    return [place for place in places if holders[place[2]] > 1]


def _shared_outside(unit: nn.Module, shared: Sequence[_Place]) -> str:
    """The name of a parameter of ``unit`` that the rest of the model holds too; ``""`` if there is none."""
    if not shared:
        return ""
    inside = set(unit.modules())
    own = {parameter for _, module, parameter in shared if module in inside}
    outside = (
        name for name, module, parameter in shared if module not in inside and parameter in own
    )
    return next(outside, "")
