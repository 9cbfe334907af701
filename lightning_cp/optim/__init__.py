"""Muon for parameters that are sharded in any way, with QK-clip. Names are loaded on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_cp.utils.lazy import lazy

if TYPE_CHECKING:
    from lightning_cp.optim.muon import Muon as Muon
    from lightning_cp.optim.qk_clip import QKClip as QKClip

_HOME = {"Muon": "lightning_cp.optim.muon", "QKClip": "lightning_cp.optim.qk_clip"}

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]

__getattr__, __dir__ = lazy(__name__, _HOME)
