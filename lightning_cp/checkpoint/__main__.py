"""Verify a checkpoint, or write it in the other form: one file, or a folder of shards.

    python -m lightning_cp.checkpoint last.ckpt --verify
    python -m lightning_cp.checkpoint last.ckpt sharded.ckpt --sharded

The exit status is 1 if the checkpoint is refused or cannot be written.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_cp.checkpoint.atomic import display_path
from lightning_cp.checkpoint.full import OBJECTS_KEY
from lightning_cp.checkpoint.manifest import SaveInfo
from lightning_cp.checkpoint.read import open_checkpoint, saved_at, set_saved_at
from lightning_cp.checkpoint.save import save_checkpoint
from lightning_cp.comm.consensus import error_summary
from lightning_cp.errors import CheckpointError
from lightning_cp.utils.command_help import argument_parser

# Conversion between one file and a folder of shards, in one process and without the model.


def convert(source: Path, target: Path, *, form: str = "full") -> None:
    """Write a checkpoint in another form, after verifying it; needs memory for all of it.

    The new one gets the time of the source, so that no run resumes from it as the newest of its folder.

    Args:
        source: a checkpoint of either form.
        target: the new one, a path where nothing exists.
        form: ``full`` or ``sharded`` (a single shard, which any number of ranks can read).

    Raises:
        CheckpointError: the source is refused, or the target cannot be written.
    """
    if target.exists():
        raise CheckpointError(
            f"{display_path(target)} exists already. Remove it, or choose another name."
        )
    opened = open_checkpoint(source)
    about = opened.manifest.about if opened.manifest is not None else SaveInfo()
    kept = {key: value for key, value in opened.ours.items() if key not in ("notes", OBJECTS_KEY)}
    written = saved_at(opened.path)
    save_checkpoint(opened.read(), target, form=form, about=about, ours=kept)
    set_saved_at(target, written)


def describe(source: Path) -> str:
    """The description of a checkpoint, after verifying it.

    Raises:
        CheckpointError: the checkpoint is refused.
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 1 if the checkpoint is refused or cannot be written; one line gives the
    reason.
    """
    parser = argument_parser(__doc__)
    parser.add_argument("source", type=Path, help="a checkpoint: a file or a folder")
    parser.add_argument("target", type=Path, nargs="?", help="the new checkpoint")
    parser.add_argument("--sharded", action="store_true", help="a folder instead of one file")
    parser.add_argument("--verify", action="store_true", help="verify and describe only")
    given = parser.parse_args(arguments)
    if given.verify == (given.target is not None):
        parser.error("give a target to be written, or --verify")
    try:
        if given.target is not None:
            convert(given.source, given.target, form="sharded" if given.sharded else "full")
        print(describe(given.target or given.source))
    except CheckpointError as refused:
        print(f"error: {refused}", file=sys.stderr)
        return 1
    except OSError as failed:
        print(f"error: {error_summary(failed)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
