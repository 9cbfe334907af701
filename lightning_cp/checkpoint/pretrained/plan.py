"""What has to be read for one rank's part of a model, decided before anything is allocated or read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import nn

from lightning_cp.checkpoint.pretrained.header import Entry
from lightning_cp.checkpoint.pretrained.index import Checkpoint
from lightning_cp.checkpoint.pretrained.keys import (
    Rule,
    Source,
    require_used,
    rule_for,
    sources_of,
)
from lightning_cp.checkpoint.pretrained.local import LocalParts, Runs
from lightning_cp.checkpoint.pretrained.names import Tensors, find_prefix, plain, tensors_of
from lightning_cp.checkpoint.pretrained.same_names import matches, require_names, some
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

    @property
    def nbytes(self) -> int:
        """What this rank reads."""
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
        CheckpointError: names or shapes that do not fit.
        ConfigError: a prefix that no parameter has, or placements that nothing can be loaded into.
    """
    taken, put = find_prefix(model, checkpoint.entries, rules) if prefix is None else (prefix, "")
    tensors = tensors_of(model, taken)
    if not tensors.by_name:
        raise ConfigError(f"no parameter of the model begins with prefix={taken!r}.")
    entries = checkpoint.entries
    require_used(rules, [name for names in tensors.aliases.values() for name in names])
    chosen = {name: _present(name, tensors, entries, rules, put) for name in tensors.by_name}
    missing = [name for name, known in chosen.items() if known is None]
    used = {key for known in chosen.values() if known is not None for key in known[1]}
    named = {key for names in tensors.aliases.values() for name in names for key in (put + name,)}
    unexpected = [key for key in entries if key not in used and key not in named]
    twins = _twins(chosen, tensors, entries, rules, put)
    left = [
        key
        for _, (_, keys) in twins
        for key in keys
        if not strict or matches(key, allow_unexpected)
    ]
    unexpected += left
    beside = _beside(model, taken, tensors) if prefix is None else []
    require_names(
        [*missing, *beside] if strict else [],
        unexpected if strict else [],
        allow_missing,
        allow_unexpected,
        checkpoint,
        taken,
    )
    if not used:
        raise CheckpointError(
            f"the checkpoint {checkpoint.path.name!r} and the model have no name in common. In the files: "
            f"{some(list(entries))}; in the model: {some(list(tensors.by_name))}. Give prefix= or keys=."
        )
    slices = _slices(chosen, tensors, entries, rules, put)
    others = [{name: known} for name, known in twins if not set(left) & set(known[1])]
    same = tuple(x for known in others for x in _slices(known, tensors, entries, rules, put))
    model_bytes = sum(entries[key].nbytes for key in used)
    return LoadPlan(
        slices, tensors, taken, tuple(missing), tuple(beside), tuple(unexpected), same, model_bytes
    )


def _beside(model: nn.Module, prefix: str, tensors: Tensors) -> list[str]:
    """Parameters that are not in the network that was found, and are not tied to one that is."""
    known = {id(x) for x in tensors.by_name.values()}
    names = ((plain(name), x) for name, x in model.named_parameters())
    return [name for name, x in names if not name.startswith(prefix) and id(x) not in known]


Known = tuple[str, tuple[str, ...]]
"""The name of a tensor that the checkpoint knows it by, and the keys that it takes."""


def _present(
    name: str, tensors: Tensors, entries: Mapping[str, Entry], rules: Sequence[Rule], put: str
) -> Known | None:
    """The first name of a tensor of which the checkpoint has everything."""
    for alias in tensors.aliases[name]:
        keys = _keys(alias, rules, put)
        if all(key in entries for key in keys):
            return alias, keys
    return None


def _twins(
    chosen: Mapping[str, Known | None],
    tensors: Tensors,
    entries: Mapping[str, Entry],
    rules: Sequence[Rule],
    put: str,
) -> list[tuple[str, Known]]:
    """What the checkpoint has of tied tensors beside what is loaded."""
    found: dict[tuple[str, ...], tuple[str, Known]] = {}
    for name, known in chosen.items():
        for alias in tensors.aliases[name] if known is not None else ():
            keys = _keys(alias, rules, put)
            if known is not None and keys != known[1] and all(key in entries for key in keys):
                found[keys] = name, (alias, keys)
    return list(found.values())


def _keys(name: str, rules: Sequence[Rule], put: str) -> tuple[str, ...]:
    keys = rule_for(name, rules).sources
    return (put + name,) if keys == (name,) else keys


def _slices(
    chosen: Mapping[str, Known | None],
    tensors: Tensors,
    entries: Mapping[str, Entry],
    rules: Sequence[Rule],
    put: str,
) -> tuple[Slice, ...]:
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
