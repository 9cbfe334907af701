"""What was swapped in a model, as a table."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

ATTENTION = re.compile(r"(Attention|Attn)(Layer|Block)?(V?\d+)?$")
"""Names of classes that are expected to call attention at least once when they are called."""

Place = tuple[str, ...]
"""A module's name, at its dots."""

COLUMNS = ("modules", "count", "class", "attention", "was")


class Swap(NamedTuple):
    """How the attention of a model was swapped, and the implementation that it has outside of a step."""

    how: str
    before: str


@dataclass(frozen=True)
class Swapped:
    """Modules of one class at one place, or a function; how their attention reaches the whole sequence."""

    modules: str
    """Their names; ``*`` stands for the number of a layer."""
    count: int | None
    """How many; ``None``: it is a function, whoever calls it."""
    kind: str
    how: str
    before: str
    """The implementation that is used outside of a step."""

    def __str__(self) -> str:
        many = "" if self.count is None else f"{self.count} x "
        return f"{many}{self.kind} ({self.how}, was {self.before})"


class SwapReport(list[Swapped]):
    """Its lines; as a string it is a table."""

    def add(self, model: nn.Module, parts: Sequence[nn.Module], how: str, before: str) -> None:
        """A line for all of ``parts`` that have the same class, and names that differ in numbers only.

        Args:
            model: whose names of modules are shown.
            parts: what was swapped, or left alone.
            how: the way in which.
            before: what is used outside of a step.
        """
        names = {module: name for name, module in model.named_modules()}
        groups: dict[tuple[Place, str], list[Place]] = {}
        for part in parts:
            place = tuple(names.get(part, "").split("."))
            kind = type(part).__name__
            groups.setdefault((_without_numbers(place), kind), []).append(place)
        for (_, kind), places in groups.items():
            self.append(Swapped(_shown(places), len(places), kind, how, before))

    def __str__(self) -> str:
        lines = [
            COLUMNS,
            *((x.modules, _number(x.count), x.kind, x.how, x.before) for x in self),
        ]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        padded = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        return "\n".join([padded[0], "  ".join("-" * width for width in widths), *padded[1:]])


def attention_modules(root: nn.Module) -> Iterator[nn.Module]:
    """The innermost modules inside whose classes are named as attention."""
    for module in root.modules():
        if _is_attention(module):
            inside = (part for part in module.modules() if part is not module)
            if not any(map(_is_attention, inside)):
                yield module


def _is_attention(module: nn.Module) -> bool:
    return ATTENTION.search(type(module).__name__) is not None


def _number(count: int | None) -> str:
    return "-" if count is None else str(count)


def _without_numbers(place: Place) -> Place:
    return tuple("*" if part.isdigit() else part for part in place)


def _shown(places: Sequence[Place]) -> str:
    """One name for all: a number stays if it is the same in all of them."""
    together = (set(parts) for parts in zip(*places, strict=True))
    return ".".join(parts.pop() if len(parts) == 1 else "*" for parts in together) or "(the model)"
