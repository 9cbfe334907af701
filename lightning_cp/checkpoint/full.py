"""Saving in the full form: one file, which the first rank writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from lightning_cp.checkpoint.durable import SAVING, beside, discard, make_folder, put_in_place
from lightning_cp.checkpoint.failures import failed_save
from lightning_cp.checkpoint.full_file import write_file
from lightning_cp.checkpoint.gathered import gather
from lightning_cp.checkpoint.manifest import About
from lightning_cp.checkpoint.objects import WithObjects
from lightning_cp.checkpoint.plain import Place, map_leaves
from lightning_cp.comm.objects import World

OURS = "lightning_cp"
"""The key of the top level under which notes are kept; plain Lightning does not look at it."""
OBJECTS = "objects"
"""Among the notes: keys whose values have a pickle beside their plain form."""


@dataclass
class FullSave:
    """One save, as one rank sees it: the first one has all of the state, the others nothing.

    Args:
        target: the file.
        about: for the manifest.
        world: all ranks.
        tree: plain, its tensors on the CPU; on the first rank.
        objects: pickles of hyperparameters, by their keys.
        live: storages of the state that was given, by their addresses.
        staged: what was written so far.
        elsewhere: writes and completes it instead, in another place than a file of this machine.
    """

    target: Path
    about: About
    world: World
    tree: dict[str, Any] | None
    objects: Mapping[str, bytes] = field(default_factory=dict)
    live: frozenset[int] = frozenset()
    staged: Path | None = None
    elsewhere: Callable[[dict[str, Any], About], None] | None = None

    def copy(self) -> None:
        """Take the values as they are now; what was gathered is ours already."""
        copies: dict[tuple[Any, ...], torch.Tensor] = {}

        def copied(place: Place, x: torch.Tensor) -> torch.Tensor:
            if x.untyped_storage().data_ptr() not in self.live:
                return x
            memory = (x.data_ptr(), x.shape, x.stride(), x.dtype)
            return copies.setdefault(memory, x.clone()) if x.numel() else x.clone()

        if self.tree is not None:
            self.tree = map_leaves(self.tree, copied)

    def write(self) -> None:
        """Write the file beside its place.

        Raises:
            OSError: it could not be written.
        """
        if self.tree is None:
            return
        objects = {key: WithObjects(self.tree[key], x) for key, x in self.objects.items()}
        tree = {**self.tree, **objects}
        if self.elsewhere is not None:
            self.elsewhere(tree, self.about)
            return
        make_folder(self.target.parent)
        self.staged = beside(self.target, SAVING)
        write_file(tree, self.staged, self.about)

    def commit(self, parts: object = None) -> None:
        """Give it its name, on the first rank; one of that name is replaced in one step."""
        if self.staged is not None:
            put_in_place(self.staged, self.target)

    def give_up(self) -> None:
        """Remove what was written so far."""
        if self.staged is not None:
            discard(self.staged)

    def finish_alone(self, limit: float) -> None:
        """Write and commit; nothing is sent."""
        try:
            self.write()
            self.commit()
        except Exception:
            self.give_up()
            raise


def plan_full(
    tree: dict[str, Any],
    ours: dict[str, Any],
    target: Path,
    about: About,
    objects: Mapping[str, bytes],
) -> FullSave:
    """Bring the state together on the first rank's CPU, one tensor at a time. Collective.

    Args:
        tree: plain, spread tensors at the same places on every rank.
        ours: what is noted beside it, plain.
        target: the file.
        about: for the manifest.
        objects: pickles of hyperparameters, by their keys; on the first rank.

    Raises:
        CheckpointError: on the other ranks: the first one cannot keep a tensor.
        Exception: on the first rank: why it cannot.
    """
    world = World()
    gathered = gather(tree, keeps=world.rank == 0)
    live: set[int] = set()
    map_leaves(tree, lambda _, x: live.add(_storage_of(x)))
    save = FullSave(target, about, world, None, objects, frozenset(live))

    def complete() -> None:
        if world.rank == 0:
            save.tree = {**gathered.whole(tree), OURS: {**ours, OBJECTS: list(objects)}}

    world.together(complete, lambda said: failed_save(target, said))
    return save


def _storage_of(x: torch.Tensor) -> int:
    held = x.to_local() if isinstance(x, DTensor) else x
    return held.untyped_storage().data_ptr()
