"""Folders like those that runs leave, with any losses."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

COLUMNS = ["step", "tokens", "train/loss", "train/tokens_per_second", "val/loss", "peak_memory_mib"]
LOSSES = (5.0, 4.0, 3.0)


def run_folder(
    folder: Path,
    losses: Sequence[float] = LOSSES,
    *,
    devices: Any = 1,
    heads: int = 8,
    precision: str = "32-true",
    tokens: int = 512,
    validation: float = 4.5,
    columns: Sequence[str] = COLUMNS,
    **settings: Any,
) -> Path:
    """Write a run with these training losses and one validation at the end."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / "metrics").mkdir()
    config = {
        "trainer": {"devices": devices, "precision": precision, "strategy": "${strategy}"},
        "model": {"heads": heads},
        "strategy": "auto" if devices == 1 else {"_target_": "lightning_cp.UlyssesRingStrategy"},
        **settings,
    }
    (folder / ".hydra" / "config.yaml").write_text(yaml.safe_dump(config))
    rows = [
        {"step": step, "tokens": tokens * (step + 1), "train/loss": loss, COLUMNS[3]: 1000 + step}
        for step, loss in enumerate(losses)
    ]
    end = {**rows[-1], "train/loss": "", COLUMNS[3]: "", "val/loss": validation}
    with (folder / "metrics" / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", restval="")
        writer.writeheader()
        writer.writerows([*rows, {**end, "peak_memory_mib": 321.4}])
    return folder
