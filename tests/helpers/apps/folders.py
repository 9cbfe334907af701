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
    validation: float | Sequence[float] = 4.5,
    before: float | None = None,
    columns: Sequence[str] = COLUMNS,
    **settings: Any,
) -> Path:
    """Write a run with these training losses and a validation at the end; several are after the last steps.

    One that was made before training has seen no tokens.
    """
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
    values = [validation] if isinstance(validation, int | float) else validation
    ends = [
        {**row, "train/loss": "", COLUMNS[3]: "", "val/loss": value, "peak_memory_mib": 321.4}
        for row, value in zip(rows[-len(values) :], values, strict=True)
    ]
    start = [{"step": 0, "tokens": 0, "val/loss": before}] if before is not None else []
    with (folder / "metrics" / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", restval="")
        writer.writeheader()
        writer.writerows([*start, *rows, *ends])
    return folder
