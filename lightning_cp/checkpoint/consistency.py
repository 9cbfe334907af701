"""Checks that all ranks save the same state under the same name: differences would be lost."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from lightning_cp.checkpoint.atomic import save_error
from lightning_cp.checkpoint.tree import Place, dotted
from lightning_cp.comm.consensus import World
from lightning_cp.errors import without_home

# Comparison of the checkpoint's path on all ranks.


def first_different_path(world: World, path: Path) -> tuple[int, list[Path]] | None:
    """The first rank whose path differs from rank 0's, and the paths of all; ``None`` if all agree.
    Collective.

    Ranks may run in different folders: paths that are equal relative to each working directory are equal.
    """
    every = world.gather((str(path), _relative_path(path)))
    first, near = every[0]
    for rank, (other, other_near) in enumerate(every):
        if other != first and other_near != near:
            return rank, [Path(other) for other, _ in every]
    return None


def path_difference(rank: int, every: list[Path]) -> str:
    """Both paths as texts, shown so that they differ."""
    first, other = every[0], every[rank]
    if first.parent == other.parent:
        first, other = Path(first.name), Path(other.name)
    return f"{without_home(str(first))} on rank 0, {without_home(str(other))} on rank {rank}"


def _relative_path(path: Path) -> str:
    try:
        return os.path.relpath(path)
    except FileNotFoundError:  # the working directory was deleted
        return str(path)


@dataclass
class StateSummary:
    """The compared part of a value; empty for a plain one, which may differ.

    Args:
        what: dtype and shape of a distributed tensor.
        tensors: True if it is or contains a tensor.
        parts: of a container with tensors, by key.
    """

    what: str = ""
    tensors: bool = False
    parts: dict[Any, StateSummary] = field(default_factory=dict)

    @property
    def is_distributed(self) -> bool:
        """True if every rank has a part of it."""
        return bool(self.what) or any(x.is_distributed for x in self.parts.values())


_PLAIN_VALUE = StateSummary()


def check_same_states(
    world: World,
    target: Path,
    make: Callable[[], Mapping[Any, Any]],
    heavy: tuple[type, ...] = (),
    may_differ: Collection[str] = (),
) -> None:
    """Check that no rank has a state that the first rank lacks. Collective.

    Plain values and whole tensors are saved from the first rank only.

    Args:
        world: all ranks.
        target: path of the checkpoint.
        make: returns this rank's state; does not communicate.
        heavy: types that count as tensors.
        may_differ: keys of the top level below which only distributed tensors are compared.

    Raises:
        CheckpointError: on every rank: naming the first difference; or an error that ``make`` raises on
            some rank.
    """
    mine: list[StateSummary] = []

    def digest() -> str:
        mine.append(_summarize(make(), heavy))
        mine[0].parts = dict(_below(mine[0], may_differ))
        return hashlib.sha256(repr(_ordered(mine[0])).encode()).hexdigest()

    every = world.gather_results(digest, lambda said: save_error(target, said))
    found = first_different_path(world, target)
    if found is not None:
        why = f"ranks save to different paths: {path_difference(*found)}. Every rank has to give the same one"
        raise save_error(found[1][0], why)
    if len(set(every)) > 1:
        _check_same(world.gather(mine[0]), target)


def _below(top: StateSummary, may_differ: Collection[str]) -> Iterator[tuple[Any, StateSummary]]:
    for key, value in top.parts.items():
        if key not in may_differ:
            yield key, value
        elif value.is_distributed:
            yield key, _distributed_only(value)


def _distributed_only(value: StateSummary) -> StateSummary:
    """The summary of distributed tensors only."""
    parts = {
        key: _distributed_only(part) for key, part in value.parts.items() if part.is_distributed
    }
    return StateSummary(value.what, value.tensors, parts)


def _check_same(every: list[StateSummary], target: Path) -> None:
    for rank, other in enumerate(every):
        odd = _difference(every[0], other, ())
        if odd is not None:
            how, place = odd
            raise save_error(
                target, f"ranks save different states: rank {rank} {how} {dotted(place)!r}"
            )


def _difference(first: StateSummary, other: StateSummary, place: Place) -> tuple[str, Place] | None:
    """The difference of another rank's state from the first one's, and its place."""
    if first.what != other.what:
        return "has another", place
    if place and not (first.parts and other.parts):
        same = bool(first.what) or not (first.is_distributed or other.is_distributed)
        return None if same else ("has another", place)
    for key, value in other.parts.items():
        if key not in first.parts and (value.tensors or not place):
            return "also has", (*place, key)
    for key, value in first.parts.items():
        if key not in other.parts and value.tensors:
            return "has no", (*place, key)
    both = (key for key in first.parts if key in other.parts)
    found = (_difference(first.parts[key], other.parts[key], (*place, key)) for key in both)
    return next((x for x in found if x is not None), None)


def _summarize(value: Any, heavy: tuple[type, ...], *, top: bool = True) -> StateSummary:
    if isinstance(value, DTensor):
        return StateSummary(f"{value.dtype} {tuple(value.shape)}", tensors=True)
    if isinstance(value, (torch.Tensor, *heavy)):
        return StateSummary(tensors=True)
    if isinstance(value, Mapping):
        items: Any = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        return _PLAIN_VALUE
    made = StateSummary()
    for key, item in items:
        part = _summarize(item, heavy, top=False)
        made.tensors |= part.tensors
        if part.is_distributed or isinstance(value, Mapping):  # a list may be long
            made.parts[key] = part
    return made if made.tensors or top else _PLAIN_VALUE


def _ordered(kept: StateSummary) -> Any:
    parts = sorted(((repr(key), _ordered(x)) for key, x in kept.parts.items()), key=lambda x: x[0])
    return kept.what, kept.tensors, parts
