"""The plan of reads for one rank's part of a model, made before anything is allocated or read."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from lightning_cp.checkpoint.atomic import local_path
from lightning_cp.checkpoint.pretrained.files import TensorEntry, WeightFiles
from lightning_cp.checkpoint.pretrained.keys import (
    Rule,
    Source,
    Tensors,
    check_rules_used,
    rule_for,
    sources_of,
)
from lightning_cp.checkpoint.pretrained.matching import (
    AllowedNames,
    Keys,
    Known,
    Match,
    check_names,
    find_match,
    first_names,
)
from lightning_cp.checkpoint.pretrained.options import PretrainedOptions, dtype_of
from lightning_cp.comm.consensus import World, fingerprint
from lightning_cp.errors import CheckpointError, ConfigError, without_home

# The part of a parameter that this rank holds, for any placements.
#
# A DTensor's placements compose from left to right, and a rank's part of a dimension need not be one range
# (``_StridedShard``: FSDP over tensor parallelism on one dimension). So PyTorch shards an index tensor in the
# same way, and the indices of this rank are read. There is no communication.


Runs = tuple[tuple[int, int], ...]
"""Ranges of a dimension, as (first global index, length), in local order."""


@dataclass
class LocalParts:
    """Ranges of this rank in every dimension of parameters, cached by mesh and placements."""

    _known: dict[tuple[Any, ...], Runs] = field(default_factory=dict)

    def of(self, name: str, x: torch.Tensor) -> tuple[Runs, ...]:
        """The ranges of this rank for every dimension of ``x``.

        Args:
            name: of the parameter, for the error.
            x: a parameter or buffer; a plain one is whole. It may be on the meta device.

        Raises:
            ConfigError: a partial sum, which cannot be loaded into.
        """
        if not isinstance(x, DTensor):
            return tuple(((0, size),) for size in x.shape)
        if any(placement.is_partial() for placement in x.placements):
            raise ConfigError(
                f"{name} has placements {x.placements}: a partial sum over ranks cannot be loaded. Shard "
                "or replicate it first."
            )
        runs = tuple(self._of_dim(x, dim) for dim in range(x.ndim))
        held = tuple(sum(length for _, length in pieces) for pieces in runs)
        local = tuple(x.to_local().shape) if x.numel() else held
        if held != local:
            raise ConfigError(
                f"{name} of shape {tuple(x.shape)} with placements {x.placements} has {local} here, where "
                f"sharding its numbers gives {held}. Shard it in equal parts."
            )
        return runs

    def _of_dim(self, x: DTensor, dim: int) -> Runs:
        kept = tuple(p if getattr(p, "dim", None) == dim else Replicate() for p in x.placements)
        key = (x.device_mesh, kept, x.shape[dim])
        if key not in self._known:
            self._known[key] = _runs(x, kept, x.shape[dim])
        return self._known[key]


def _runs(x: DTensor, placements: tuple[Any, ...], size: int) -> Runs:
    if all(isinstance(p, Replicate) for p in placements):
        return ((0, size),)
    # Sharded along dimension 0 of an index vector, for any dimension of ``x``.
    along = [p if isinstance(p, Replicate) else _along_dim_0(p) for p in placements]
    numbers = torch.arange(size, device=x.device_mesh.device_type)
    local = distribute_tensor(numbers, x.device_mesh, along, src_data_rank=None).to_local().cpu()
    if not local.numel():
        return ()
    breaks = (torch.diff(local) != 1).nonzero().flatten() + 1
    pieces = torch.tensor_split(local, breaks.tolist())
    return tuple((int(piece[0]), len(piece)) for piece in pieces)


def _along_dim_0(placement: Any) -> Any:
    """The same placement for dimension 0."""
    if placement.dim == 0:
        return placement
    if hasattr(placement, "split_factor"):
        return type(placement)(0, split_factor=placement.split_factor)
    return type(placement)(0)


@dataclass(frozen=True)
class Slice:
    """A box of one checkpoint tensor, and the box of a local tensor that it fills."""

    parameter: str
    entry: TensorEntry
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    at: tuple[int, ...]
    """Start in the local tensor."""

    @property
    def place(self) -> tuple[slice, ...]:
        """The box to fill in the local tensor."""
        return tuple(slice(at, at + n) for at, n in zip(self.at, self.lengths, strict=True))

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return torch.Size(self.lengths).numel() * self.entry.dtype.itemsize


@dataclass(frozen=True)
class LoadPlan:
    """All slices of one rank, in the order of the files."""

    slices: tuple[Slice, ...]
    tensors: Tensors
    prefix: str
    """Prefix of the model's names; names in the plan are without it."""
    missing: tuple[str, ...]
    """Allowed parameters that the checkpoint does not have."""
    outside: tuple[str, ...]
    """Allowed parameters outside of the found prefix, by full name."""
    unexpected: tuple[str, ...]
    tied: tuple[Slice, ...]
    """Slices of tied parameters under their other names, which must have equal values."""
    model_bytes: int
    """Size in the files of the tensors that the model takes, each counted once."""
    names: Mapping[str, Keys]
    """Names of the model's tensors, with their keys in the files; empty for a missing one."""
    files: Mapping[str, TensorEntry]
    """All tensors of the files."""

    @property
    def nbytes(self) -> int:
        """Bytes that this rank reads."""
        return sum(one.nbytes for one in self.slices)


