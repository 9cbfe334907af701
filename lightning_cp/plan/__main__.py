"""Hydra entry point of the planner: which mesh, and what it costs. Nothing is started."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lightning_cp.command_help import explain_keys
from lightning_cp.config_files import config_dir
from lightning_cp.run_folder import one_folder

PIPE_CLOSED = 141
"""The status of a program that nobody reads any more, as shells give it."""


def plan(config: DictConfig, folder: Path, name: str) -> bool:
    """Print what fits and what does not; write the best plan as a choice of the group ``strategy``.

    Args:
        config: see ``configs/plan.yaml``.
        folder: gets ``plan.txt``, ``plan.png`` and ``strategy/plan.yaml``.
        name: of the model's choice.

    Returns:
        Whether anything fits, and was verified if that was asked for.

    Raises:
        ConfigError: settings that cannot be.
    """
    from lightning_cp.plan import picture, report
    from lightning_cp.plan.settings import check, job_of, limits_of
    from lightning_cp.plan.written import write
    from lightning_cp.planner.search import search

    plain: Any = OmegaConf.to_container(config, resolve=True)
    check(plain)
    job = job_of(plain, name)
    found = search(job, limits_of(plain))
    text = f"{report.headline(job)}\n\n{report.summary(found, config.show)}"
    # Files first: who reads what is printed may stop at any line.
    picture.draw(found, report.headline(job), config.show, folder / "plan.png")
    (folder / "plan.txt").write_text(text + "\n")
    asked = [one for one in HydraConfig.get().overrides.task if one.startswith("model.")]
    print(f"{text}\n\n{write(found, folder, [f'model={name}', *asked])}", flush=True)
    if not config.verify or not found.plans:
        if config.verify:
            print("\nNothing fits, so there is nothing to verify.")
        return bool(found.plans)
    from lightning_cp.plan.verify import verify, verify_steps

    good = verify(found.plans[0], plain)
    return verify_steps(plain) and good if config.verify == "all" else good


@hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="plan")
def main(config: DictConfig) -> None:
    """Plan; exit with status 1 if nothing fits, or what was verified is otherwise."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
    running = HydraConfig.get().runtime
    try:
        good = plan(config, Path(running.output_dir), str(running.choices["model"]))
        sys.stdout.flush()
    except BrokenPipeError:  # as of ``| head``, which has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(PIPE_CLOSED) from None
    if not good:
        raise SystemExit(1)


if __name__ == "__main__":
    explain_keys()
    flags = {"--verify": "verify=true", "--verify=all": "verify=all"}
    sys.argv = [flags.get(one, one) for one in sys.argv]
    if "model=null" in sys.argv:  # which Hydra refuses with a traceback
        raise SystemExit(
            "ConfigError: model must be one of the group model, got null: see configs/model."
        )
    with one_folder(sys.argv):
        main()
