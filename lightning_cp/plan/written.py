"""The best plan in files, and how to run it."""

from __future__ import annotations

from pathlib import Path

from lightning_cp.planner.machines import MACHINES
from lightning_cp.planner.override import as_overrides, as_yaml
from lightning_cp.planner.search import Found


def write(found: Found, folder: Path, model: str) -> str:
    """Write ``strategy/plan.yaml`` where something fits; what to do with it, and where all files are."""
    files = [folder / name for name in ("plan.txt", "plan.png")]
    lines: list[str] = []
    if found.plans and found.plans[0].case.job.trains:
        case = found.plans[0].case
        file = folder / "strategy" / "plan.yaml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(as_yaml(case))
        files.append(file)
        length = f"model={model} data.seq_len={case.job.seq_len}"
        lines = [
            "Run it:",
            f"  python -m lightning_cp.train --config-dir {folder} strategy=plan {length}",
            f"or, without the file:\n  python -m lightning_cp.train {as_overrides(case)} {length}",
        ]
        if case.job.machine.name in MACHINES and case.job.machine.name.startswith("tpu"):
            lines = [
                "This package does not run on TPUs: strategy/plan.yaml is for the same mesh elsewhere."
            ]
    return "\n".join([*lines, *(f"  {file}" for file in files)])
