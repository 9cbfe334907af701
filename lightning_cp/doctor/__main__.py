"""Hydra entry point of the doctor. Heavy imports wait until Hydra has parsed the command line."""

from __future__ import annotations

import os
import sys

import hydra
from omegaconf import DictConfig

from lightning_cp.command_help import explain_keys
from lightning_cp.config_files import config_dir
from lightning_cp.run_folder import one_folder


@hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="train")
def main(config: DictConfig) -> None:
    """Check what the main job would train, with its settings, and train nothing; every rank runs this."""
    # Read when torch is imported, here and by the ranks that are started later.
    os.environ.setdefault("OMP_NUM_THREADS", str(config.threads_per_rank))
    from lightning_cp.train.failure import one_report

    with one_report() as trainers:
        from lightning_cp.doctor.examine import examine

        examine(config, trainers)


if __name__ == "__main__":
    explain_keys()
    with one_folder(sys.argv):
        main()