def plan_load(
    model: nn.Module,
    checkpoint: WeightFiles,
    *,
    rules: Sequence[Rule] = (),
    prefix: str | None = None,
    strict: bool = True,
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
) -> LoadPlan:
    """Compare names and shapes, and plan the reads of this rank.

    Args:
        model: with plain parameters or DTensors, on any device, ``meta`` included.
        checkpoint: the files.
        rules: other names and fused parameters.
        prefix: of the model's names, removed for those of the checkpoint; ``None`` finds it.
        strict: a name that only one side has is an error.
        allow_missing: patterns (``*`` is anything) of parameters that may be missing in the checkpoint.
        allow_unexpected: patterns of keys that may stay unread.

    Raises:
        CheckpointError: names or shapes that do not fit, or names that fit several parts of the model.
        ConfigError: a prefix that no parameter has, or placements that cannot be loaded into.
    """
    allowed = AllowedNames(allow_missing, allow_unexpected, strict)
    match, entries = find_match(model, checkpoint, rules, prefix, allowed), checkpoint.entries
    tensors = match.tensors
    if not tensors.by_name:
        raise ConfigError(
            f"no parameter of the model begins with prefix={match.model_prefix!r}. "
            "Leave prefix out to have it found."
        )
    check_rules_used(rules, [name for names in tensors.aliases.values() for name in names])
    missing, unexpected = match.refused(allowed)
    check_names(
        [match.describe_missing(x) for x in missing], unexpected, checkpoint, match.model_prefix
    )
    if not match.used:
        raise CheckpointError(
            f"{checkpoint.display_name} and the model have no name in common. In the files: "
            f"{first_names(list(entries))}; "
            f"in the model: {first_names(list(tensors.by_name))}. Give prefix= or keys=.{checkpoint.advice}"
        )
    tied = (_slices({name: known}, match, entries) for name, known in match.tied_names(allowed))
    return LoadPlan(
        _slices(match.chosen, match, entries),
        tensors,
        match.model_prefix,
        tuple(match.missing),
        tuple(match.outside),
        tuple(match.unexpected(allowed)),
        tuple(one for slices in tied for one in slices),
        sum(entries[key].nbytes for key in match.used),
        match.same_names(),
        entries,
    )


def _slices(
    chosen: Mapping[str, Known | None], match: Match, entries: Mapping[str, TensorEntry]
) -> tuple[Slice, ...]:
    tensors, rules = match.tensors, match.rules
    shapes = {
        alias: tuple(x.shape)
        for name, x in tensors.by_name.items()
        for alias in tensors.aliases[name]
    }
    parts, found = LocalParts(), []
    for name, known in chosen.items():
        if known is None:
            continue
        alias, keys = known
        if rule_for(alias, rules).sources == (alias,) and keys != (alias,):
            rules_here: Sequence[Rule] = (Rule((alias,), keys),)
        else:
            rules_here = rules
        x = tensors.by_name[name]
        for source in sources_of(alias, shapes, entries, rules_here):
            _check_dtype(name, x, source.entry)
            found += _boxes(name, source, tuple(x.shape), parts.of(name, x))
    return tuple(sorted(found, key=lambda one: (one.entry.file, one.entry.start, one.offsets)))


