"""Hydra entry point: measure this machine, print the rates that it reaches and save them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lightning_cp.error_display import is_full
from lightning_cp.utils.command_help import explain_keys
from lightning_cp.utils.run_folder import config_dir, one_folder

INTERRUPTED = 130  # what a shell reports for Ctrl-C


def bench(config: DictConfig, folder: Path) -> None:
    """Measure on the processes that torchrun started, or on new ones, one per device.

    Args:
        config: see ``configs/bench/bench.yaml``.
        folder: receives ``bench.json``, ``hardware.json`` and a picture of each suite.

    Raises:
        ConfigError: settings that this machine cannot measure.
        torch.multiprocessing.ProcessException: a rank failed.
    """
    from lightning_cp.bench import suites
    from lightning_cp.bench.processes import on_ranks, on_torchrun_ranks, torchrun_rank
    from lightning_cp.bench.settings import BenchSettings

    own = torchrun_rank()
    plain: Any = OmegaConf.to_container(config, resolve=True)
    settings = BenchSettings.of(plain, own)
    suites.check(settings)
    device_type = settings.device_type
    if own is None:
        on_ranks(settings.devices, suites.run, settings, folder, device_type=device_type)
    else:
        on_torchrun_ranks(own, suites.run, settings, folder, device_type=device_type)


@hydra.main(version_base="1.3", config_path=str(config_dir() / "bench"), config_name="bench")
def main(config: DictConfig) -> None:
    """Measure; exit with status 1 if a setting is refused or a rank fails."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
    from torch.multiprocessing.spawn import ProcessException

    try:
        bench(config, Path(HydraConfig.get().runtime.output_dir))
    except ProcessException:
        if is_full():
            raise
        print("A rank failed, as shown above; suites that were done are kept.", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("\nInterrupted; suites that were done are kept.", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None


if __name__ == "__main__":
    explain_keys()
    with one_folder(sys.argv):
        main()
