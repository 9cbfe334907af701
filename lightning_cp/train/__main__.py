"""Hydra entry point of the main job. Heavy imports wait until Hydra has parsed the command line."""

from __future__ import annotations

import os
import time
from pathlib import Path

import hydra
from omegaconf import DictConfig

import lightning_cp

BEGAN = time.perf_counter()


def config_dir() -> str:
    """Where the configs lie: inside the package in a wheel, beside it in a source checkout."""
    package = Path(lightning_cp.__file__).resolve().parent
    shipped = package / "configs"
    return str(shipped if shipped.is_dir() else package.parent / "configs")


@hydra.main(version_base="1.3", config_path=config_dir(), config_name="train")
def main(config: DictConfig) -> None:
    """Train as configured; every rank runs this."""
    # Read when torch is imported, here and by the ranks that are started later.
    os.environ.setdefault("OMP_NUM_THREADS", str(config.threads_per_rank))
    from lightning_cp.train.failure import one_report

    with one_report() as trainers:
        from lightning_cp.train.run import train

        train(config, BEGAN, trainers)


if __name__ == "__main__":
    main()
