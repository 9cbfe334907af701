"""One folder for a run whose ranks were all started by torchrun or SLURM.

Hydra names a run's folder after the time of day, and every rank asks. Where Lightning starts the other ranks
it tells them the folder; where a cluster does, only the first rank's is used, and the others get one that is
thrown away. This file imports neither torch nor lightning.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def one_folder(arguments: list[str]) -> Iterator[None]:
    """Add to a command line for Hydra what keeps ranks after the first from leaving anything.

    Args:
        arguments: ``sys.argv``, which is added to in ranks that a cluster has started.
    """
    if rank_of_cluster(os.environ) == 0:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments += ["hydra.output_subdir=null", f"hydra.run.dir={folder}"]
        yield


def rank_of_cluster(environment: Mapping[str, str]) -> int:
    """Which rank torchrun or SLURM has started this process as; 0 if neither has."""
    names = {"TORCHELASTIC_RUN_ID": "RANK", "SLURM_NTASKS": "SLURM_PROCID"}
    for sign, name in names.items():
        if sign in environment:
            rank = environment.get(name, "0")
            return int(rank) if rank.isdecimal() else 0  # what it cannot be is refused later
    return 0
