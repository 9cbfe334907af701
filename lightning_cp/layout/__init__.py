"""Integers only: which rank holds which tokens, which documents they belong to, who computes what."""

from lightning_cp.layout.choose import LayoutChoice, choose_layout, explain_layout
from lightning_cp.layout.cost import CostModel
from lightning_cp.layout.documents import Documents
from lightning_cp.layout.gathered import GatheredSchedule, gathered_schedule
from lightning_cp.layout.heads import HeadBlock, HeadSplit
from lightning_cp.layout.mask import Mask
from lightning_cp.layout.memory import attention_memory
from lightning_cp.layout.sequence import SequenceLayout
from lightning_cp.layout.tiles import ALL_ROWS, Hop, RankSchedule, Schedule, Tile, schedule
from lightning_cp.layout.traffic import Traffic, attention_traffic
from lightning_cp.layout.visible import visible_pairs

__all__ = [
    "ALL_ROWS",
    "CostModel",
    "Documents",
    "GatheredSchedule",
    "HeadBlock",
    "HeadSplit",
    "Hop",
    "LayoutChoice",
    "Mask",
    "RankSchedule",
    "Schedule",
    "SequenceLayout",
    "Tile",
    "Traffic",
    "attention_memory",
    "attention_traffic",
    "choose_layout",
    "explain_layout",
    "gathered_schedule",
    "schedule",
    "visible_pairs",
]
