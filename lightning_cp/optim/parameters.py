"""Which parameters are matrices for Muon, which are left to AdamW, and why."""

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

# What an optimizer was given: names and parameters, or a model, of which more is known.


Named = tuple[str, torch.Tensor]


class OptimizerInput(NamedTuple):
    """Parameters by name, tied ones under each of their names where these are known."""

    named: list[Named]
    tables: frozenset[int]
    """``id`` of those of modules that are embeddings."""

    @classmethod
    def of(cls, given: nn.Module | Iterable[Named]) -> OptimizerInput:
        """Of a model, or of ``model.named_parameters()``, which tells neither embeddings nor all ties.

        Raises:
            ConfigError: it is something else, or empty.
        """
        if isinstance(given, nn.Module):
            found = cls(list(given.named_parameters(remove_duplicate=False)), _tables(given))
        else:
            found = cls(_listed(given), frozenset())
        if not found.named:
            raise ConfigError(
                "Muon was given no parameters. Pass a model, or its named_parameters()."
            )
        return found


def _tables(model: nn.Module) -> frozenset[int]:
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return frozenset(id(x.weight) for x in model.modules() if isinstance(x, kinds))


def _listed(given: Any) -> list[Named]:
    listed = list(given) if isinstance(given, Iterable) else [given]
    for one in listed:
        named = isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str)
        if not named or not isinstance(one[1], torch.Tensor):
            raise ConfigError(
                f"Muon is given a model, or its named_parameters(), not {type(one).__name__}: names tell "
                "embeddings and heads, which have two dimensions as well."
            )
    return listed


def check_patterns(setting: str, patterns: Any, names: Sequence[str] = ()) -> None:
    """Refuse what is no list of patterns, or has one that fits none of the names, if there are any.

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
    """Refuse fused projections that are no sizes by pattern.

    Raises:
        ConfigError: showing what was got.
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
"""Names of tables of tokens and of heads over them, whose rows are not a map from features to features."""

_NAMED = "an embedding or a head, by its name"
_BY_NAME = "; or, if only its name says so, pass embeddings= with other patterns"

COLUMNS = ("parameters", "count", "shape", "by", "why")


@dataclass(frozen=True)
class Assignment:
    """A parameter, and what steps it."""

    name: str
    shape: tuple[int, ...]
    is_matrix: bool
    """Muon steps it; else AdamW."""
    why: str
    pieces: tuple[int, ...] = ()
    """Of a fused projection: the rows (or columns) of each; each is a matrix by itself."""


@dataclass(frozen=True)
class Rules:
    """How parameters are told apart; patterns as of ``fnmatch``, of whole names.

    Args:
        matrices: those that Muon steps, and no others; ``None``: all that have two dimensions and are neither
            embeddings nor heads.
        adamw: those that AdamW steps whatever they are.
        embeddings: names of embeddings and heads.
        fused: of projections that are one parameter: how many rows (of a transposed one, columns) each has.
    """

    matrices: Sequence[str] | None = None
    adamw: Sequence[str] = ()
    embeddings: Sequence[str] = EMBEDDINGS
    fused: Mapping[str, Sequence[int]] | None = None

    def assign(self, given: OptimizerInput) -> list[Assignment]:
        """What steps each parameter, in their order.

        Args:
            given: the parameters.

        Raises:
            ConfigError: nothing is a matrix, a pattern fits nothing, or one names what is none: a parameter
                of other than two dimensions, an embedding or a head, or one that is tied.
        """
        listed = given.named
        self._check([name for name, _ in listed])
        names = {id(x): [name for name, other in listed if other is x] for _, x in listed}
        heads = self._unnamed_heads(given)
        found: dict[int, Assignment] = {}
        for _, x in listed:
            found.setdefault(id(x), self._of(names[id(x)], x, heads, id(x) in given.tables))
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

    def _unnamed_heads(self, given: OptimizerInput) -> set[str]:
        """What is as large as an embedding, in no layer, and the only one: its name does not say it."""
        known = {
            name
            for name, x in given.named
            if _matches_any(name, self.embeddings) or id(x) in given.tables
        }
        tables = {tuple(x.shape) for name, x in given.named if name in known}
        found: dict[tuple[int, ...], list[str]] = {}
        for name, x in given.named:
            if name not in known:
                found.setdefault(tuple(x.shape), []).append(name)
        alone = [found[shape][0] for shape in tables if len(found.get(shape, ())) == 1]
        return {name for name in alone if not any(part.isdigit() for part in split_name(name))}

    def _reason(
        self, names: list[str], shape: tuple[int, ...], heads: set[str], is_table: bool
    ) -> str | None:
        """Why a parameter is no matrix."""
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
        """Refuse patterns that are none, or fit nothing, or contradict each other."""
        if self.fused is not None:
            check_fused_sizes(self.fused)
        every = {"matrices": self.matrices or (), "adamw": self.adamw, "fused": self.fused or ()}
        for setting, patterns in every.items():
            check_patterns(setting, patterns, names)
        check_patterns("embeddings", self.embeddings)
        own = [
            each for each in self.embeddings if each not in EMBEDDINGS
        ]  # of those a model has few
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
    """One line for all layers of a model."""
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
