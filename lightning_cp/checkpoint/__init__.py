"""Checkpoints: our own, which are whole or not there; weights that others made, and that others load.

Names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_cp.checkpoint.latest import latest_checkpoint as latest_checkpoint
    from lightning_cp.checkpoint.pretrained.dcp import CheckedStorageReader as CheckedStorageReader
    from lightning_cp.checkpoint.pretrained.export import export_pretrained as export_pretrained
    from lightning_cp.checkpoint.pretrained.load import load_pretrained as load_pretrained
    from lightning_cp.checkpoint.read import open_checkpoint as open_checkpoint
    from lightning_cp.checkpoint.save import save_checkpoint as save_checkpoint
    from lightning_cp.checkpoint.tensors import whole as whole

_HOME = {
    "latest_checkpoint": "lightning_cp.checkpoint.latest",
    "open_checkpoint": "lightning_cp.checkpoint.read",
    "save_checkpoint": "lightning_cp.checkpoint.save",
    "whole": "lightning_cp.checkpoint.tensors",
    "CheckedStorageReader": "lightning_cp.checkpoint.pretrained.dcp",
    "export_pretrained": "lightning_cp.checkpoint.pretrained.export",
    "load_pretrained": "lightning_cp.checkpoint.pretrained.load",
}

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
