"""Muon for parameters that are sharded in any way."""

from __future__ import annotations

from lightning_cp.optim.muon import Muon as Muon
