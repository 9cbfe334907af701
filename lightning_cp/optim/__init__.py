"""Muon for parameters that are sharded in any way, with QK-clip."""

from __future__ import annotations

from lightning_cp.optim.muon import Muon as Muon
from lightning_cp.optim.qk_clip import QKClip as QKClip
