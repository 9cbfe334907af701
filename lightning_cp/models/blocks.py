"""Transformer blocks of a model, found by its structure.

Blocks are members of the model's outermost module lists whose class contains attention. Lists within a
block (experts, adapters) are part of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

from torch import nn

_ATTENTION_CLASS = re.compile(r"attn|attention", re.IGNORECASE)
_ATTENTION_CHILD = re.compile(
    r"(^|_)(q|k|v|qkv|query|key|value|wq|wk|wv|wqkv|in)(_proj|_linear|_lin)?$|attn|attention",
    re.IGNORECASE,
)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the members of the model's outermost lists whose class contains attention, in order."""
    members = [m for m in _outermost_members(model) if any(True for _ in m.parameters())]
    attending = {type(m) for m in members if attends(m)}
    return [m for m in dict.fromkeys(members) if type(m) in attending]


def _outermost_members(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            yield from members(child)
        else:
            yield from _outermost_members(child)


def members(container: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a container, and of lists inside it.

    An engine cannot gather a list inside a container (nanoGPT has a dict of embeddings and a list of blocks).
    """
    for member in container.children():
        if isinstance(member, (nn.ModuleList, nn.ModuleDict)):
            yield from members(member)
        else:
            yield member


def attends(block: nn.Module) -> bool:
    """True if a class or name of a module inside looks like attention."""
    return any(
        _ATTENTION_CLASS.search(type(m).__name__)
        or any(_ATTENTION_CHILD.search(name) for name, _ in m.named_children())
        for m in block.modules()
    )


def matches(wanted: str, name: str, module: nn.Module) -> bool:
    """True if ``wanted`` is the module's class name, or a pattern that fits its dotted name.

    The prefix that FSDP2 adds to the class name is ignored.
    """
    kind = type(module).__name__
    return wanted in (kind, kind.removeprefix("FSDP")) or fnmatchcase(name, wanted)
