"""The checkpoint from which the main job resumes (``resume=auto``, a path, or none); its continued CSV."""

from __future__ import annotations

import csv
import os
import warnings
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only

from lightning_cp.checkpoint.read import open_checkpoint, saved_at
from lightning_cp.errors import CheckpointError, ConfigError
from lightning_cp.utils.run_folder import FOLDER_OF_FIRST

AUTO = "auto"
_CHOSEN_CHECKPOINT = "LIGHTNING_CP_RESUME"
"""The checkpoint that the user's process chose, for the processes that it starts."""


def checkpoint_to_resume(asked: str | None, checkpoints: Path) -> str | None:
    """Return the checkpoint that ``resume=`` asks for, before any process starts; ``None``: a new run.

    Args:
        asked: ``auto`` for the newest complete one in ``checkpoints``; or a path.
        checkpoints: the folder of this run's checkpoints.

    Raises:
        CheckpointError: the path has no checkpoint, or all that ``auto`` considers are damaged.
    """
    if asked != AUTO:
        _check_path(asked)
        return asked
    if _CHOSEN_CHECKPOINT in os.environ:
        return os.environ[_CHOSEN_CHECKPOINT] or None
    found = newest_whole(checkpoints)
    os.environ[_CHOSEN_CHECKPOINT] = str(found or "")
    if found is None:
        print_once(f"resume=auto: no checkpoint in {_shown(checkpoints)} yet, so this is a new run")
    else:
        print_once(f"resume=auto: continues from {_shown(found)}")
    return None if found is None else str(found)


def run_folder(own: Path) -> Path:
    """Return the first rank's folder; where a cluster started the ranks, this one has another."""
    return Path(os.environ.get(FOLDER_OF_FIRST) or own)


def newest_whole(folder: Path) -> Path | None:
    """Return the newest readable checkpoint; print a line for each one that is skipped.

    Raises:
        CheckpointError: there are checkpoints, but all are damaged.
    """
    if not folder.is_dir():
        return None
    there = [path for path in folder.iterdir() if _may_be_one(path)]
    there.sort(key=saved_at, reverse=True)
    for path in there:
        try:
            _check_readable(path)
        except CheckpointError as damaged:
            print_once(f"resume=auto: {_shown(path)} is passed over: {damaged}")
        else:
            return path
    if there:
        raise CheckpointError(
            f"resume=auto found {len(there)} checkpoints in {_shown(folder)}, and none is complete. "
            "Move them away to start a new run, or name another one: resume=PATH."
        )
    return None


def _may_be_one(path: Path) -> bool:
    hidden = path.name.startswith(".")  # a save that was not finished
    return not hidden and path.suffix == ".ckpt" and path.exists()


def _check_readable(path: Path) -> None:
    if open_checkpoint(path).manifest is not None:
        return
    try:  # written by another strategy: only the archive's own checksums exist
        with ZipFile(path) as archive:
            broken = archive.testzip()
    except (BadZipFile, OSError) as error:
        raise CheckpointError(str(error)) from error
    if broken is not None:
        raise CheckpointError(f"{broken} in it is damaged")


def _check_path(checkpoint: str | None) -> None:
    if checkpoint is None or "://" in checkpoint:
        return
    path = Path(checkpoint).absolute()
    try:
        open_checkpoint(path)
    except CheckpointError as refused:
        raise CheckpointError(
            f"resume={checkpoint} is not a checkpoint: {refused} A run leaves checkpoints/last.ckpt and "
            "checkpoints/best.ckpt in its folder; resume=null starts a new run, and resume=auto with "
            "hydra.run.dir=FOLDER takes the newest one of that folder."
        ) from None


def check_folder_named(asked: str | None, overrides: list[str]) -> None:
    """Check that ``resume=auto`` has a named folder, as the default folder is new each time.

    Args:
        asked: the value of ``resume=``.
        overrides: Hydra's own overrides, such as ``hydra.run.dir=...``.

    Raises:
        ConfigError: no folder was named.
    """
    named = any(x.lstrip("+").startswith(("hydra.run.dir=", "hydra.sweep.dir=")) for x in overrides)
    if asked == AUTO and not named:
        raise ConfigError(
            "resume=auto continues in the run's own folder, which is a new one each time by default. Name "
            "it: resume=auto hydra.run.dir=outputs/NAME."
        )


class ContinuedCSV(CSVLogger):
    """A CSVLogger that preserves the lines of the run that it continues in the same folder.

    Args:
        folder: the parent of the file's folder.
        name: the name of the file's folder.
        checkpoint: the run resumes from it; lines of later steps are dropped, because they are logged again.
    """

    def __init__(self, folder: Path, name: str, checkpoint: str | None) -> None:
        # Every line is written at once, because a killed process cannot write later.
        super().__init__(folder, name=name, version="", flush_logs_every_n_steps=1)
        steps = 0 if checkpoint is None else _steps_of(Path(checkpoint))
        self.kept = _lines_before(folder / name / "metrics.csv", steps)
        if self.kept and getattr(rank_zero_only, "rank", 0) == 0:
            with warnings.catch_warnings():  # about existing lines, which are in memory now
                warnings.simplefilter("ignore")
                self.experiment.metrics.extend(self.kept)
            self.save()

    def first_with(self, column: str) -> dict[str, float] | None:
        """Return the first preserved line with a column, or ``None``."""
        for row in self.kept:
            if column in row:
                return {name: float(value) for name, value in row.items()}
        return None


def _lines_before(file: Path, steps: int) -> list[dict[str, Any]]:
    if not steps or not file.is_file():
        return []
    with file.open(newline="") as lines:
        rows = [{k: v for k, v in row.items() if v} for row in csv.DictReader(lines)]
    return [row for row in rows if int(row["step"]) < steps]


def _steps_of(checkpoint: Path) -> int:
    return int(open_checkpoint(checkpoint).tree.get("global_step", 0))


@rank_zero_only
def print_once(text: str) -> None:
    """Print a text on the first rank."""
    print(text, flush=True)


def _shown(path: Path) -> str:
    return "/".join(path.parts[-2:])
