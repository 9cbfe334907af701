"""Paths of file systems of this machine."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from lightning_cp.errors import CheckpointError, ConfigError


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
