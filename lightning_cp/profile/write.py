"""What the first rank writes: profile.json, profile.md and profile.png, and the table on the screen."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
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
        if report.lost is not None:
            _log.warning(
                "profile of step %d: the trace of rank %d could not be written: %s",
                *(step, report.rank, report.lost),
            )
    told = [report for report in reports if report.error is None]
    if not told:
        return
    summary = summarise(told)
    table = markdown(summary, step)
    print(f"\n{table}\n", flush=True)
    figures = json.dumps(as_json(summary, step), indent=2) + "\n"
    traces = [trace_name(rank.rank) for rank in summary.ranks if rank.has_trace]
    if len(traces) > 2:
        traces = [f"{len(traces)} traces ({traces[0]}, ...)"]
    files: dict[str, Callable[[Path], object]] = {
        "profile.json": lambda path: path.write_text(figures),
        "profile.md": lambda path: path.write_text(table + "\n"),
        "profile.png": lambda path: draw(told, summary, step, path),
    }
    written = [name for name, write in files.items() if _wrote(write, folder / name, step)]
    print(f"In {folder}: {', '.join([*traces, *written]) or 'nothing'}", flush=True)


def _wrote(write: Callable[[Path], object], path: Path, step: int) -> bool:
    """True if a file could be written; a profile is not worth a training run."""
    try:
        write(path)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        _log.warning("profile of step %d: %s could not be written: %s", step, path.name, why)
        return False
    return True
