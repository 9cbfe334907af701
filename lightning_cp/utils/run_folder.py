"""The folder of a run, checked and shared by all ranks, and the folder of the configs.

Hydra names a run's folder after the time of day, in every rank. If Lightning starts the other ranks, it
passes them the folder; if torchrun or SLURM does, only the first rank's folder is used, and the others get a
temporary one. This file imports neither torch nor lightning.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from lightning_cp.errors import ConfigError

DEFAULT = "outputs"
"""The default parent of run folders."""
MAKE_NONE = frozenset(("--cfg", "-c", "--help", "-h", "--hydra-help", "--info", "-i", "--version"))
"""Hydra's options that make no folder."""
FOLDER_OF_FIRST = "LIGHTNING_CP_RUN_FOLDER"
"""The folder of the command line, in ranks that have a temporary one."""


@contextmanager
def one_folder(arguments: list[str]) -> Iterator[None]:
    """Extend a command line for Hydra so that only the first rank leaves files.

    Args:
        arguments: ``sys.argv``, extended in ranks that a cluster started.

    Raises:
        SystemExit: the folder cannot be made; the message says why.
    """
    try:
        check_folder(arguments)
    except ConfigError as refused:
        raise SystemExit(f"ConfigError: {refused}") from None
    if rank_of_cluster(os.environ) == 0:
        yield
        return
    named = [x.partition("=")[2] for x in arguments if x.startswith("hydra.run.dir=")]
    if named:
        os.environ[FOLDER_OF_FIRST] = named[-1]
    with tempfile.TemporaryDirectory() as folder:
        arguments += ["hydra.output_subdir=null", f"hydra.run.dir={folder}"]
        yield


def check_folder(arguments: Sequence[str]) -> None:
    """Check that the run's folder can be made; Hydra would fail with a traceback.

    Raises:
        ConfigError: it cannot; the message names the file in the way.
    """
    if MAKE_NONE.intersection(arguments):
        return
    named = [x.partition("=") for x in arguments]
    named = [x for x in named if x[1] and x[0] in ("hydra.run.dir", "hydra.sweep.dir")]
    for name, _, given in named or [("hydra.run.dir", "=", DEFAULT)]:
        folder = Path(given)
        there = next(path for path in (folder, *folder.parents) if path.exists())
        if not there.is_dir():
            raise ConfigError(
                f"{name}={given} cannot be made: {there} is a file. "
                "Name another folder, or move the file."
            )
        if not os.access(there, os.W_OK):
            raise ConfigError(
                f"{name}={given} cannot be made: nothing may be written in {there.absolute()}. Give another: "
                f"{name}=<folder>."
            )


def rank_of_cluster(environment: Mapping[str, str]) -> int:
    """Return the rank that torchrun or SLURM gave this process; 0 if neither started it."""
    names = {"TORCHELASTIC_RUN_ID": "RANK", "SLURM_NTASKS": "SLURM_PROCID"}
    for sign, name in names.items():
        if sign in environment:
            rank = environment.get(name, "0")
            return int(rank) if rank.isdecimal() else 0  # invalid values are refused later
    return 0


def config_dir() -> Path:
    """Return the folder of the configs: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    shipped = package / "configs"
    return shipped if shipped.is_dir() else package.parent / "configs"
