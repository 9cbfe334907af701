"""The most recently completed checkpoint of a folder, found from the checkpoints alone."""

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

_LEGACY_NAME = "latest"
"""A file of earlier releases, beside the checkpoints: it named the newest one."""
_LONGEST = 4096


def latest_checkpoint(folder: str | PathLike[str]) -> Path | None:
    """The checkpoint of this package that was completed last in a folder; links do not count.

    A ``latest`` file of an earlier release counts until a checkpoint is newer than that file. The result has
    not been verified; reading it does that.

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
    named = _legacy_latest(folder / _LEGACY_NAME)
    if named is not None:
        times[named] = max(times.get(named, 0), (folder / _LEGACY_NAME).stat().st_mtime_ns)
    return max(times, key=lambda path: (times[path], path == named), default=None)


def saved_at(path: Path) -> int:
    """The time in nanoseconds of a checkpoint of either form: that of its file or its manifest."""
    manifest = path / MANIFEST
    return (manifest if manifest.is_file() else path).stat().st_mtime_ns


def set_saved_at(path: Path, time: int) -> None:
    """Set the time that ``saved_at`` returns."""
    for each in (path, path / MANIFEST):
        if each.exists():
            os.utime(each, ns=(time, time))


def _checkpoints(folder: Path) -> Iterator[Path]:
    """Completed checkpoints of a folder, including one that a killed save has renamed."""
    for path in folder.iterdir():
        if not path.name.startswith(".") and not path.is_symlink() and _is_ours(path):
            yield path
    for path, (name, why) in leftovers(folder):
        if why == BEFORE and not os.path.lexists(folder / name):
            yield path


def _is_ours(path: Path) -> bool:
    """True if a save has written it; it may be damaged."""
    if path.is_dir():
        return not is_foreign(path)
    try:
        return path.is_file() and manifest_of_file(path) is not None
    except CheckpointError:
        return True


def _legacy_latest(place: Path) -> Path | None:
    """The checkpoint that a ``latest`` file names, if it exists."""
    try:
        with place.open("rb") as file:
            name = file.read(_LONGEST).decode().strip()
    except (OSError, UnicodeDecodeError):
        return None
    if not name or not name.isprintable() or name != Path(name).name:
        return None
    path = locate(place.with_name(name))
    return path if path.exists() else None
