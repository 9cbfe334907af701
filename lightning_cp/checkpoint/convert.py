"""One file from a folder of shards, and the other way; by one process, without the model."""

from __future__ import annotations

from pathlib import Path

from lightning_cp.checkpoint.failures import shown
from lightning_cp.checkpoint.full import OBJECTS
from lightning_cp.checkpoint.latest import saved_at, set_saved_at
from lightning_cp.checkpoint.manifest import About
from lightning_cp.checkpoint.read import open_checkpoint
from lightning_cp.checkpoint.save import save_checkpoint
from lightning_cp.errors import CheckpointError


def convert(source: Path, target: Path, *, form: str = "full") -> None:
    """Write a checkpoint in another form, after verifying it; memory for all of it is needed.

    The new one is as old as the source, and no run goes on from it for being the newest of its folder.

    Args:
        source: a checkpoint of either form.
        target: the new one, where nothing may be yet.
        form: ``full`` or ``sharded`` (all of it in one shard: any number of ranks reads it).

    Raises:
        CheckpointError: the source is refused, or the target cannot be written.
    """
    if target.exists():
        raise CheckpointError(f"{shown(target)} exists already. Remove it, or choose another name.")
    opened = open_checkpoint(source)
    about = opened.manifest.about if opened.manifest is not None else About()
    kept = {key: value for key, value in opened.ours.items() if key not in ("notes", OBJECTS)}
    written = saved_at(opened.path)
    save_checkpoint(opened.read(), target, form=form, about=about, ours=kept)
    set_saved_at(target, written)


def describe(source: Path) -> str:
    """The description of a checkpoint, after verifying it.

    Raises:
        CheckpointError: it is refused.
    """
    opened = open_checkpoint(source)
    manifest = opened.manifest
    if manifest is None:
        return (
            f"{source}: readable, but it was written by another program and could not be verified"
        )
    sizes = " x ".join(f"{axis} {size}" for axis, size in manifest.about.mesh.items() if size > 1)
    count = sum(entry.bytes for entry in manifest.files.values())
    return (
        f"{source}: complete; {manifest.form}, step {manifest.about.step}, saved by "
        f"{manifest.about.engine or 'one process'} on {sizes or 'one rank'}, {count:,} bytes verified"
    )
