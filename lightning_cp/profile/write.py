"""What the first rank writes: profile.json, profile.md and profile.png, and the table on the screen."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from lightning_cp.profile.picture import draw
from lightning_cp.profile.summary import Report, as_json, summarise
from lightning_cp.profile.table import markdown

_log = logging.getLogger("lightning_cp")


def trace_name(rank: int) -> str:
    """The file of a rank's Chrome trace."""
    return f"rank-{rank}.trace.json"


def write_summary(reports: Sequence[Report], step: int, folder: Path) -> None:
    """Write and print what all ranks found; a rank or a file that failed is told and left out."""
    for report in reports:
        if report.error is not None:
            _log.warning(
                "profile of step %d: rank %d has none: %s", step, report.rank, report.error
            )
    told = [report for report in reports if report.error is None]
    if not told:
        return
    summary = summarise(told)
    table = markdown(summary, step)
    print(f"\n{table}\n\nTraces, profile.json and profile.png are in {folder}", flush=True)
    try:
        (folder / "profile.json").write_text(json.dumps(as_json(summary, step), indent=2) + "\n")
        (folder / "profile.md").write_text(table + "\n")
        draw(told, summary, step, folder / "profile.png")
    except Exception as error:  # a profile is not worth a training run
        _log.warning(
            "profile of step %d could not be written: %s: %s", step, type(error).__name__, error
        )
