"""``latest``: which checkpoint of a folder was completed last. It is written after everything else."""

from __future__ import annotations

from pathlib import Path

from lightning_cp.checkpoint.durable import found, replace_text

NAME = "latest"


def point_to(target: Path) -> None:
    """Say that ``target`` is the newest complete checkpoint of its folder."""
    replace_text(target.with_name(NAME), target.name + "\n")


def latest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that was completed last, if it is still there.

    What it names has not been verified; reading it does that.
    """
    try:
        name = (folder / NAME).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    if not name or name != Path(name).name:
        return None
    path = found(folder / name)
    return path if path.exists() else None
