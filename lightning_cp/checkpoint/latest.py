"""The checkpoint of a folder that was completed last: nothing but the checkpoints themselves says so."""

from __future__ import annotations

import os
from collections.abc import Iterator
from os import PathLike
from pathlib import Path

from lightning_cp.checkpoint.atomic import BEFORE, leftovers, locate
from lightning_cp.checkpoint.full import manifest_of_file
from lightning_cp.checkpoint.manifest import NAME as MANIFEST
from lightning_cp.checkpoint.manifest import is_foreign
from lightning_cp.checkpoint.store import is_store
from lightning_cp.errors import CheckpointError

_NAMED = "latest"
"""A file of earlier releases, beside the checkpoints: it named the newest one."""
_LONGEST = 4096


def latest_checkpoint(folder: str | PathLike[str]) -> Path | None:
    """The checkpoint of this package that was completed last in a folder; links do not count.

    A ``latest`` file that an earlier release has written counts until a checkpoint is newer than that file.
    What is found has not been verified; reading it does that.

    Raises:
        CheckpointError: the folder is in a store.
    """
    if is_store(folder):
        raise CheckpointError(
            f"{folder} is in a store, whose files do not tell which checkpoint is the newest. Name the "
            "checkpoint by its path."
        )
    folder = Path(folder)
    if not folder.is_dir():
        return None
    times = {path: saved_at(path) for path in _checkpoints(folder)}
    named = _named(folder / _NAMED)
    if named is not None:
        times[named] = max(times.get(named, 0), (folder / _NAMED).stat().st_mtime_ns)
    return max(times, key=lambda path: (times[path], path == named), default=None)


def saved_at(path: Path) -> int:
    """When a checkpoint of either form was written, in nanoseconds: the time of its file or its manifest."""
    manifest = path / MANIFEST
    return (manifest if manifest.is_file() else path).stat().st_mtime_ns


def set_saved_at(path: Path, time: int) -> None:
    """Have ``saved_at`` give this time."""
    for each in (path, path / MANIFEST):
        if each.exists():
            os.utime(each, ns=(time, time))


def _checkpoints(folder: Path) -> Iterator[Path]:
    """Checkpoints that saves have completed there, also one that a killed save has set aside."""
    for path in folder.iterdir():
        if not path.name.startswith(".") and not path.is_symlink() and _is_ours(path):
            yield path
    for path, (name, why) in leftovers(folder):
        if why == BEFORE and not os.path.lexists(folder / name):
            yield path


def _is_ours(path: Path) -> bool:
    """True if a save has written it; it may be damaged all the same."""
    if path.is_dir():
        return not is_foreign(path)
    try:
        return path.is_file() and manifest_of_file(path) is not None
    except CheckpointError:
        return True


def _named(place: Path) -> Path | None:
    """The checkpoint that a ``latest`` file names, if that is there."""
    try:
        with place.open("rb") as file:
            name = file.read(_LONGEST).decode().strip()
    except (OSError, UnicodeDecodeError):
        return None
    if not name or not name.isprintable() or name != Path(name).name:
        return None
    path = locate(place.with_name(name))
    return path if path.exists() else None
