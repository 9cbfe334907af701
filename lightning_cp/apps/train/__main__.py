"""Hydra entry point of the main job. Heavy imports wait until Hydra has parsed the command line."""

from __future__ import annotations

import os
import sys
import time

import hydra
from omegaconf import DictConfig

from lightning_cp.utils.command_help import explain_keys
from lightning_cp.utils.run_folder import config_dir, one_folder

BEGAN = time.perf_counter()


@hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="train")
def main(config: DictConfig) -> float:
    """Train as configured; every rank runs this.

    Returns:
        Bits per byte on the validation text, which an optimising sweeper minimises.
    """
    # Read when torch is imported, here and by the ranks that are started later.
    os.environ.setdefault("OMP_NUM_THREADS", str(config.threads_per_rank))
    from lightning_cp.apps.train.report import one_report

    with one_report() as trainers:
        from lightning_cp.apps.train.report import BITS
        from lightning_cp.apps.train.run import train

        return train(config, BEGAN, trainers).after[BITS]


if __name__ == "__main__":
    explain_keys()
    with one_folder(sys.argv):
        main()
