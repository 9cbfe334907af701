"""Assignment of parameters to Muon (matrices) or AdamW, with reasons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_cp.errors import ConfigError
from lightning_cp.utils.console import (
    Place,
    common_name,
    plain_table,
    split_name,
    without_layer_numbers,
)

# Input of an optimizer: names and parameters, or a model, which gives more information.


Named = tuple[str, torch.Tensor]


class OptimizerInput(NamedTuple):
    """Parameters by name; tied ones under each of their names if these are known."""

    named: list[Named]
    tables: frozenset[int]
    """``id`` of the parameters of embedding modules."""

    @classmethod
    def of(cls, inputs: nn.Module | Iterable[Named]) -> OptimizerInput:
        """Read a model, or ``model.named_parameters()``, which shows neither embeddings nor all ties.

        Raises:
            ConfigError: any other type, or no parameters.
        """
        if isinstance(inputs, nn.Module):
            found = cls(list(inputs.named_parameters(remove_duplicate=False)), _tables(inputs))
        else:
            found = cls(_listed(inputs), frozenset())
        if not found.named:
            raise ConfigError(
                "Muon was given no parameters. Pass a model, or its named_parameters()."
            )
        return found


def _tables(model: nn.Module) -> frozenset[int]:
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return frozenset(id(x.weight) for x in model.modules() if isinstance(x, kinds))


def _listed(inputs: Any) -> list[Named]:
    listed = list(inputs) if isinstance(inputs, Iterable) else [inputs]
    for one in listed:
        named = isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str)
        if not named or not isinstance(one[1], torch.Tensor):
            raise ConfigError(
                f"Muon is given a model, or its named_parameters(), not {type(one).__name__}: names tell "
                "embeddings and heads, which have two dimensions as well."
            )
    return listed


def check_patterns(setting: str, patterns: Any, names: Sequence[str] = ()) -> None:
    """Check that a setting is a list of patterns, each of which matches one of ``names``, if there are any.

    Raises:
        ConfigError: naming the setting.
    """
    is_list = isinstance(patterns, Iterable) and not isinstance(patterns, str)
    if not is_list or not all(isinstance(x, str) for x in patterns):
        raise ConfigError(
            f"{setting}= is a list of patterns of names, got {patterns!r}. "
            "Put the pattern into a list, even if it is the only one."
        )
    for pattern in patterns if names else ():
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"{setting}= has {pattern!r}, which fits no parameter. There are: "
                f"{', '.join(names[:8])}{', ...' * (len(names) > 8)}."
            )


def check_fused_sizes(fused: Any) -> None:
    """Check that fused projections are sizes by pattern.

    Raises:
        ConfigError: showing the value.
    """
    good = isinstance(fused, Mapping) and all(
        isinstance(sizes, Iterable) and all(type(n) is int and n > 0 for n in sizes)
        for sizes in fused.values()
    )
    if not good:
        raise ConfigError(
            f"fused= maps patterns of names to positive sizes of projections, got {fused!r}: "
            '{"*.qkv_proj.weight": (4096, 1024, 1024)}.'
        )


EMBEDDINGS = (
    *("*embed*", "*wte*", "*wpe*", "*vocab*", "*lm_head*", "*head.weight", "output.weight"),
    *("model.output.weight", "*classifier*", "*score.weight"),
)
"""Names of token embeddings and heads, whose rows do not map features to features."""

_NAMED = "an embedding or a head, by its name"
_BY_NAME = "; or, if only its name says so, pass embeddings= with other patterns"

COLUMNS = ("parameters", "count", "shape", "by", "why")


@dataclass(frozen=True)
class Assignment:
    """A parameter, and the optimizer that steps it."""

    name: str
    shape: tuple[int, ...]
    is_matrix: bool
    """True for Muon, False for AdamW."""
    why: str
    pieces: tuple[int, ...] = ()
    """For a fused projection: the rows (or columns) of each part, which is a matrix by itself."""


@dataclass(frozen=True)
class Rules:
    """Rules that assign parameters to optimizers; patterns as in ``fnmatch``, of whole names.

    Args:
        matrices: the only parameters that Muon steps; ``None``: all that have two dimensions and are
            neither embeddings nor heads.
        adamw: parameters that AdamW always steps.
        embeddings: names of embeddings and heads.
        fused: for projections in one parameter: the number of rows (of a transposed one, columns) of
            each.
    """

    matrices: Sequence[str] | None = None
    adamw: Sequence[str] = ()
    embeddings: Sequence[str] = EMBEDDINGS
    fused: Mapping[str, Sequence[int]] | None = None

    def assign(self, inputs: OptimizerInput) -> list[Assignment]:
        """The assignment of each parameter, in order.

        Args:
            inputs: the parameters.

        Raises:
            ConfigError: no parameter is a matrix, a pattern matches nothing, or a pattern matches a
                parameter that cannot be a matrix: not of two dimensions, an embedding or a head, or tied.
        """
        listed = inputs.named
        self._check([name for name, _ in listed])
        names = {id(x): [name for name, other in listed if other is x] for _, x in listed}
        heads = self._unnamed_heads(inputs)
        found: dict[int, Assignment] = {}
        for _, x in listed:
            found.setdefault(id(x), self._of(names[id(x)], x, heads, id(x) in inputs.tables))
        every = [self._cut(one) for one in found.values()]
        if not any(one.is_matrix for one in every):
            shown = ", ".join(f"{one.name} {list(one.shape)}: {one.why}" for one in every[:8])
            raise ConfigError(
                f"no parameter is a matrix that Muon could step, out of {len(every)} ({shown}). Use "
                "torch.optim.AdamW, or name matrices with matrices=, or fewer embeddings with embeddings=."
            )
        return every

    def _of(self, names: list[str], x: torch.Tensor, heads: set[str], is_table: bool) -> Assignment:
        shape = tuple(x.shape)
        reason = self._reason(names, shape, heads, is_table)
        if self.matrices is not None:
            asked = next((name for name in names if _matches_any(name, self.matrices)), None)
            if asked is not None and reason is not None:
                raise ConfigError(
                    f"matrices= names {asked} {list(shape)}, which is no matrix for Muon: {reason}. Leave it "
                    f"to AdamW{_BY_NAME if reason == _NAMED else ''}."
                )
            if asked is None:
                return Assignment(names[0], shape, False, reason or "not named in matrices=")
            return Assignment(asked, shape, True, "named in matrices=")
        named = next((name for name in names if _matches_any(name, self.adamw)), None)
        if named is not None:
            return Assignment(names[0], shape, False, "named in adamw=")
        return Assignment(names[0], shape, reason is None, reason or "a matrix")

    def _unnamed_heads(self, inputs: OptimizerInput) -> set[str]:
        """Heads without a known name: the only parameter outside of a layer that is as large as an
        embedding.
        """
        known = {
            name
            for name, x in inputs.named
            if _matches_any(name, self.embeddings) or id(x) in inputs.tables
        }
        tables = {tuple(x.shape) for name, x in inputs.named if name in known}
        found: dict[tuple[int, ...], list[str]] = {}
        for name, x in inputs.named:
            if name not in known:
                found.setdefault(tuple(x.shape), []).append(name)
        alone = [found[shape][0] for shape in tables if len(found.get(shape, ())) == 1]
        return {name for name in alone if not any(part.isdigit() for part in split_name(name))}

    def _reason(
        self, names: list[str], shape: tuple[int, ...], heads: set[str], is_table: bool
    ) -> str | None:
        """The reason why a parameter is not a matrix; ``None`` if it is."""
        if len(shape) != 2:
            return f"{len(shape)} dimension{'s' * (len(shape) != 1)}"
        if is_table:
            return "an embedding, by its module"
        if any(_matches_any(name, self.embeddings) for name in names):
            return _NAMED
        if len(names) > 1:
            return f"tied: it is {' and '.join(names)}"
        return "as large as an embedding: a head" if names[0] in heads else None

    def _cut(self, one: Assignment) -> Assignment:
        for pattern, sizes in (self.fused or {}).items():
            if not fnmatchcase(one.name, pattern):
                continue
            pieces = tuple(sizes)
            if not one.is_matrix:
                raise ConfigError(
                    f"fused= names {one.name}, which AdamW steps: {one.why}. It has nothing to be split for."
                )
            if sum(pieces) not in one.shape:
                raise ConfigError(
                    f"fused={{{pattern!r}: {list(pieces)}}} does not fit {one.name} {list(one.shape)}: the "
                    "sizes of its projections are positive, and add up to its rows (or to its columns)."
                )
            return replace(one, pieces=pieces)
        return one

    def _check(self, names: list[str]) -> None:
        """Check that patterns are valid, match something, and do not contradict each other."""
        if self.fused is not None:
            check_fused_sizes(self.fused)
        every = {"matrices": self.matrices or (), "adamw": self.adamw, "fused": self.fused or ()}
        for setting, patterns in every.items():
            check_patterns(setting, patterns, names)
        check_patterns("embeddings", self.embeddings)
        own = [
            each for each in self.embeddings if each not in EMBEDDINGS
        ]  # a model has few of them
        check_patterns("embeddings", own, names)
        both = [
            x for x in names if _matches_any(x, self.matrices or ()) and _matches_any(x, self.adamw)
        ]
        if both:
            raise ConfigError(
                f"matrices= and adamw= both name {both[0]}: it is stepped by one of them. "
                "Take it out of one of the two."
            )


def table_of(assigned: Iterable[Assignment]) -> str:
    """A table with one line for all layers of a model."""
    groups: dict[tuple[object, ...], list[Place]] = {}
    for one in assigned:
        place = split_name(one.name)
        cut = f" ({' + '.join(map(str, one.pieces))})" if one.pieces else ""
        by = "Muon" if one.is_matrix else "AdamW"
        key = (without_layer_numbers(place), f"{list(one.shape)}{cut}", by, one.why)
        groups.setdefault(key, []).append(place)
    rows = [
        (common_name(places), str(len(places)), *map(str, key[1:]))
        for key, places in groups.items()
    ]
    return plain_table(COLUMNS, rows)


def _matches_any(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
