"""Small Hydra applications, run as a user would; none of them imports torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
OURS = "hydra/launcher=lightning_cp"
SAYS = """
import json, os, signal, subprocess, sys, time
import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

@hydra.main(version_base="1.3", config_path=CONFIGS, config_name=None)
def main(config):
    ours = HydraConfig.get()
    said = {
        "config": OmegaConf.to_container(config),
        "mode": ours.mode.name,
        "folder": ours.runtime.output_dir,
        "num": OmegaConf.select(ours, "job.num"),
        "id": OmegaConf.select(ours, "job.id"),
        "sweep": ours.sweep.dir,
        "pid": os.getpid(),
        "ranks": {key: os.environ[key] for key in STALE if key in os.environ},
        "heavy": sorted({"torch", "lightning"} & set(sys.modules)),
    }
    print("SAID " + json.dumps(said), flush=True)
    BODY

STALE = "LOCAL_RANK NODE_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT RANK".split()

if __name__ == "__main__":
    main()
"""


def program(
    folder: Path, body: str = "return None", configs: str | None = None, name: str = "app.py"
) -> Path:
    """Write an application that says what it was given, then does ``body``."""
    file = folder / name
    file.write_text(SAYS.replace("CONFIGS", repr(configs)).replace("BODY", body))
    return file


def environment(**more: str) -> dict[str, str]:
    """What a user's shell has: this repository importable, and no rank."""
    drop = {"LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK"}
    kept = {key: value for key, value in os.environ.items() if key not in drop}
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**kept, "PYTHONPATH": path, **more}


def run(
    cwd: Path, *command: str | Path, timeout: float = 60, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run ``python <command>``."""
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
