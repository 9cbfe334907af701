"""A table of what was swapped in a model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from lightning_cp.tables import Place, place_of, plain_table, shown_together, without_numbers

ATTENTION = re.compile(r"(Attention|Attn)(Layer|Block)?(V?\d+)?$")
"""Names of classes that are expected to call attention at least once when they are called."""

COLUMNS = ("modules", "count", "class", "attention", "was")


class Swap(NamedTuple):
    """The way the attention of a model was swapped, and its implementation outside of a step."""

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
            place = place_of(names.get(part, ""))
            kind = type(part).__name__
            groups.setdefault((without_numbers(place), kind), []).append(place)
        for (_, kind), places in groups.items():
            name = shown_together(places) or "(the model)"
            self.append(Swapped(name, len(places), kind, how, before))

    def __str__(self) -> str:
        rows = ((x.modules, _number(x.count), x.kind, x.how, x.before) for x in self)
        return plain_table(COLUMNS, rows)


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
