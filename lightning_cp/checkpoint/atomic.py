"""Atomic, durable writes: a checkpoint that has its name is complete, even after a kill or a power cut.

A checkpoint is written beside its place, on the same file system, and made durable (``fsync``) before a
rename gives it its name. A file replaces a file in that rename. A folder cannot replace a folder, so the old
one is renamed first; :func:`locate` finds it under that name until the new one has its place.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

from lightning_cp.comm.consensus import error_summary
from lightning_cp.errors import CheckpointError, ConfigError, without_home

# Messages about a checkpoint that cannot be written.


_PLACED = " is complete and in its place, but "
_UNCHANGED = "What was saved there before is still there, and the state of the run is unchanged."


class AbortedSaveError(CheckpointError):
    """Another rank failed first, and has the reason, so this rank did not write its part."""


def durability_error(target: Path, why: str) -> CheckpointError:
    """The error for a finished save of which a later step failed."""
    return CheckpointError(f"{display_path(target)}{_PLACED}{why.rstrip('.')}.")


def save_error(target: Path, why: str) -> CheckpointError:
    """The error for an unfinished save, in its background or on another rank; says what is left."""
    if _PLACED in why:
        return CheckpointError(why)
    why = why.removeprefix(f"{CheckpointError.__name__}: ")  # our own class, from another rank
    own = f"cannot save {display_path(target)}: "
    if own in why:  # another rank's message has the whole text
        why = why.replace(f"{CheckpointError.__name__}: {own}", "").replace(own, "")
        why = why.replace(f" {_UNCHANGED}", "")
    return CheckpointError(f"{own}{why.rstrip('.')}. {_UNCHANGED}")


def display_path(path: Path) -> str:
    """A path relative to the working directory; elsewhere its last two names, ``~`` for the home."""
    if not path.is_absolute():
        return str(path)
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        parts = Path(without_home(str(path))).parts
        return str(Path(*parts) if len(parts) <= 3 else Path("...", *parts[-2:]))


SAVING, BEFORE, REMOVED = "saving", "before", "removed"
_A_DAY = 86_400.0
_NOT_FOR_FOLDERS = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EACCES)
"""Errors of file systems that cannot sync folders, such as some of FUSE and CIFS; or of unreadable
folders.
"""
_LEFT = re.compile(
    r"^\.(?P<name>.+)\.(?P<why>saving|before|removed)-(?P<host>[0-9a-f]{8})-(?P<pid>\d+)-"
)

_UNDELETED: set[Path] = set()
"""Paths that this process failed to delete."""


def temporary_path(target: Path, why: str) -> Path:
    """A unique name next to ``target``; it contains the writing process, so that leftovers can be removed."""
    owner = f"{machine_id()}-{os.getpid()}-{secrets.token_hex(4)}"
    return target.with_name(f".{target.name}.{why}-{owner}")


def write_durably(path: Path, data: bytes) -> None:
    """Write a new file, and flush it to disk."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Flush the names in a folder to disk, where the file system supports it."""
    try:
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
    except OSError as error:
        if error.errno not in _NOT_FOR_FOLDERS:
            raise


