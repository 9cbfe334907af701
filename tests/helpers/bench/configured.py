"""Settings as the command line gives them."""

from __future__ import annotations

from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lightning_cp.bench.processes import TorchrunRank
from lightning_cp.bench.settings import BenchSettings
from lightning_cp.utils.run_folder import config_dir

TINY = (
    *("device=cpu", "devices=2", "tokens=64", "heads=4", "kv_heads=2", "head_dim=8", "documents=3"),
    *("message_bytes=[4096]", "repeats=2", "warm_up=0"),
)
"""Overrides with which everything is measured in seconds."""


def plain(*overrides: str) -> dict[str, Any]:
    """The config of a command line."""
    with initialize_config_dir(str(config_dir() / "bench"), version_base="1.3"):
        config: Any = OmegaConf.to_container(compose("bench", overrides=list(overrides)))
    return config


def settings_of(*overrides: str, own: TorchrunRank | None = None) -> BenchSettings:
    """The settings of a command line."""
    return BenchSettings.of(plain(*overrides), own)
