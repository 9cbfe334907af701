"""The launcher ``lightning_cp``: every job of a sweep is a program of its own.

    python train.py -m hydra/launcher=lightning_cp trainer.devices=2,4

For each job it runs ``python train.py <the job's overrides> hydra.mode=RUN hydra.run.dir=<its folder>`` and
waits for it. In there Lightning is in the single run that it was made for, so any strategy and any number
of processes will do. Overrides are passed and never composed configs: ranks that Lightning starts get the
same command line, and compose for themselves.

Hydra imports this file in every application on the machine, so it imports neither torch nor lightning.
"""

from __future__ import annotations

import logging
import pickle
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import (
    JobReturn,
    JobStatus,
    configure_log,
    filter_overrides,
    setup_globals,
)
from hydra.errors import CompactHydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from hydra_plugins.lightning_cp.command import job_command
from hydra_plugins.lightning_cp.result import RESULT
from lightning_cp.errors import ConfigError
from lightning_cp.utils.subprocess import (
    check_no_outer_launcher,
    describe_status,
    run_job,
    this_program,
)

log = logging.getLogger(__name__)

ConfigStore.instance().store(
    group="hydra/launcher",
    name="lightning_cp",
    node={"_target_": "hydra_plugins.lightning_cp.launcher.FreshProcessLauncher"},
    provider="lightning_cp",
)


class SweepError(CompactHydraException):
    """A job that failed, or a sweep that cannot be started. Hydra shows it without a traceback."""


class FreshProcessLauncher(Launcher):
    """Runs jobs one after the other, each in a fresh process; a job that fails does not stop the next."""

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Called by Hydra before the first job."""
        self.loader = hydra_context.config_loader
        self.config = config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> list[JobReturn]:
        """Run a batch of jobs.

        Args:
            job_overrides: the overrides of each.
            initial_job_idx: the number of the first.

        Returns:
            What each returned. Of one that failed, asking for the value raises ``SweepError``.

        Raises:
            SweepError: the program cannot be run again, or several copies of it are running.
        """
        setup_globals()
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        try:
            check_no_outer_launcher()
            program = this_program()
        except ConfigError as error:
            raise SweepError(f"ConfigError: {error}") from error
        log.info(f"Launching {len(job_overrides)} jobs, each in a fresh process")
        numbered = enumerate(job_overrides, initial_job_idx)
        sweep = HydraConfig.instance().cfg
        try:
            done = [self._job(program, number, list(overrides)) for number, overrides in numbered]
        finally:
            HydraConfig.instance().cfg = sweep
        _summarize(done, initial_job_idx)
        return done

    def _job(self, program: list[str], number: int, overrides: list[str]) -> JobReturn:
        log.info(f"\t#{number} : {' '.join(filter_overrides(overrides))}")
        config = self._job_config(number, overrides)
        arguments = get_args_parser().parse_args(sys.argv[1:])
        command = [*program, *job_command(arguments, config, overrides)]
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.pickle"
            status = run_job(command, {RESULT: str(result)})
            value = pickle.loads(result.read_bytes()) if result.is_file() else None  # noqa: S301 - our own
        done = _job_return(config, overrides)
        if status == 0:
            done.status, done.return_value = JobStatus.COMPLETED, value
        else:
            what = " ".join(overrides) or "no overrides"
            error = SweepError(
                f"Job #{number} ({what}) failed with {describe_status(status)}; its error is printed above."
            )
            done.status, done.return_value = JobStatus.FAILED, error
        return done

    def _job_config(self, number: int, overrides: list[str]) -> DictConfig:
        """What the job will compose, for its folder and its ``JobReturn``; made the current one."""
        config = self.loader.load_sweep_config(self.config, overrides)
        with open_dict(config):
            config.hydra.job.id = str(number)
            config.hydra.job.num = number
        HydraConfig.instance().set_config(config)  # for ${hydra:...} in the folder's name
        return config


def _job_return(config: DictConfig, overrides: list[str]) -> JobReturn:
    task = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    ours = OmegaConf.masked_copy(config, "hydra")
    return JobReturn(
        overrides=overrides,
        cfg=task,
        hydra_cfg=ours,
        working_dir=str(Path.cwd()),
        task_name=str(config.hydra.job.name),
    )


def _summarize(done: Sequence[JobReturn], first: int) -> None:
    failed: list[Any] = [
        f"\t#{number} : {' '.join(job.overrides or ())}"
        for number, job in enumerate(done, first)
        if job.status == JobStatus.FAILED
    ]
    if failed:
        log.error("\n".join([f"{len(failed)} of {len(done)} jobs failed:", *failed]))
