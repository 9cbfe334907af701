"""Attention of one layer, priced by the schedule that is executed: pairs, bytes, seconds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from lightning_cp.axes import Axis
from lightning_cp.layout import (
    CostModel,
    HeadSplit,
    Mask,
    Schedule,
    SequenceLayout,
    Traffic,
    attention_memory,
    attention_traffic,
    schedule,
)
from lightning_cp.planner.job import Case
from lightning_cp.planner.machines import TileRate
from lightning_cp.planner.tile_rates import rates_on

ACCUMULATED = 4
"""Bytes of an entry of what is summed: results and gradients of tiles."""
FORWARD, BACKWARD = 4, 10
"""FLOPs of a visible pair, per head and entry: two products, and five."""


@dataclass(frozen=True)
class Passes:
    """Of one attention call: the same quantity forward and backward."""

    forward: float
    backward: float

    def step(self, *, again: bool) -> float:
        """Of a training step, in which forward may be computed again."""
        return self.forward * (2 if again else 1) + self.backward


@dataclass(frozen=True)
class AttentionCost:
    """Of one layer's call on the rank that needs most."""

    pairs: tuple[int, ...]
    """Visible (query, key) pairs of each ring rank."""
    memory: tuple[int, int]
    """Peak bytes of (forward, backward), above what a call is given."""
    traffic: tuple[Traffic, Traffic]
    """What a rank sends in (forward, backward)."""
    over_ring: Passes
    """Seconds, with the ring's exchange and what of it no computing hides."""
    computing: Passes
    """Seconds of these that the busiest rank computes."""
    ulysses: Passes
    """Seconds of the exchange of sequence for heads."""

    @property
    def imbalance(self) -> float:
        """Pairs of the busiest rank over the mean."""
        return max(self.pairs) * len(self.pairs) / max(sum(self.pairs), 1)


@dataclass(frozen=True)
class Call:
    """All that the cost of an attention call depends on."""

    layout: SequenceLayout
    window: int | None
    heads: HeadSplit
    head_dim: int
    value_dim: int
    itemsize: int
    exchange: str
    rates: tuple[float, float]
    """Of the kernel, forward and backward, whatever the tile."""
    tiles: tuple[TileRate, ...]
    """What was measured of tiles; it goes first."""
    ring_link: float
    ulysses_link: float
    latency: float


def attention_cost(case: Case, window: int | None) -> AttentionCost:
    """What a layer's attention costs.

    Args:
        case: the job and the choice.
        window: keys that a query sees; ``None``: all before it.
    """
    job, machine = case.job, case.job.timed
    ring, ulysses = (
        machine.link(crosses=case.crosses_nodes(axis)) for axis in (Axis.RING, Axis.ULYSSES)
    )
    rates = (machine.attention_forward, machine.attention_backward)
    links = (ring, ulysses, machine.latency)
    dims = (job.model.head_dim, job.model.value_dim)
    sizes = (case.heads, *dims, job.compute_itemsize, case.choice.exchange)
    return cost_of(Call(case.layout, window, *sizes, rates, machine.tiles, *links))


@lru_cache(maxsize=4096)
def cost_of(call: Call) -> AttentionCost:
    """What a call costs; meshes that differ elsewhere share it."""
    plan = _plan(call.layout, call.window)
    sizes = {
        "batch": 1,
        "head_dim": call.head_dim,
        "value_dim": call.value_dim,
        "itemsize": call.itemsize,
        "accumulate_itemsize": ACCUMULATED,
        "exchange": call.exchange,
    }
    traffic = attention_traffic(plan, call.heads, 0, **sizes)
    # Rates are FlashAttention's, which pads what is narrower of K and V (``Capabilities.one_width``).
    width = max(call.head_dim, call.value_dim)
    per_second = [
        rate / (flops * call.heads.local_heads * width)
        for rate, flops in zip(_rates(call, plan), (FORWARD, BACKWARD), strict=True)
    ]
    busiest = max(plan.work)
    return AttentionCost(
        plan.work,
        attention_memory(plan, call.heads, 0, **sizes, one_width=True),
        traffic,
        Passes(
            _over_ring(call, plan, traffic[0], per_second[0], backward=False),
            _over_ring(call, plan, traffic[1], per_second[1], backward=True),
        ),
        Passes(*(busiest / rate for rate in per_second)),
        Passes(*(_ulysses(one, call.ulysses_link, call.latency) for one in traffic)),
    )


def _plan(layout: SequenceLayout, window: int | None) -> Schedule:
    return schedule(layout, None, Mask() if window is None else Mask(window=(window - 1, 0)))


def _rates(call: Call, plan: Schedule) -> tuple[float, float]:
    return rates_on(plan, call.tiles) if call.tiles else call.rates


def _over_ring(
    call: Call, plan: Schedule, sent: Traffic, pairs_per_second: float, *, backward: bool
) -> float:
    """Seconds of computing and exchanging keys over the ring axis, of the slowest rank."""
    if call.exchange == "all_gather" and call.layout.ring_size > 1:
        computing = max(plan.work) / pairs_per_second
        calls = sent.all_gather_calls + sent.reduce_scatter_calls
        moved = sent.all_gather_bytes + sent.reduce_scatter_bytes
        moving = moved / call.ring_link + calls * call.latency
        # One block of heads is gathered while the one before is computed; the first one is waited for.
        return max(computing, moving) + moving / max(calls, 1)
    kv_heads = max(map(call.heads.num_local_kv, range(call.heads.ulysses_size)))
    numbers = kv_heads * (call.head_dim + call.value_dim)
    per_key = numbers * call.itemsize + (numbers * ACCUMULATED if backward else 0)
    messages = 2 if backward else 1
    key = round(per_key / call.ring_link * pairs_per_second)
    hop = round(messages * call.latency * pairs_per_second)
    return _slowest(plan, key, hop) / pairs_per_second


@lru_cache(maxsize=1024)
def _slowest(plan: Schedule, key: int, hop: int) -> int:
    return CostModel(key, hop).cost(plan)


def _ulysses(sent: Traffic, link: float, latency: float) -> float:
    return sent.all_to_all_bytes / link + sent.all_to_all_calls * latency
