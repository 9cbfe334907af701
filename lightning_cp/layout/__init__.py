"""Integers only: which rank holds which tokens, which documents they belong to, who computes what."""

from lightning_cp.layout.documents import Documents
from lightning_cp.layout.heads import HeadSplit
from lightning_cp.layout.mask import Mask
from lightning_cp.layout.sequence import SequenceLayout
from lightning_cp.layout.tiles import ALL_ROWS, Hop, RankSchedule, Schedule, Tile, schedule
from lightning_cp.layout.traffic import Traffic, attention_traffic

__all__ = [
    "ALL_ROWS",
    "Documents",
    "HeadSplit",
    "Hop",
    "Mask",
    "RankSchedule",
    "Schedule",
    "SequenceLayout",
    "Tile",
    "Traffic",
    "attention_traffic",
    "schedule",
]