def make_folder(folder: Path) -> None:
    """Make a folder with its parents, and flush their names to disk."""
    missing = [x for x in (folder, *folder.parents) if not x.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        sync(made.parent)


def put_in_place(staged: Path, target: Path) -> None:
    """Rename a complete checkpoint to its name; then remove the former one of that name.

    The former one is restored on any error before that, including Ctrl-C.

    Raises:
        OSError: the checkpoint does not have its name.
        CheckpointError: it has its name, but a later step failed.
    """
    if staged.is_dir():
        sync(staged)
    renamed = None
    if staged.is_dir() or (target.is_dir() and not target.is_symlink()):
        renamed = temporary_path(target, BEFORE)
    _exchange(staged, target, renamed)
    _keep_name(target, renamed)


def _keep_name(target: Path, renamed: Path | None) -> None:
    """Flush the new name to disk; then remove the former checkpoint."""
    try:
        sync(target.parent)
    except OSError as error:
        raise durability_error(
            target, f"may not be after a power cut: {error_summary(error)}"
        ) from error
    if renamed is not None:
        discard(renamed)


def _exchange(staged: Path, target: Path, renamed: Path | None) -> None:
    try:
        if renamed is not None and os.path.lexists(target):
            target.rename(renamed)
        staged.replace(target)
    except BaseException:
        if renamed is not None and os.path.lexists(renamed) and not os.path.lexists(target):
            renamed.rename(target)
        raise


def write_note(path: Path, text: str) -> None:
    """Write a small file atomically, for a process that waits for it.

    Its name need not survive a power cut, so the folder is not flushed; it may even have another name by
    then.
    """
    staged = temporary_path(path, SAVING)
    staged.write_text(text)
    staged.replace(path)


def replace_link(link: Path, to: Path) -> None:
    """Point ``link`` to ``to`` atomically; relative, so that the folder may be moved."""
    staged = temporary_path(link, SAVING)
    staged.symlink_to(os.path.relpath(to, link.parent))
    renamed = temporary_path(link, BEFORE) if link.is_dir() and not link.is_symlink() else None
    try:
        _exchange(staged, link, renamed)
    finally:
        discard(staged)
    _keep_name(link, renamed)


def remove(target: Path) -> None:
    """Remove a checkpoint atomically: it is renamed before it is deleted."""
    renamed = _rename_away(target, REMOVED)
    if renamed is not None:
        sync(target.parent)
        discard(renamed)


def discard(path: Path) -> None:
    """Delete a file, a link or a folder; do nothing if it is absent, or cannot be deleted.

    Cleanup after an error must not hide that error, or delay other ranks. The next :func:`sweep` of this
    process tries again.
    """
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    if os.path.lexists(path):
        _UNDELETED.add(path)


def discard_shared(folder: Path) -> None:
    """Delete a folder into which other processes still write: it is renamed first, so that they do not find
    it.
    """
    renamed = temporary_path(folder, REMOVED)
    try:
        folder.rename(renamed)
    except OSError:
        renamed = folder
    discard(renamed)


def locate(target: Path) -> Path:
    """The path of the checkpoint of this name; another one only if a save was killed while replacing a
    folder.
    """
    if target.is_symlink() and not target.exists():  # its target may have been renamed
        target = target.parent / target.readlink()
    if os.path.lexists(target):
        return target
    kept = [path for path, left in leftovers(target.parent) if left == (target.name, BEFORE)]
    return max(kept, key=lambda path: path.stat().st_mtime) if kept else target


def leftovers(folder: Path) -> list[tuple[Path, tuple[str, str]]]:
    """Leftovers of saves in a folder: the path, the checkpoint's name, and the kind."""
    if not folder.is_dir():
        return []
    matches = ((path, _LEFT.match(path.name)) for path in folder.iterdir())
    return [(path, (match["name"], match["why"])) for path, match in matches if match]


def sweep(folder: Path) -> None:
    """Clean up after dead processes, and restore checkpoints that they had renamed."""
    for path, (name, why) in leftovers(folder):
        if path in _UNDELETED:
            _UNDELETED.remove(path)
            discard(path)
            continue
        if _is_alive(path):
            continue
        if why == BEFORE and not os.path.lexists(folder / name):
            path.rename(folder / name)
        else:
            discard(path)


def _rename_away(target: Path, why: str) -> Path | None:
    if not os.path.lexists(target):
        return None
    renamed = temporary_path(target, why)
    target.rename(renamed)
    return renamed


def _is_alive(path: Path) -> bool:
    """True if the process that wrote this may still be running.

    For another machine this is unknown, and another process may have its number, so the time of the last
    change decides.
    """
    match = _LEFT.match(path.name)
    assert match is not None
    try:
        if match["host"] == machine_id():
            os.kill(int(match["pid"]), 0)
        own = path.lstat().st_ctime
    except (ProcessLookupError, FileNotFoundError):
        return False
    except OSError:  # the file of another user
        return True
    try:
        return time.time() - max([own, *_changes(path)]) < _A_DAY
    except OSError:  # a file vanished meanwhile: some process is at work
        return True


def _changes(folder: Path) -> Iterator[float]:
    """Times of the last changes of its files, by the file system's clock."""
    return (x.lstat().st_ctime for x in folder.rglob("*"))


def machine_id() -> str:
    """An anonymous number of this machine."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


# Paths on file systems of this machine.


def local_path(path: str | PathLike[str]) -> Path:
    """The path on this machine's file system.

    Raises:
        CheckpointError: a URL of another place.
        ConfigError: not a path.
    """
    given: Any = path
    if not isinstance(given, str | PathLike) or not str(given):
        raise ConfigError(
            f"a checkpoint is given by its path, got {given!r}. Pass text or a Path that is not empty."
        )
    text = str(given).removeprefix("file://").removeprefix("local://")
    if "://" in text:
        raise CheckpointError(
            "checkpoints are written to and read from local or mounted folders, got "
            f"{text.split('://')[0]}://... Save to a folder, and copy what is complete (it is renamed into "
            "place, so whatever is there is)."
        )
    return Path(text).absolute()
