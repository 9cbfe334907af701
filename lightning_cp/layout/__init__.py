"""Layouts and schedules, in integers: tokens and documents of each rank, tiles to compute, keys to send."""

from lightning_cp.layout.attention_memory import attention_memory
from lightning_cp.layout.auto import LayoutChoice, choose_layout, explain_layout
from lightning_cp.layout.cost import CostModel, Traffic, attention_traffic
from lightning_cp.layout.documents import Documents
from lightning_cp.layout.exchange import GatheredSchedule, gathered_schedule
from lightning_cp.layout.heads import HeadBlock, HeadSplit
from lightning_cp.layout.mask import Mask, visible_pairs
from lightning_cp.layout.sequence import SequenceLayout
from lightning_cp.layout.tiles import ALL_ROWS, Hop, RankSchedule, Schedule, Tile, schedule

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
