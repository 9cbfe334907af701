"""The plan of reads for one rank's part of a model, made before anything is allocated or read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import nn

from lightning_cp.checkpoint.pretrained.header import Entry
from lightning_cp.checkpoint.pretrained.index import Checkpoint
from lightning_cp.checkpoint.pretrained.keys import Rule, Source, require_used, rule_for, sources_of
from lightning_cp.checkpoint.pretrained.local import LocalParts, Runs
from lightning_cp.checkpoint.pretrained.matching import Keys, Known, Match
from lightning_cp.checkpoint.pretrained.names import Tensors
from lightning_cp.checkpoint.pretrained.prefix import find_match
from lightning_cp.checkpoint.pretrained.same_names import Allowed, require_names, some
from lightning_cp.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class Slice:
    """A box of one checkpoint tensor, and the box of a local tensor that it fills."""

    parameter: str
    entry: Entry
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    at: tuple[int, ...]
    """Where it begins in the local tensor."""

    @property
    def place(self) -> tuple[slice, ...]:
        """Of the box that it fills."""
        return tuple(slice(at, at + n) for at, n in zip(self.at, self.lengths, strict=True))

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return torch.Size(self.lengths).numel() * self.entry.dtype.itemsize


@dataclass(frozen=True)
class LoadPlan:
    """All slices of one rank, in the order in which they lie in the files."""

    slices: tuple[Slice, ...]
    tensors: Tensors
    prefix: str
    """Of the model's names; the plan's own are without."""
    missing: tuple[str, ...]
    """Parameters that the checkpoint does not have, and that were allowed to be."""
    beside: tuple[str, ...]
    """Parameters outside of the prefix that was found, by their whole names, that were allowed to be."""
    unexpected: tuple[str, ...]
    twins: tuple[Slice, ...]
    """What the files have of tied parameters under their other names, which is to be the same."""
    model_bytes: int
    """Of the tensors in the files that the model takes, each counted once."""
    names: Mapping[str, Keys]
    """Of the model's tensors, and what each is called in the files; nothing, if it is not there."""
    files: Mapping[str, Entry]
    """All that they hold."""

    @property
    def nbytes(self) -> int:
        """The bytes that this rank reads."""
        return sum(one.nbytes for one in self.slices)


def plan_load(
    model: nn.Module,
    checkpoint: Checkpoint,
    *,
    rules: Sequence[Rule] = (),
    prefix: str | None = None,
    strict: bool = True,
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
) -> LoadPlan:
    """Compare names and shapes, and say which bytes this rank needs.

    Args:
        model: with plain parameters or DTensors, on any device, ``meta`` included.
        checkpoint: what the files hold.
        rules: other names and fused parameters.
        prefix: of the model's names, without which they are the checkpoint's; ``None`` finds it.
        strict: a name that only one side has is an error.
        allow_missing: patterns (``*`` is anything) of parameters that need not be in the checkpoint.
        allow_unexpected: patterns of keys that are left unread.

    Raises:
        CheckpointError: names or shapes that do not fit, or names that fit several parts of the model.
        ConfigError: a prefix that no parameter has, or placements that nothing can be loaded into.
    """
    allowed = Allowed(allow_missing, allow_unexpected, strict)
    match, entries = find_match(model, checkpoint, rules, prefix, allowed), checkpoint.entries
    tensors = match.tensors
    if not tensors.by_name:
        raise ConfigError(
            f"no parameter of the model begins with prefix={match.taken!r}. "
            "Leave prefix out to have it found."
        )
    require_used(rules, [name for names in tensors.aliases.values() for name in names])
    missing, unexpected = match.refused(allowed)
    require_names([match.sought(x) for x in missing], unexpected, checkpoint, match.taken)
    if not match.used:
        raise CheckpointError(
            f"{checkpoint.shown} and the model have no name in common. In the files: {some(list(entries))}; "
            f"in the model: {some(list(tensors.by_name))}. Give prefix= or keys=.{checkpoint.advice}"
        )
    twins = (_slices({name: known}, match, entries) for name, known in match.twins(allowed))
    return LoadPlan(
        _slices(match.chosen, match, entries),
        tensors,
        match.taken,
        tuple(match.missing),
        tuple(match.beside),
        tuple(match.unexpected(allowed)),
        tuple(one for slices in twins for one in slices),
        sum(entries[key].nbytes for key in match.used),
        match.same_names(),
        entries,
    )


def _slices(
    chosen: Mapping[str, Known | None], match: Match, entries: Mapping[str, Entry]
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
            _require_kind(name, x, source.entry)
            found += _boxes(name, source, tuple(x.shape), parts.of(name, x))
    return tuple(sorted(found, key=lambda one: (one.entry.file, one.entry.start, one.offsets)))


def _boxes(name: str, source: Source, shape: tuple[int, ...], runs: Sequence[Runs]) -> list[Slice]:
    """The local pieces of a parameter that come from one source."""
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


def _require_kind(name: str, x: torch.Tensor, entry: Entry) -> None:
    """Dtypes may change between floating-point numbers, and nowhere else."""
    if x.dtype == entry.dtype or (x.is_floating_point() and entry.dtype.is_floating_point):
        return
    raise CheckpointError(
        f"{name} has dtype {x.dtype}, but {entry.name!r} in {entry.file.name} has {entry.dtype}. Only "
        "floating-point numbers are converted, to other ones."
    )
