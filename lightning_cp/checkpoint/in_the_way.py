"""Files and folders in the way of a checkpoint: a folder is replaced or removed only if it is one of ours."""

from __future__ import annotations

from pathlib import Path

from lightning_cp.checkpoint import manifest
from lightning_cp.checkpoint.failures import shown
from lightning_cp.errors import CheckpointError


def is_foreign(path: Path) -> bool:
    """True if it is a folder, and no link to one, that was not written by a save: what is in it is needed."""
    if path.is_symlink() or not path.is_dir():
        return False
    try:
        return not manifest.is_ours((path / manifest.NAME).read_text())
    except (FileNotFoundError, ValueError):
        return True


def require_replaceable(path: Path) -> None:
    """Refuse to put something in the place of a folder that holds something else; an empty one may go.

    Raises:
        CheckpointError: it does, or its own folder is a file; nothing was changed.
    """
    file = next((x for x in path.parents if x.exists() and not x.is_dir()), None)
    if file is not None:
        raise CheckpointError(
            f"cannot save {shown(path)}: {shown(file)} is a file, and a checkpoint is saved in a folder. "
            "Save somewhere else, or move the file away."
        )
    if is_foreign(path) and any(path.iterdir()):
        raise CheckpointError(
            f"{shown(path)} is a folder that is no checkpoint of lightning_cp, so it is not replaced. Save "
            "under another name, or move the folder away."
        )
