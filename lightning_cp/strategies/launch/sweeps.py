"""Hydra sweeps in which a strategy that starts its own processes would train on the wrong ones."""

from __future__ import annotations

import sys

from lightning.fabric.plugins.environments import ClusterEnvironment, LightningEnvironment

from lightning_cp.errors import ConfigError


def refuse_foreign_launcher(
    environment: ClusterEnvironment | None, start_method: str, processes: int
) -> None:
    """Refuse to start ranks from a job that shares its process with the sweep.

    Lightning would start them with the command line of the whole sweep, and what the first job leaves in the
    environment and in ``torch.distributed`` would decide the ranks of the next ones.

    Args:
        environment: who says what rank this is; ranks that a cluster or torchrun has started are fine.
        start_method: ``popen`` runs the program again; ``spawn`` and ``fork`` do not.
        processes: the world size that is wanted.

    Raises:
        ConfigError: the job runs inside a sweep, and the ranks would be started by running the program.
    """
    own = isinstance(environment, LightningEnvironment) and start_method == "popen"
    if own and processes > 1 and (launcher := _launcher_of_the_sweep()):
        raise ConfigError(
            f"this job of a Hydra sweep was started by {launcher}, inside the sweep's own process. The "
            f"{processes} processes that it needs would run the whole sweep again, and the next job could "
            "silently train on the wrong number of them. Add hydra/launcher=lightning_cp, which runs each "
            "job in fresh processes."
        )


def _launcher_of_the_sweep() -> str | None:
    """The class that runs this sweep's jobs; None outside a sweep, and where Hydra is not even loaded."""
    hydra = sys.modules.get("hydra.core.hydra_config")
    if hydra is None or not hydra.HydraConfig.initialized():
        return None
    config = hydra.HydraConfig.get()
    if config.mode is None or config.mode.name != "MULTIRUN":
        return None
    return str(config.launcher.get("_target_", "another launcher")).rpartition(".")[2]
