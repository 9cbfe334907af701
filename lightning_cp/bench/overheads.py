"""What a training step takes whatever its length: Python, launches, and messages that are next to nothing.

Two models with few features and other numbers of layers train on a short row, each mode on all devices. Their
difference is that of their layers; what is left is the step's. Of one mode against no mode that is its calls.
The median of the repeats counts: a real step is many such parts, and its least is no sum of their leasts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from lightning_cp.bench.clock import Figure, busy, widest
from lightning_cp.bench.length_step import Sizes
from lightning_cp.bench.model_step import ModelStep
from lightning_cp.bench.settings import Settings
from lightning_cp.bench.together import together
from lightning_cp.layout import HeadSplit, Mask, SequenceLayout, attention_traffic, schedule

FEW, MANY = 1, 5
"""Layers."""
TOKENS = 16
"""Of each rank."""
OFTEN = 10
"""As many times the repeats as of others: steps are short, and most of them is waiting."""


@dataclass(frozen=True)
class OverheadRow:
    """One mode; where fewer ranks than there are devices share a row, others have rows of their own."""

    mode: str
    """alone, ulysses, ring or zigzag_llama3."""
    ranks: int
    """That share a row."""
    layer_seconds: float
    """Forward and backward on the slowest device, the median of the repeats. On CPU, CPU-seconds of the mean
    rank."""
    step_seconds: float
    """Beside layers; the optimizer is among it."""
    calls: int
    """That a layer's attention makes of collectives, forward and backward."""
    spread: float | None
    """(most - least) / least of the repeats, of the longer step or the shorter; ``None`` of one."""


def measure_overheads(settings: Settings, tell: Callable[[str], None]) -> list[OverheadRow]:
    """Each mode; on all ranks, which find the same.

    Args:
        settings: how many ranks, and how often.
        tell: told what is measured now.
    """
    return list(_rows(settings, tell))


def _rows(settings: Settings, tell: Callable[[str], None]) -> Iterator[OverheadRow]:
    devices = settings.devices
    ways = [("alone", (1, 1))]
    for ranks in (n for n in range(2, devices + 1) if devices % n == 0):
        ways += [("ulysses", (1, ranks)), ("ring", (ranks, 1)), ("zigzag_llama3", (ranks, 1))]
    for mode, split in ways:
        tell(f"{mode}, {split[0] * split[1]} ranks")
        few, many = (_figure(mode, split, layers, settings) for layers in (FEW, MANY))
        layer = max(many.middle - few.middle, 0.0) / (MANY - FEW)
        step = max(few.middle - FEW * layer, 0.0)
        spread = widest((few.spread, many.spread))
        sizes = (mode, split[0] * split[1])
        yield OverheadRow(*sizes, layer, step, _calls(mode, split, devices), spread)


def _sizes(ranks: int, layers: int) -> Sizes:
    """Heads for every rank, of few entries."""
    heads = 2 * ranks
    return Sizes(8 * heads, heads, ranks, 8 * heads, layers, vocabulary=64, dtype="float32")


def _figure(mode: str, split: tuple[int, int], layers: int, settings: Settings) -> Figure:
    step = ModelStep(
        _sizes(settings.devices, layers), mode, split, device_type=settings.device_type
    )
    row = step.of(TOKENS * split[0] * split[1])
    often = replace(settings, repeats=OFTEN * settings.repeats)
    figure = busy(together(row, often), settings.device_type)
    step.end()
    return figure


def _calls(mode: str, split: tuple[int, int], ranks: int) -> int:
    """From the schedule of a layer's attention."""
    sizes, (ring, ulysses) = _sizes(ranks, FEW), split
    layout = SequenceLayout(
        TOKENS * ring * ulysses, ring, ulysses, "zigzag" if ring > 1 else "contiguous"
    )
    sent = attention_traffic(
        schedule(layout, None, Mask()),
        HeadSplit(sizes.heads, sizes.kv_heads, ulysses),
        0,
        batch=1,
        head_dim=sizes.head_dim,
        itemsize=4,
        accumulate_itemsize=4,
        exchange="all_gather" if mode == "zigzag_llama3" else "ring",
    )
    return sum(one.total_calls for one in sent)
