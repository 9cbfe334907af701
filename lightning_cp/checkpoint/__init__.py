"""Checkpoints of this package, which are complete or absent; and import and export of Hugging Face weights.

Names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_cp.utils.lazy import lazy

if TYPE_CHECKING:
    from lightning_cp.checkpoint.pretrained.export import export_pretrained as export_pretrained
    from lightning_cp.checkpoint.pretrained.load import load_pretrained as load_pretrained
    from lightning_cp.checkpoint.pretrained.reader import (
        CheckedStorageReader as CheckedStorageReader,
    )
    from lightning_cp.checkpoint.read import latest_checkpoint as latest_checkpoint
    from lightning_cp.checkpoint.read import open_checkpoint as open_checkpoint
    from lightning_cp.checkpoint.reshard import whole as whole
    from lightning_cp.checkpoint.save import save_checkpoint as save_checkpoint

_HOME = {
    "latest_checkpoint": "lightning_cp.checkpoint.read",
    "open_checkpoint": "lightning_cp.checkpoint.read",
    "save_checkpoint": "lightning_cp.checkpoint.save",
    "whole": "lightning_cp.checkpoint.reshard",
    "CheckedStorageReader": "lightning_cp.checkpoint.pretrained.reader",
    "export_pretrained": "lightning_cp.checkpoint.pretrained.export",
    "load_pretrained": "lightning_cp.checkpoint.pretrained.load",
}

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]

__getattr__, __dir__ = lazy(__name__, _HOME)
