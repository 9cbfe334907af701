"""The command line of one job of a sweep. Imports neither torch nor lightning."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, OmegaConf

CALLBACK = (
    "+hydra.callbacks.lightning_cp_result._target_=hydra_plugins.lightning_cp.result.KeepResult"
)
OF_THE_SWEEP = (
    "hydra.mode",
    "hydra.run",
    "hydra.sweep",
    "hydra.sweeper",
    "hydra/sweeper",
    "hydra.launcher",
    "hydra/launcher",
    "hydra.hydra_logging",
    "hydra/hydra_logging",
)
"""Settings of Hydra that say how to sweep; the others, such as hydra.searchpath, hold in each job too."""


def job_command(arguments: Namespace, config: DictConfig, overrides: list[str]) -> list[str]:
    """What follows the program's name.

    Args:
        arguments: the sweep's own command line, parsed by Hydra.
        config: the job's config, composed.
        overrides: the job's own.
    """
    return [
        *_where_configs_are(arguments),
        *overrides,
        *_kept(config),
        CALLBACK,
        "hydra.mode=RUN",
        f"hydra.run.dir={quoted(str(job_folder(config)))}",
        f"hydra.sweep.dir={quoted(str(Path(config.hydra.sweep.dir).absolute()))}",
        f"hydra.job.num={config.hydra.job.num}",
        f"hydra.job.id={quoted(config.hydra.job.id)}",
    ]


def job_folder(config: DictConfig) -> Path:
    """The job's folder in the sweep's."""
    return Path(str(config.hydra.sweep.dir), str(config.hydra.sweep.subdir)).absolute()


def quoted(value: str) -> str:
    """A string as the value of an override, whatever is in it."""
    return QuotedString(value, Quote.single).with_quotes()


def _where_configs_are(arguments: Namespace) -> list[str]:
    options = {
        "--config-path": arguments.config_path,
        "--config-name": arguments.config_name,
        "--config-dir": arguments.config_dir,
    }
    return [f"{name}={value}" for name, value in options.items() if value is not None]


def _kept(config: DictConfig) -> list[str]:
    """The sweep's overrides of Hydra's settings that are not about sweeping."""
    overrides: list[str] = OmegaConf.to_container(config.hydra.overrides.hydra)  # type: ignore[assignment]
    return [one for one in overrides if not _is_of_the_sweep(one)]


def _is_of_the_sweep(override: str) -> bool:
    key = override.split("=", 1)[0].lstrip("+~").split("@")[0]
    return any(key == name or key.startswith(f"{name}.") for name in OF_THE_SWEEP)
