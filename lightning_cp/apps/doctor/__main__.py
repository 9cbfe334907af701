"""Hydra entry point of the doctor. Heavy imports wait until Hydra has parsed the command line."""

from __future__ import annotations

import os
import sys
from typing import Any

import hydra
from omegaconf import DictConfig

from lightning_cp.utils.command_help import explain_keys
from lightning_cp.utils.run_folder import config_dir, one_folder

_ABOUT = """\
Compare one training step of a model on several ranks with one process, and train nothing.

Usage: python -m lightning_cp.doctor [group=choice] [key=value]
  python -m lightning_cp.doctor experiment=smoke strategy=ring trainer.devices=2

It makes what `python -m lightning_cp.train` would train with the same arguments, and runs the beginning of
the first batch (strategy.parity_tokens) both ways: the loss, the logits and every gradient must agree.

Exit status: 0: they agree. 1: they differ, and the error names the likely cause; or the error says why they
could not be compared."""
_UNREAD = (
    *("resume", "throughput", "strategy.parity_check"),
    *(f"trainer.{name}" for name in ("enable_model_summary", "num_sanity_val_steps")),
)
HELP: dict[str, Any] = {"about": _ABOUT, "unread": _UNREAD}
"""Arguments of ``explain_keys`` for a program that reads the main job's config."""


@hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="train")
def main(config: DictConfig) -> None:
    """Check what the main job would train, with its settings, and train nothing; every rank runs this."""
    # Read when torch is imported, here and by the ranks that are started later.
    os.environ.setdefault("OMP_NUM_THREADS", str(config.threads_per_rank))
    from lightning_cp.apps.train.report import one_report

    with one_report() as trainers:
        from lightning_cp.apps.doctor.examine import examine

        examine(config, trainers)


if __name__ == "__main__":
    explain_keys(**HELP)
    with one_folder(sys.argv):
        main()
