"""What is said when a checkpoint cannot be written."""

from __future__ import annotations

from pathlib import Path

from lightning_cp.errors import CheckpointError


def failed_save(target: Path, why: str) -> CheckpointError:
    """The error of a save that did not end; says what is left."""
    return CheckpointError(
        f"cannot save {shown(target)}: {why}. What was saved there before is still there, and the state "
        "of the run "
        "is unchanged."
    )


def why(error: BaseException) -> str:
    """An error without absolute paths: other ranks and reports repeat it."""
    if isinstance(error, OSError) and error.errno is not None:
        name = f" ({Path(str(error.filename)).name})" if error.filename else ""
        return f"{error.strerror}{name}"
    return f"{type(error).__name__}: {error}"


def shown(path: Path) -> str:
    """A path as seen from the working directory; of another place its last two names."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(Path(*path.parts[-2:]))
