"""The blocks of a model, found by how it is built.

They are members of the model's outermost lists, of classes that hold attention: lists within a block
(experts, adapters) are part of it.
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
    """Members of the model's outermost lists whose class holds attention, in order."""
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
    """A list in a container (nanoGPT's dict of embeddings and a list of blocks) cannot be gathered itself."""
    for member in container.children():
        if isinstance(member, (nn.ModuleList, nn.ModuleDict)):
            yield from members(member)
        else:
            yield member


def attends(block: nn.Module) -> bool:
    """True if a module looks like one with attention inside: by the classes and names of what it holds."""
    return any(
        _ATTENTION_CLASS.search(type(m).__name__)
        or any(_ATTENTION_CHILD.search(name) for name, _ in m.named_children())
        for m in block.modules()
    )


def matches(wanted: str, name: str, module: nn.Module) -> bool:
    """True if a module is of the class ``wanted``, also once FSDP2 has made its own class of it, or its
    dotted name fits that pattern."""
    kind = type(module).__name__
    return wanted in (kind, kind.removeprefix("FSDP")) or fnmatchcase(name, wanted)
