"""Which parameters are matrices for Muon, which are left to AdamW, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch

from lightning_cp.errors import ConfigError
from lightning_cp.optim.given import Given, require_patterns, require_sizes
from lightning_cp.tables import Place, place_of, plain_table, shown_together, without_numbers

EMBEDDINGS = (
    *("*embed*", "*wte*", "*wpe*", "*vocab*", "*lm_head*", "*head.weight", "output.weight"),
    *("model.output.weight", "*classifier*", "*score.weight"),
)
"""Names of tables of tokens and of heads over them, whose rows are not a map from features to features."""

_NAMED = "an embedding or a head, by its name"
_BY_NAME = "; or, if only its name says so, pass embeddings= with other patterns"

COLUMNS = ("parameters", "count", "shape", "by", "why")


@dataclass(frozen=True)
class Assigned:
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

    def assign(self, given: Given) -> list[Assigned]:
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
        found: dict[int, Assigned] = {}
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

    def _of(self, names: list[str], x: torch.Tensor, heads: set[str], is_table: bool) -> Assigned:
        shape = tuple(x.shape)
        reason = self._reason(names, shape, heads, is_table)
        if self.matrices is not None:
            asked = next((name for name in names if _fits(name, self.matrices)), None)
            if asked is not None and reason is not None:
                raise ConfigError(
                    f"matrices= names {asked} {list(shape)}, which is no matrix for Muon: {reason}. Leave it "
                    f"to AdamW{_BY_NAME if reason == _NAMED else ''}."
                )
            if asked is None:
                return Assigned(names[0], shape, False, reason or "not named in matrices=")
            return Assigned(asked, shape, True, "named in matrices=")
        named = next((name for name in names if _fits(name, self.adamw)), None)
        if named is not None:
            return Assigned(names[0], shape, False, "named in adamw=")
        return Assigned(names[0], shape, reason is None, reason or "a matrix")

    def _unnamed_heads(self, given: Given) -> set[str]:
        """What is as large as an embedding, in no layer, and the only one: its name does not say it."""
        known = {
            name for name, x in given.named if _fits(name, self.embeddings) or id(x) in given.tables
        }
        tables = {tuple(x.shape) for name, x in given.named if name in known}
        found: dict[tuple[int, ...], list[str]] = {}
        for name, x in given.named:
            if name not in known:
                found.setdefault(tuple(x.shape), []).append(name)
        alone = [found[shape][0] for shape in tables if len(found.get(shape, ())) == 1]
        return {name for name in alone if not any(part.isdigit() for part in place_of(name))}

    def _reason(
        self, names: list[str], shape: tuple[int, ...], heads: set[str], is_table: bool
    ) -> str | None:
        """Why a parameter is no matrix."""
        if len(shape) != 2:
            return f"{len(shape)} dimension{'s' * (len(shape) != 1)}"
        if is_table:
            return "an embedding, by its module"
        if any(_fits(name, self.embeddings) for name in names):
            return _NAMED
        if len(names) > 1:
            return f"tied: it is {' and '.join(names)}"
        return "as large as an embedding: a head" if names[0] in heads else None

    def _cut(self, one: Assigned) -> Assigned:
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
            require_sizes(self.fused)
        every = {"matrices": self.matrices or (), "adamw": self.adamw, "fused": self.fused or ()}
        for setting, patterns in every.items():
            require_patterns(setting, patterns, names)
        require_patterns("embeddings", self.embeddings)
        own = [
            each for each in self.embeddings if each not in EMBEDDINGS
        ]  # of those a model has few
        require_patterns("embeddings", own, names)
        both = [x for x in names if _fits(x, self.matrices or ()) and _fits(x, self.adamw)]
        if both:
            raise ConfigError(
                f"matrices= and adamw= both name {both[0]}: it is stepped by one of them. "
                "Take it out of one of the two."
            )


def table_of(assigned: Iterable[Assigned]) -> str:
    """One line for all layers of a model."""
    groups: dict[tuple[object, ...], list[Place]] = {}
    for one in assigned:
        place = place_of(one.name)
        cut = f" ({' + '.join(map(str, one.pieces))})" if one.pieces else ""
        by = "Muon" if one.is_matrix else "AdamW"
        key = (without_numbers(place), f"{list(one.shape)}{cut}", by, one.why)
        groups.setdefault(key, []).append(place)
    rows = [
        (shown_together(places), str(len(places)), *map(str, key[1:]))
        for key, places in groups.items()
    ]
    return plain_table(COLUMNS, rows)


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
