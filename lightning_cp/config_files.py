"""Where the configs lie. Imports neither torch nor lightning."""

from __future__ import annotations

from pathlib import Path


def config_dir() -> Path:
    """The folder of the configs: inside the package in a wheel, beside it in a source checkout."""
    package = Path(__file__).resolve().parent
    shipped = package / "configs"
    return shipped if shipped.is_dir() else package.parent / "configs"
