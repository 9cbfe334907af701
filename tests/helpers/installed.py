"""An installed package without installing it: what makes its entry points found."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def installed_path(folder: Path) -> str:
    """A PYTHONPATH on which this repository is importable and torch finds its entry point.

    Args:
        folder: where the metadata are written.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (entry,) = project["entry-points"]["torch.backends"].items()
    metadata = folder / "names_of_strategies-0.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: names-of-strategies\nVersion: 0.0\n"
    )
    (metadata / "entry_points.txt").write_text(f"[torch.backends]\n{entry[0]} = {entry[1]}\n")
    return f"{folder}{os.pathsep}{ROOT}"
