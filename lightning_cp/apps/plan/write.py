"""The best plan in files, and the command that runs it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from lightning_cp.planner.export import as_overrides, as_yaml, optimizer_overrides
from lightning_cp.planner.search import SearchResult


def write(found: SearchResult, folder: Path, model: Sequence[str]) -> str:
    """Write ``strategy/plan.yaml`` if a plan fits.

    Args:
        found: all plans.
        folder: the run's folder.
        model: the overrides that chose the model.

    Returns:
        The commands that use the file, and the paths of all files.
    """
    files = [folder / name for name in ("plan.txt", "plan.png")]
    lines: list[str] = []
    file = folder / "strategy" / "plan.yaml"
    file.unlink(missing_ok=True)  # of an earlier run
    if found.plans and found.plans[0].case.job.trains:
        case = found.plans[0].case
        file.parent.mkdir(exist_ok=True)
        file.write_text(as_yaml(case))
        files.append(file)
        same = shlex.join([*model, f"data.seq_len={case.job.seq_len}", *optimizer_overrides(case)])
        lines = [
            "Run it:",
            f"  python -m lightning_cp.train --config-dir {folder} strategy=plan {same}",
            f"or, without the file:\n  python -m lightning_cp.train {as_overrides(case)} {same}",
        ]
        if case.job.machine.name == "tpu_v4":
            lines = [
                "This package does not run on TPUs: strategy/plan.yaml is for the same mesh elsewhere."
            ]
    return "\n".join([*lines, *(f"  {file}" for file in files)])
