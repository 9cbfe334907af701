"""Messages about a checkpoint that cannot be written."""

from __future__ import annotations

from pathlib import Path

from lightning_cp.errors import CheckpointError, without_home

_PLACED = " is complete and in its place, but "
_LEFT = "What was saved there before is still there, and the state of the run is unchanged."


class GivenUpError(CheckpointError):
    """A rank could not write its part because another one had failed before, which knows why."""


def failed_later(target: Path, why: str) -> CheckpointError:
    """The error of a save that has ended, and of which something else did not."""
    return CheckpointError(f"{shown(target)}{_PLACED}{why.rstrip('.')}.")


def failed_save(target: Path, why: str) -> CheckpointError:
    """The error of a save that did not end, in its background or on another rank; says what is left."""
    if _PLACED in why:
        return CheckpointError(why)
    why = why.removeprefix(f"{CheckpointError.__name__}: ")  # of our own, said on another rank
    own = f"cannot save {shown(target)}: "
    if own in why:  # another rank says all of it
        why = why.replace(f"{CheckpointError.__name__}: {own}", "").replace(own, "")
        why = why.replace(f" {_LEFT}", "")
    return CheckpointError(f"{own}{why.rstrip('.')}. {_LEFT}")


def shown(path: Path) -> str:
    """A path as seen from the working directory; of another place its last two names, ``~`` for the home."""
    if not path.is_absolute():
        return str(path)
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        parts = Path(without_home(str(path))).parts
        return str(Path(*parts) if len(parts) <= 3 else Path("...", *parts[-2:]))
