"""The fixed cost of a training step, independent of its length: Python, launches and tiny messages.

Two models with few features and different numbers of layers train on a short row, each mode on all devices.
Their difference is the cost of the added layers; the rest is the step's. A mode's layers minus those without
context parallelism give the cost of its calls. The median of the repeats counts: a real step consists of many
such parts, and its minimum is not the sum of their minima.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from lightning_cp.bench.model_step import ModelSizes, ModelStep
from lightning_cp.bench.settings import BenchSettings
from lightning_cp.bench.timers import Figure, device_seconds, largest_spread, measure_on_ranks
from lightning_cp.layout import HeadSplit, Mask, SequenceLayout, attention_traffic, schedule

FEW, MANY = 1, 5
"""Layers of the two models."""
TOKENS = 16
"""Tokens of each rank."""
OFTEN = 10
"""Factor on the repeats of other suites: steps are short, and most of each is waiting."""


@dataclass(frozen=True)
class OverheadRow:
    """One mode; where fewer ranks than devices share a row, the other ranks have other rows."""

    mode: str
    """alone, ulysses, ring or zigzag_llama3."""
    ranks: int
    """Ranks that share a row."""
    layer_seconds: float
    """Forward and backward on the slowest device, the median of the repeats. On CPU, CPU-seconds of the mean
    rank."""
    step_seconds: float
    """Seconds besides layers, the optimizer included."""
    calls: int
    """Collectives of one layer's attention, forward and backward."""
    spread: float | None
    """(most - least) / least of the repeats, of the longer step or the shorter; ``None`` of one."""


def measure_overheads(settings: BenchSettings, tell: Callable[[str], None]) -> list[OverheadRow]:
    """Measure each mode on all ranks; every rank returns the same rows.

    Args:
        settings: the number of ranks and of repeats.
        tell: shows progress.
    """
    return list(_rows(settings, tell))


def _rows(settings: BenchSettings, tell: Callable[[str], None]) -> Iterator[OverheadRow]:
    devices = settings.devices
    ways = [("alone", (1, 1))]
    for ranks in (n for n in range(2, devices + 1) if devices % n == 0):
        ways += [("ulysses", (1, ranks)), ("ring", (ranks, 1)), ("zigzag_llama3", (ranks, 1))]
    for mode, split in ways:
        tell(f"{mode}, {split[0] * split[1]} ranks")
        few, many = (_figure(mode, split, layers, settings) for layers in (FEW, MANY))
        layer = max(many.middle - few.middle, 0.0) / (MANY - FEW)
        step = max(few.middle - FEW * layer, 0.0)
        spread = largest_spread((few.spread, many.spread))
        sizes = (mode, split[0] * split[1])
        yield OverheadRow(*sizes, layer, step, _calls(mode, split, devices), spread)


def _sizes(ranks: int, layers: int) -> ModelSizes:
    """A small model with two heads for every rank."""
    heads = 2 * ranks
    return ModelSizes(8 * heads, heads, ranks, 8 * heads, layers, vocabulary=64, dtype="float32")


def _figure(mode: str, split: tuple[int, int], layers: int, settings: BenchSettings) -> Figure:
    step = ModelStep(
        _sizes(settings.devices, layers), mode, split, device_type=settings.device_type
    )
    row = step.of(TOKENS * split[0] * split[1])
    often = replace(settings, repeats=OFTEN * settings.repeats)
    figure = device_seconds(measure_on_ranks(row, often), settings.device_type)
    step.end()
    return figure


def _calls(mode: str, split: tuple[int, int], ranks: int) -> int:
    """Count a layer's collectives from the schedule of its attention."""
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
