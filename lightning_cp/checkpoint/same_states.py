"""True if all ranks are about to save the same state, under the same name: what differs would be lost."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from lightning_cp.checkpoint.failures import failed_save
from lightning_cp.checkpoint.plain import Place, dotted
from lightning_cp.checkpoint.same_paths import both, odd_path
from lightning_cp.comm.objects import World


@dataclass
class Kept:
    """The part of a value that is compared; nothing of a plain one, which may differ.

    Args:
        what: of a tensor that is spread, its dtype and shape.
        tensors: it is or has a tensor.
        parts: of a container with tensors, by key.
    """

    what: str = ""
    tensors: bool = False
    parts: dict[Any, Kept] = field(default_factory=dict)

    @property
    def spread(self) -> bool:
        """Every rank has a part of it."""
        return bool(self.what) or any(x.spread for x in self.parts.values())


_PLAIN = Kept()


def require_same_states(
    world: World,
    target: Path,
    make: Callable[[], Mapping[Any, Any]],
    heavy: tuple[type, ...] = (),
    may_differ: Collection[str] = (),
) -> None:
    """Refuse to save states of which another rank has something that the first one has not. Collective.

    What is plain, or a whole tensor, is the first rank's, whatever the others have there.

    Args:
        world: all ranks.
        target: the checkpoint.
        make: gives what this rank is about to save; does not communicate.
        heavy: what counts as having tensors, besides those.
        may_differ: keys of the top level below which only what is spread is compared.

    Raises:
        CheckpointError: on every rank: naming the first difference; or what ``make`` raises somewhere.
    """
    mine: list[Kept] = []

    def digest() -> str:
        mine.append(_kept(make(), heavy))
        mine[0].parts = dict(_below(mine[0], may_differ))
        return hashlib.sha256(repr(_ordered(mine[0])).encode()).hexdigest()

    every = world.together(digest, lambda said: failed_save(target, said))
    found = odd_path(world, target)
    if found is not None:
        why = f"ranks save to different paths: {both(*found)}. Every rank has to give the same one"
        raise failed_save(found[1][0], why)
    if len(set(every)) > 1:
        _require_same(world.gather(mine[0]), target)


def _below(top: Kept, may_differ: Collection[str]) -> Iterator[tuple[Any, Kept]]:
    for key, value in top.parts.items():
        if key not in may_differ:
            yield key, value
        elif value.spread:
            yield key, _spread(value)


def _spread(value: Kept) -> Kept:
    """Without what is not spread."""
    parts = {key: _spread(part) for key, part in value.parts.items() if part.spread}
    return Kept(value.what, value.tensors, parts)


def _require_same(every: list[Kept], target: Path) -> None:
    for rank, other in enumerate(every):
        odd = _difference(every[0], other, ())
        if odd is not None:
            how, place = odd
            raise failed_save(
                target, f"ranks save different states: rank {rank} {how} {dotted(place)!r}"
            )


def _difference(first: Kept, other: Kept, place: Place) -> tuple[str, Place] | None:
    """The difference of another rank's state from the first one's, and its place."""
    if first.what != other.what:
        return "has another", place
    if place and not (first.parts and other.parts):
        same = bool(first.what) or not (first.spread or other.spread)
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


def _kept(value: Any, heavy: tuple[type, ...], *, top: bool = True) -> Kept:
    if isinstance(value, DTensor):
        return Kept(f"{value.dtype} {tuple(value.shape)}", tensors=True)
    if isinstance(value, (torch.Tensor, *heavy)):
        return Kept(tensors=True)
    if isinstance(value, Mapping):
        items: Any = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        return _PLAIN
    made = Kept()
    for key, item in items:
        part = _kept(item, heavy, top=False)
        made.tensors |= part.tensors
        if part.spread or isinstance(value, Mapping):  # a list may be long
            made.parts[key] = part
    return made if made.tensors or top else _PLAIN


def _ordered(kept: Kept) -> Any:
    parts = sorted(((repr(key), _ordered(x)) for key, x in kept.parts.items()), key=lambda x: x[0])
    return kept.what, kept.tensors, parts
