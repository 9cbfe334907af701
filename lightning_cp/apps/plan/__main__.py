"""Hydra entry point of the planner: the best mesh and its cost. No training process is started."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lightning_cp.utils.command_help import explain_keys
from lightning_cp.utils.run_folder import config_dir, one_folder

PIPE_CLOSED = 141
"""The status that shells give a program whose output pipe was closed."""


def plan(config: DictConfig, folder: Path, name: str) -> bool:
    """Print the plans that fit and those that do not; write the best as a choice of the group ``strategy``.

    Args:
        config: see ``configs/plan.yaml``.
        folder: receives ``plan.txt``, ``plan.png`` and ``strategy/plan.yaml``.
        name: the chosen model's name.

    Returns:
        True if a plan fits, and was verified if requested.

    Raises:
        ConfigError: invalid settings.
    """
    from lightning_cp.apps.plan import report
    from lightning_cp.apps.plan.settings import check, job_of, limits_of
    from lightning_cp.apps.plan.write import write
    from lightning_cp.planner.search import search

    plain: Any = OmegaConf.to_container(config, resolve=True)
    check(plain)
    job = job_of(plain, name)
    found = search(job, limits_of(plain))
    text = f"{report.headline(job)}\n\n{report.summary(found, config.show)}"
    # Files first: a reader of the output may stop at any line.
    report.draw(found, report.headline(job), config.show, folder / "plan.png")
    (folder / "plan.txt").write_text(text + "\n")
    asked = [one for one in HydraConfig.get().overrides.task if one.startswith("model.")]
    print(f"{text}\n\n{write(found, folder, [f'model={name}', *asked])}", flush=True)
    if not config.verify or not found.plans:
        if config.verify:
            print("\nNothing fits, so there is nothing to verify.")
        return bool(found.plans)
    from lightning_cp.apps.plan.verify import verify, verify_steps

    good = verify(found.plans[0], plain)
    return verify_steps(plain) and good if config.verify == "all" else good


@hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="plan")
def main(config: DictConfig) -> None:
    """Plan; exit with status 1 if nothing fits or the verification fails."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
    running = HydraConfig.get().runtime
    try:
        good = plan(config, Path(running.output_dir), str(running.choices["model"]))
        sys.stdout.flush()
    except BrokenPipeError:  # as of ``| head``
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(PIPE_CLOSED) from None
    if not good:
        raise SystemExit(1)


if __name__ == "__main__":
    explain_keys()
    flags = {"--verify": "verify=true", "--verify=all": "verify=all"}
    sys.argv = [flags.get(one, one) for one in sys.argv]
    if "model=null" in sys.argv:  # Hydra would refuse it with a traceback
        raise SystemExit(
            "ConfigError: model must be one of the group model, got null: see configs/model."
        )
    with one_folder(sys.argv):
        main()
