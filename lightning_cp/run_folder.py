"""The folder of a run: one that can be made, and only one where torchrun or SLURM started the ranks.

Hydra names a run's folder after the time of day, and every rank asks. Where Lightning starts the other ranks
it tells them the folder; where a cluster does, only the first rank's is used, and the others get one that is
thrown away. This file imports neither torch nor lightning.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from lightning_cp.errors import ConfigError

DEFAULT = "outputs"
"""Where runs have their folders unless the command line says where."""
MAKE_NONE = frozenset(("--cfg", "-c", "--help", "-h", "--hydra-help", "--info", "-i", "--version"))
"""Of Hydra's options, those that make no folder."""
FOLDER_OF_FIRST = "LIGHTNING_CP_RUN_FOLDER"
"""In ranks that were given a folder to be thrown away: the one that the command line names."""


@contextmanager
def one_folder(arguments: list[str]) -> Iterator[None]:
    """Add to a command line for Hydra what keeps ranks after the first from leaving anything.

    Args:
        arguments: ``sys.argv``, which is added to in ranks that a cluster has started.

    Raises:
        SystemExit: the folder cannot be made; says why.
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
    """Refuse a folder for the run that cannot be made: Hydra makes it, and would fail with a traceback.

    Raises:
        ConfigError: that; names the file.
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
    """The rank that torchrun or SLURM has started this process as; 0 if neither has."""
    names = {"TORCHELASTIC_RUN_ID": "RANK", "SLURM_NTASKS": "SLURM_PROCID"}
    for sign, name in names.items():
        if sign in environment:
            rank = environment.get(name, "0")
            return int(rank) if rank.isdecimal() else 0  # what it cannot be is refused later
    return 0