def _boxes(name: str, source: Source, shape: tuple[int, ...], runs: Sequence[Runs]) -> list[Slice]:
    """The slices of a parameter from one source."""
    along: list[list[tuple[int, int, int]]] = []  # (in the entry, length, in the local tensor)
    for dim, pieces in enumerate(runs):
        whole = source.length is None or dim != source.dim
        start, shift = (0, 0) if whole else (source.start, source.entry_start)
        end = shape[dim] if whole else start + (source.length or 0)
        found, local = [], 0
        for first, length in pieces:
            low, high = max(first, start), min(first + length, end)
            if low < high:
                found.append((low - start + shift, high - low, local + low - first))
            local += length
        along.append(found)
    boxes = []
    for box in product(*along):
        offsets, lengths, at = zip(*box, strict=True) if box else ((), (), ())
        boxes.append(Slice(name, source.entry, offsets, lengths, at))
    return boxes


def _check_dtype(name: str, x: torch.Tensor, entry: TensorEntry) -> None:
    """Check that a dtype changes only between floating-point numbers."""
    if x.dtype == entry.dtype or (x.is_floating_point() and entry.dtype.is_floating_point):
        return
    raise CheckpointError(
        f"{name} has dtype {x.dtype}, but {entry.name!r} in {entry.file.name} has {entry.dtype}. Only "
        "floating-point numbers are converted, to other ones."
    )


# Every rank loads the same tensors: plans are compared before anything is allocated.


_log = logging.getLogger("lightning_cp")

Facts = dict[str, Mapping[str, str]]


def check_same_plan(plan: LoadPlan, options: PretrainedOptions) -> None:
    """Check that ranks have the same files, names, parts of the model and dtypes. Collective.

    Machines may have different copies, one of them outdated. Only the slice that a rank reads of a tensor may
    differ.

    Raises:
        CheckpointError: on every rank, naming the first difference, and the ranks.
    """
    world, facts = World(), _facts(plan, options)
    own = {what: fingerprint(sorted(said.items())) for what, said in facts.items()}
    every = world.gather(own)
    odd = next((rank for rank, others in enumerate(every) if others != every[0]), None)
    if odd is not None:
        shown = world.gather(facts if world.rank in (0, odd) else {})
        what = next(name for name in facts if every[odd][name] != every[0][name])
        _raise_difference(what, shown[0][what], shown[odd][what], odd)


def warn_different_paths(path: str | os.PathLike[str]) -> None:
    """Log on the first rank that another one loads from another path. Collective.

    Machines may have copies of their own, so that is not an error; but a checkpoint of another training has
    the same names and shapes, and values are not compared.
    """
    world = World()
    every = world.gather(str(local_path(path)))
    odd = next((rank for rank, other in enumerate(every) if other != every[0]), None)
    if odd is not None and world.rank == 0:
        _log.warning(
            "ranks load from different paths: %s on rank 0, %s on rank %d. Names, dtypes and shapes in their "
            "files are the same; that their values are, too, is not looked at.",
            without_home(every[0]),
            without_home(every[odd]),
            odd,
        )


def _facts(plan: LoadPlan, options: PretrainedOptions) -> Facts:
    """Facts of a plan by subject, in the order in which a difference is named."""
    return {
        "the files are": {
            repr(key): f"{entry.dtype} {list(entry.shape)}" for key, entry in plan.files.items()
        },
        "the option dtype is": {"it": str(dtype_of(options.dtype))},
        "the part of the model is": {"it": repr(plan.prefix)},
        "the names in the files are": {
            repr(name): " + ".join(map(repr, keys)) or "missing"
            for name, keys in plan.names.items()
        },
    }


def _raise_difference(
    what: str, first: Mapping[str, str], other: Mapping[str, str], odd: int
) -> NoReturn:
    name = min(x for x in {*first, *other} if first.get(x) != other.get(x))
    said = [x.get(name, "not there") for x in (first, other)]
    raise CheckpointError(
        f"{what} not the same on ranks 0 and {odd}: {name} is {said[0]} on rank 0 and {said[1]} on rank "
        f"{odd}. Every machine needs the same files, and every rank the same model and options. Nothing was "
        "loaded."
    )
