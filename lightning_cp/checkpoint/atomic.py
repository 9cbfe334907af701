"""Writing that survives a kill or a power cut: what has a checkpoint's name is complete.

All of a checkpoint is written beside its place, on the same file system, and made durable (``fsync``) before
it gets its name by a rename. A file replaces a file in that one rename. A folder cannot replace a folder, so
the old one is set aside under a name that :func:`locate` knows until the new one has its place.
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


class GivenUpError(CheckpointError):
    """A rank could not write its part because another one had failed before, which knows why."""


def durability_error(target: Path, why: str) -> CheckpointError:
    """The error of a save that has ended, and of which something else did not."""
    return CheckpointError(f"{display_path(target)}{_PLACED}{why.rstrip('.')}.")


def save_error(target: Path, why: str) -> CheckpointError:
    """The error of a save that did not end, in its background or on another rank; says what is left."""
    if _PLACED in why:
        return CheckpointError(why)
    why = why.removeprefix(f"{CheckpointError.__name__}: ")  # of our own, said on another rank
    own = f"cannot save {display_path(target)}: "
    if own in why:  # another rank says all of it
        why = why.replace(f"{CheckpointError.__name__}: {own}", "").replace(own, "")
        why = why.replace(f" {_UNCHANGED}", "")
    return CheckpointError(f"{own}{why.rstrip('.')}. {_UNCHANGED}")


def display_path(path: Path) -> str:
    """A path as seen from the working directory; of another place its last two names, ``~`` for the home."""
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
"""Of file systems that cannot sync folders, such as some of FUSE and CIFS; or of folders not to be read."""
_LEFT = re.compile(
    r"^\.(?P<name>.+)\.(?P<why>saving|before|removed)-(?P<host>[0-9a-f]{8})-(?P<pid>\d+)-"
)

_UNDELETED: set[Path] = set()
"""What this process wanted to delete, and could not."""


def temporary_path(target: Path, why: str) -> Path:
    """A name next to ``target`` that nobody else has; tells who wrote there, so that leftovers can go."""
    owner = f"{machine_id()}-{os.getpid()}-{secrets.token_hex(4)}"
    return target.with_name(f".{target.name}.{why}-{owner}")


def write_durably(path: Path, data: bytes) -> None:
    """Write a new file and have it on the disk."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Have the names in a folder on the disk, where the file system can be told to."""
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
    """Make a folder, and what it is in, and have their names on the disk."""
    missing = [x for x in (folder, *folder.parents) if not x.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        sync(made.parent)


def put_in_place(staged: Path, target: Path) -> None:
    """Give what was written completely its name; whatever had that name is removed afterwards.

    What was there is put back if anything comes in between, Ctrl-C included.

    Raises:
        OSError: it has not got its name.
        CheckpointError: it has.
    """
    if staged.is_dir():
        sync(staged)
    aside = None
    if staged.is_dir() or (target.is_dir() and not target.is_symlink()):
        aside = temporary_path(target, BEFORE)
    _exchange(staged, target, aside)
    _keep_name(target, aside)


def _keep_name(target: Path, aside: Path | None) -> None:
    """Once it is on the disk, what had that name before goes."""
    try:
        sync(target.parent)
    except OSError as error:
        raise durability_error(
            target, f"may not be after a power cut: {error_summary(error)}"
        ) from error
    if aside is not None:
        discard(aside)


def _exchange(staged: Path, target: Path, aside: Path | None) -> None:
    try:
        if aside is not None and os.path.lexists(target):
            target.rename(aside)
        staged.replace(target)
    except BaseException:
        if aside is not None and os.path.lexists(aside) and not os.path.lexists(target):
            aside.rename(target)
        raise


def write_note(path: Path, text: str) -> None:
    """Write a small file for a process that waits for it: all of it or nothing is there.

    Its name need not survive a power cut, so nothing is done with the folder, which may have another name by
    the time that this returns.
    """
    staged = temporary_path(path, SAVING)
    staged.write_text(text)
    staged.replace(path)


def replace_link(link: Path, to: Path) -> None:
    """Have ``link`` point to ``to``, in one step; relative, so that the folder may be moved."""
    staged = temporary_path(link, SAVING)
    staged.symlink_to(os.path.relpath(to, link.parent))
    aside = temporary_path(link, BEFORE) if link.is_dir() and not link.is_symlink() else None
    try:
        _exchange(staged, link, aside)
    finally:
        discard(staged)
    _keep_name(link, aside)


def remove(target: Path) -> None:
    """Take a checkpoint away in one step; what is left of it has another name while it is deleted."""
    aside = _set_aside(target, REMOVED)
    if aside is not None:
        sync(target.parent)
        discard(aside)


def discard(path: Path) -> None:
    """Delete a file, a link or a folder; nothing happens if it is gone, or cannot be deleted.

    Whoever tidies up after an error has that one to tell, or to share with other ranks that wait for it. What
    cannot be deleted is left to the next :func:`sweep` of this process.
    """
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    if os.path.lexists(path):
        _UNDELETED.add(path)


def discard_shared(folder: Path) -> None:
    """Delete a folder into which other processes still write: under its name they find it no more."""
    aside = temporary_path(folder, REMOVED)
    try:
        folder.rename(aside)
    except OSError:
        aside = folder
    discard(aside)


def locate(target: Path) -> Path:
    """Where the checkpoint of this name is: elsewhere only if a save was killed while replacing a folder."""
    if target.is_symlink() and not target.exists():  # what it points to may be set aside
        target = target.parent / target.readlink()
    if os.path.lexists(target):
        return target
    kept = [path for path, left in leftovers(target.parent) if left == (target.name, BEFORE)]
    return max(kept, key=lambda path: path.stat().st_mtime) if kept else target


def leftovers(folder: Path) -> list[tuple[Path, tuple[str, str]]]:
    """Leftovers of saves in a folder: the path, the checkpoint's name, and why it is there."""
    if not folder.is_dir():
        return []
    matches = ((path, _LEFT.match(path.name)) for path in folder.iterdir())
    return [(path, (match["name"], match["why"])) for path, match in matches if match]


def sweep(folder: Path) -> None:
    """Tidy up after processes that are gone, and put back what they had set aside."""
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


def _set_aside(target: Path, why: str) -> Path | None:
    if not os.path.lexists(target):
        return None
    aside = temporary_path(target, why)
    target.rename(aside)
    return aside


def _is_alive(path: Path) -> bool:
    """True if the process that has left this may still be writing.

    Of another machine nobody knows, and another process may have its number: then the last change tells.
    """
    match = _LEFT.match(path.name)
    assert match is not None
    try:
        if match["host"] == machine_id():
            os.kill(int(match["pid"]), 0)
        own = path.lstat().st_ctime
    except (ProcessLookupError, FileNotFoundError):
        return False
    except OSError:  # another user's
        return True
    try:
        return time.time() - max([own, *_changes(path)]) < _A_DAY
    except OSError:  # something in it went while it was looked at: somebody is at work there
        return True


def _changes(folder: Path) -> Iterator[float]:
    """When things in it were written or renamed last, by the file system's clock."""
    return (x.lstat().st_ctime for x in folder.rglob("*"))


def machine_id() -> str:
    """A number for this machine, without its name."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


# Paths of file systems of this machine.


def local_path(path: str | PathLike[str]) -> Path:
    """A path of this machine's file system.

    Raises:
        CheckpointError: it is somewhere else.
        ConfigError: it is no path.
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
