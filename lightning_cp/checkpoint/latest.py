"""``latest``: which checkpoint of a folder was completed last. It is written after everything else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path

from lightning_cp.checkpoint.durable import found, replace_text
from lightning_cp.checkpoint.failures import failed_later, shown
from lightning_cp.checkpoint.in_the_way import require_replaceable
from lightning_cp.comm.objects import told
from lightning_cp.errors import CheckpointError

NAME = "latest"
_LONGEST = 4096
_STAYS = f"{NAME} beside it was not written and may name the one before"


def require_name(target: Path) -> None:
    """Refuse a checkpoint of this name, and one beside something else that has it.

    Raises:
        CheckpointError: saying which of the two.
    """
    if target.name == NAME:
        raise CheckpointError(
            f"{NAME!r} is the name of the file that says which checkpoint of a folder is the newest. Give "
            "the checkpoint another one."
        )
    _require_ours(target.with_name(NAME))


def point_to(target: Path) -> None:
    """Say that ``target`` is the newest complete checkpoint of its folder.

    Raises:
        CheckpointError: it cannot be said, or something else has the name of the file that says so.
    """
    try:
        _require_ours(target.with_name(NAME))
        replace_text(target.with_name(NAME), target.name + "\n")
    except (OSError, CheckpointError) as error:
        raise failed_later(target, f"{_STAYS}: {told(error)}") from error


@contextmanager
def staying(wanted: bool) -> Iterator[None]:
    """Around what gives a checkpoint its name: where that may not be on the disk, ``latest`` is not changed.

    After a power cut it would name nothing, and a run would begin anew beside the checkpoint before.

    Args:
        wanted: it was going to be.

    Raises:
        CheckpointError: that of what is done, which says this too.
    """
    try:
        yield
    except CheckpointError as error:
        if wanted:
            raise CheckpointError(f"{error} {_STAYS}.") from error
        raise


def latest_checkpoint(folder: str | PathLike[str]) -> Path | None:
    """The checkpoint that was completed last, if it is still there.

    What it names has not been verified; reading it does that.
    """
    folder = Path(folder)
    name = _said_by(folder / NAME)
    if name is None:
        return None
    path = found(folder / name)
    return path if path.exists() else None


def _require_ours(place: Path) -> None:
    require_replaceable(place)
    is_file = place.is_file() and not place.is_symlink()
    if is_file and place.stat().st_size and _said_by(place) is None:
        raise CheckpointError(
            f"{shown(place)} does not name a checkpoint, so it is not replaced. That file is kept for the "
            "name of the newest checkpoint of its folder: rename what is there, or save somewhere else."
        )


def _said_by(place: Path) -> str | None:
    try:
        with place.open("rb") as file:
            name = file.read(_LONGEST).decode().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return name if name and name.isprintable() and name == Path(name).name else None
