"""Muon's settings and their checks; assignment of parameters to Muon (matrices) or AdamW, with reasons."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_cp.errors import ConfigError, advise_choice
from lightning_cp.optim.newton_schulz import COEFFICIENTS, EPS, STEPS
from lightning_cp.utils.console import (
    Place,
    common_name,
    plain_table,
    split_name,
    without_layer_numbers,
)

# Input of an optimizer: names and parameters, or a model, which gives more information.


Named = tuple[str, torch.Tensor]


# Checks of single settings.


def check_numbers(values: Mapping[str, Any], fits: Callable[[float], bool], wanted: str) -> None:
    """Check that settings are finite numbers in range.

    Args:
        values: settings by name.
        fits: True for a number in range.
        wanted: the range in words, such as ``above 0``.

    Raises:
        ConfigError: naming the first setting that fails.
    """
    for name, x in values.items():
        if not is_number(x) or not fits(x):
            raise ConfigError(
                f"{name} is a number {wanted}, got {x!r}. Leave it out for the default."
            )


def check_known(name: str, value: object, known: tuple[str, ...]) -> None:
    """Check that a setting is one of the known values.

    Raises:
        ConfigError: naming the known values.
    """
    if value not in known:
        advice = advise_choice(value, known)
        raise ConfigError(f"{name}={value!r} is unknown. Known: {', '.join(known)}. {advice}")


def is_number(x: object) -> bool:
    """True for a finite number that is not a bool."""
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)


ADJUSTMENTS = ("match_rms_adamw", "original")
IMPLEMENTATIONS = ("owner", "reference")
MIB = 1 << 20
DTYPES = (torch.bfloat16, torch.float32, torch.float64)
"""Dtypes in which gradients of any size are finite, which excludes float16."""
MOST_STEPS = 99
"""The limit of torch.optim.Muon."""


@dataclass(frozen=True)
class MuonSettings:
    """Arguments of :class:`lightning_cp.optim.Muon`, described there."""

    lr: float = 2e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = STEPS
    ns_coefficients: tuple[float, float, float] = COEFFICIENTS
    eps: float = EPS
    ns_dtype: torch.dtype | str = torch.bfloat16
    adjust_lr_fn: str = "match_rms_adamw"
    adamw_lr: float | None = None
    adamw_weight_decay: float | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    adamw_eps: float = 1e-8
    impl: str = "owner"
    chunk_mib: float = 256
    check_finite: bool = True

    def checked(self) -> MuonSettings:
        """The same settings, with a dtype, and defaults taken from those of matrices.

        Raises:
            ConfigError: naming the setting, its value and valid values.
        """
        check_numbers(
            {"lr": self.lr, "weight_decay": self.weight_decay}, lambda x: x >= 0, "at least 0"
        )
        optional = {"adamw_lr": self.adamw_lr, "adamw_weight_decay": self.adamw_weight_decay}
        given = {name: x for name, x in optional.items() if x is not None}
        check_numbers(given, lambda x: x >= 0, "at least 0, or None for that of matrices")
        shares = {"momentum": self.momentum}
        pair = _numbers("betas", self.betas, 2)
        shares |= {f"betas[{at}]": x for at, x in enumerate(pair)}
        check_numbers(shares, lambda x: 0 <= x < 1, "at least 0 and below 1")
        positive = {"eps": self.eps, "adamw_eps": self.adamw_eps, "chunk_mib": self.chunk_mib}
        check_numbers(positive, lambda x: x > 0, "above 0")
        if type(self.ns_steps) is not int or not 1 <= self.ns_steps <= MOST_STEPS:
            raise ConfigError(
                f"ns_steps is a whole number from 1 to {MOST_STEPS}, got {self.ns_steps!r}; 5 is usual."
            )
        coefficients = _numbers("ns_coefficients", self.ns_coefficients, 3)
        check_known("adjust_lr_fn", self.adjust_lr_fn, ADJUSTMENTS)
        check_known("impl", self.impl, IMPLEMENTATIONS)
        dtype = _dtype(self.ns_dtype)
        if self.impl == "reference" and dtype != torch.bfloat16:
            raise ConfigError(
                f"impl='reference' is torch.optim.Muon, which computes in bfloat16, got ns_dtype={dtype}. "
                "Leave ns_dtype, or use impl='owner'."
            )
        return replace(
            self,
            ns_dtype=dtype,
            ns_coefficients=coefficients,
            betas=pair,
            adamw_lr=self.lr if self.adamw_lr is None else self.adamw_lr,
            adamw_weight_decay=(
                self.weight_decay if self.adamw_weight_decay is None else self.adamw_weight_decay
            ),
        )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which matrices are orthogonalised."""
        return _dtype(self.ns_dtype)

    @property
    def chunk_bytes(self) -> int:
        """The limit in bytes of whole matrices that an owner holds in a round."""
        return int(self.chunk_mib * MIB)

    @property
    def matrix_group(self) -> dict[str, Any]:
        """Settings of the group of matrices, named as in torch.optim.Muon."""
        names = ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps")
        names += ("ns_steps", "adjust_lr_fn")
        return {"kind": "muon", **{name: getattr(self, name) for name in names}}

    @property
    def adamw_group(self) -> dict[str, Any]:
        """Settings of the group of all other parameters, named as in torch.optim.AdamW."""
        rate, decay = self.adamw_lr, self.adamw_weight_decay
        given = {"lr": rate, "weight_decay": decay, "betas": self.betas, "eps": self.adamw_eps}
        return {"kind": "adamw", **given}


def _numbers(name: str, values: Any, many: int) -> Any:
    found = tuple(values) if isinstance(values, (list, tuple)) else ()
    if len(found) != many or not all(map(is_number, found)):
        raise ConfigError(f"{name} are {many} numbers, got {values!r}. Give them as a tuple.")
    return found


def _dtype(given: torch.dtype | str) -> torch.dtype:
    dtype = getattr(torch, given, None) if isinstance(given, str) else given
    if dtype not in DTYPES:
        raise ConfigError(
            f"ns_dtype={given!r} is not a dtype to compute in. Use bfloat16 (usual), float32 or float64."
        )
    return dtype


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
                    f"matrices= names {asked} {list(shape)}, which is not a matrix for Muon: {reason}. Leave "
                    f"it to AdamW{_BY_NAME if reason == _NAMED else ''}."
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
