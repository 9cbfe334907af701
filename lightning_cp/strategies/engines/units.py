"""Which modules are sharded, gathered and freed together: a model's blocks, and the rest.

The automatic choice takes members of the model's outermost lists, of classes that hold attention: lists
within a block (experts, adapters) stay part of it, since ranks may each use others of them, and gathering
one takes all ranks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from lightning_cp.errors import ConfigError

_ATTENTION_CLASS = re.compile(r"attn|attention", re.IGNORECASE)
_ATTENTION_CHILD = re.compile(
    r"(^|_)(q|k|v|qkv|query|key|value|wq|wk|wv|wqkv|in)(_proj|_linear|_lin)?$|attn|attention",
    re.IGNORECASE,
)


def units_of(model: nn.Module, wanted: str | Sequence[str] | None) -> list[nn.Module]:
    """The modules to be wrapped one by one, innermost first; the model itself is not among them.

    Args:
        model: the user's.
        wanted: class names or patterns of dotted names; ``None`` finds the blocks.

    Raises:
        ConfigError: something wanted matches no module, or shares a parameter with a module outside of it.
    """
    if wanted is None:
        return [unit for unit in _blocks(model) if not _shared_outside(unit, model)]
    found: dict[str, nn.Module] = {}
    for each in [wanted] if isinstance(wanted, str) else wanted:
        matches = {name: m for name, m in model.named_modules() if name and _matches(each, name, m)}
        if not matches:
            raise ConfigError(_nothing(each, model))
        found.update(matches)
    for name, unit in found.items():
        shared = _shared_outside(unit, model)
        if shared:
            raise ConfigError(
                f"wrap_modules: {name!r} shares {shared!r} with a module outside of it, so the two cannot be "
                "gathered apart. Leave it to the model itself, or wrap a module that holds both."
            )
    deepest_first = sorted(found, key=lambda name: -name.count("."))
    return [found[name] for name in deepest_first]


def _matches(wanted: str, name: str, module: nn.Module) -> bool:
    return type(module).__name__ == wanted or fnmatchcase(name, wanted)


def _nothing(wanted: str, model: nn.Module) -> str:
    blocks = sorted({type(unit).__name__ for unit in _blocks(model)})
    classes = Counter(
        type(m).__name__ for m in model.modules() if any(True for _ in m.parameters())
    )
    known = blocks or [name for name, _ in classes.most_common(6)]
    return (
        f"wrap_modules: {wanted!r} is neither the class nor the name of a module of {type(model).__name__}. "
        f"Classes that could be wrapped: {', '.join(known)}; None finds the blocks by itself."
    )


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Members of outermost lists whose class holds attention."""
    members = [m for m in _outermost_members(model) if any(True for _ in m.parameters())]
    attending = {type(m) for m in members if _attends(m)}
    return [m for m in dict.fromkeys(members) if type(m) in attending]


def _outermost_members(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            yield from _members(child)
        else:
            yield from _outermost_members(child)


def _members(container: nn.Module) -> Iterator[nn.Module]:
    """A list in a container (nanoGPT's dict of embeddings and a list of blocks) cannot be gathered itself."""
    for member in container.children():
        if isinstance(member, (nn.ModuleList, nn.ModuleDict)):
            yield from _members(member)
        else:
            yield member


def _attends(block: nn.Module) -> bool:
    """Whether a module looks like one with attention: by the classes and names of what it holds."""
    return any(
        _ATTENTION_CLASS.search(type(m).__name__)
        or any(_ATTENTION_CHILD.search(name) for name, _ in m.named_children())
        for m in block.modules()
    )


def _shared_outside(unit: nn.Module, model: nn.Module) -> str:
    """The name of a parameter of ``unit`` that the rest of the model holds too; ``""`` if there is none."""
    inside = set(unit.modules())
    own = {id(p) for p in unit.parameters()}
    for name, module in model.named_modules():
        if module in inside:
            continue
        for key, parameter in module.named_parameters(recurse=False):
            if id(parameter) in own:
                return f"{name}.{key}" if name else key
    return ""
