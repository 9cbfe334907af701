"""Full checkpoints in a store, or written by a CheckpointIO plugin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from typing_extensions import override

from lightning_cp.checkpoint.atomic import local_path
from lightning_cp.checkpoint.full import (
    NOTES_KEY,
    FullSave,
    load_file,
    manifest_of_file,
    verify_file,
)
from lightning_cp.checkpoint.manifest import SaveInfo
from lightning_cp.checkpoint.read import (
    Checkpoint,
    checkpoint_from_tree,
    open_checkpoint,
    single_rank_world,
)
from lightning_cp.checkpoint.store import is_store, local_copy, put_in_store, remove_from_store
from lightning_cp.comm.consensus import World
from lightning_cp.errors import CheckpointError

WriteFunction = Callable[[dict[str, Any], SaveInfo], None]


class PlainCheckpointIO(TorchCheckpointIO):
    """A CheckpointIO of whole files with a manifest, verified before they are read, also in a store. Plugins
    may wrap it.

    Lightning also uses it to move weights between its own processes, without further copies in memory.
    """

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        if NOTES_KEY not in checkpoint:
            torch.save(checkpoint, path)
            return
        about = SaveInfo(checkpoint.get("global_step"))
        if is_store(path):
            put_in_store(checkpoint, about, str(path), storage_options)
        else:
            FullSave(local_path(path), about, single_rank_world(), checkpoint).finish_locally(0)

    @override
    def load_checkpoint(
        self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        if is_store(path):
            with local_copy(str(path)) as copy:
                return self.load_checkpoint(copy, map_location, weights_only)
        file = Path(path)
        manifest = manifest_of_file(file)
        if manifest is not None:
            verify_file(file, manifest)
        return load_file(file, weights_only=weights_only is not False)

    @override
    def remove_checkpoint(self, path: Any) -> None:
        remove_from_store(str(path))


def with_plain_core(io: Any) -> Any:
    """The plugin with ours at its core, if it wraps another one and was given none."""
    if isinstance(io, _WrappingCheckpointIO):
        io.checkpoint_io = PlainCheckpointIO()
    return io


def is_plugin(io: object) -> bool:
    """True for a user's plugin, which then saves instead of the strategy."""
    return io is not None and type(io) not in (PlainCheckpointIO, TorchCheckpointIO)


def writer_for(io: Any, path: Any, storage_options: Any) -> WriteFunction | None:
    """The function that writes checkpoints to this path; ``None`` if the strategy writes a file of this
    machine.

    Raises:
        CheckpointError: options of a store for a path that is not in one.
    """
    if is_plugin(io):
        return lambda tree, about: io.save_checkpoint(tree, path, storage_options=storage_options)
    if is_store(path):
        return partial(put_in_store, path=str(path), options=storage_options)
    if storage_options is not None:
        raise CheckpointError(
            "storage_options are for stores (s3://...) and CheckpointIO plugins, and the checkpoint is "
            "local. Leave them out."
        )
    return None


def open_anywhere(io: Any, path: Any, weights_only: bool | None) -> Checkpoint:
    """Open a checkpoint; verified if it is ours. Collective.

    Raises:
        CheckpointError: on every rank: some rank cannot read it, or ranks see different ones.
    """
    safe, world = weights_only is not False, World()
    if not (is_plugin(io) or is_store(path)):
        return open_checkpoint(local_path(path), world, weights_only=safe)
    mine: list[Checkpoint] = []

    def read() -> str:
        if is_plugin(io):
            tree = io.load_checkpoint(path, weights_only=weights_only)
            mine.append(checkpoint_from_tree(Path(str(path)), tree, weights_only=safe))
        else:
            with local_copy(str(path)) as copy:
                mine.append(open_checkpoint(copy, weights_only=safe))
        manifest = mine[0].manifest
        return manifest.render() if manifest else ""

    said = world.gather_results(
        read, lambda why: CheckpointError(f"{path} was refused by another rank ({why}).")
    )
    if len(set(said)) > 1:
        raise CheckpointError(
            f"ranks see different checkpoints at {path}: something has written it meanwhile. Load it again "
            "when no other run saves there."
        )
    return replace(mine[0], world=world)


def remove_anywhere(io: Any, path: Any) -> bool:
    """Remove a checkpoint that is not a file of this machine; return False for one that is."""
    if is_plugin(io):
        io.remove_checkpoint(path)
    elif is_store(path):
        remove_from_store(str(path))
    else:
        return False
    return True
