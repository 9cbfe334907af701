"""Cost of one layer's attention from the executed schedule: pairs, bytes, seconds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

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
from lightning_cp.layout.axes import Axis
from lightning_cp.layout.nodes import Nodes
from lightning_cp.layout.streams import GRADIENTS, KEYS, Messages, elapsed, gather_order
from lightning_cp.layout.tiles import Tile
from lightning_cp.planner.job import PlanCase
from lightning_cp.planner.machines import TileRate

ACCUMULATE_ITEMSIZE = 4
"""Bytes per entry of accumulated results and gradients of tiles."""
FORWARD_FLOPS, BACKWARD_FLOPS = 4, 10
"""FLOPs of a visible pair, per head and entry: two products, and five."""


def mean_tile_rates(plan: Schedule, rates: Sequence[TileRate]) -> tuple[float, float]:
    """Return the mean FLOP/s, forward and backward, over all tiles of the busiest rank.

    A tile that is not square counts as the square with equally many entries, a band tile as a causal one.
    """
    busiest = plan.work.index(max(plan.work))
    pairs: Counter[tuple[str, float]] = Counter()
    for hop in plan.rank(busiest).hops:
        for tile in hop.tiles:
            mask = "full" if tile.mask == "full" else "causal"
            pairs[mask, math.sqrt(tile.q_len * tile.k_len)] += visible_in_tile(tile)
    seconds = [
        sum(count / interpolate_rate(*tile, rates)[backward] for tile, count in pairs.items())
        for backward in (False, True)
    ]
    total = sum(pairs.values())
    return total / seconds[0], total / seconds[1]


def visible_in_tile(tile: Tile) -> int:
    """Count the visible pairs of a tile; for a band, only its right side hides pairs."""
    if tile.mask == "full":
        return tile.q_len * tile.k_len
    rows = np.arange(tile.q_len) + tile.delta + 1
    return int(np.clip(rows, 0, tile.k_len).sum())


def interpolate_rate(mask: str, length: float, rates: Sequence[TileRate]) -> tuple[float, float]:
    """Return FLOP/s, forward and backward; seconds are interpolated linearly in the logarithm of the length.

    Args:
        mask: full or causal; if it was not measured, rates of the other one are used.
        length: of a square tile.
        rates: at least one, shortest first.
    """
    known = [rate for rate in rates if rate.mask == mask] or list(rates)
    at = np.log([rate.tokens for rate in known])
    forward, backward = (
        1.0 / float(np.interp(math.log(length), at, [1.0 / getattr(rate, name) for rate in known]))
        for name in ("forward", "backward")
    )
    return forward, backward


@dataclass(frozen=True)
class ForwardBackward:
    """One quantity of an attention call, in forward and in backward."""

    forward: float
    backward: float

    def step(self, *, again: bool) -> float:
        """Return the quantity of a training step, in which forward may be recomputed (``again``)."""
        return self.forward * (2 if again else 1) + self.backward


@dataclass(frozen=True)
class AttentionCost:
    """Cost of one layer's call on the rank that needs most."""

    pairs: tuple[int, ...]
    """Visible (query, key) pairs of each ring rank."""
    memory: tuple[int, int]
    """Peak bytes of (forward, backward), above the call's inputs."""
    traffic: tuple[Traffic, Traffic]
    """Traffic of a rank in (forward, backward)."""
    over_ring: ForwardBackward
    """Seconds of compute and of the part of the ring's exchange that compute does not hide."""
    computing: ForwardBackward
    """Seconds of the busiest rank's compute, which are part of ``over_ring``."""
    ulysses: ForwardBackward
    """Seconds of the Ulysses exchange."""

    @property
    def imbalance(self) -> float:
        """Pairs of the busiest rank over the mean."""
        return max(self.pairs) * len(self.pairs) / max(sum(self.pairs), 1)


@dataclass(frozen=True)
class AttentionCostInputs:
    """All inputs of the cost of an attention call."""

    layout: SequenceLayout
    window: int | None
    heads: HeadSplit
    head_dim: int
    value_dim: int
    itemsize: int
    exchange: str
    rates: tuple[float, float]
    """FLOP/s of the kernel, forward and backward, for any tile."""
    tiles: tuple[TileRate, ...]
    """Measured rates of tiles, which take precedence."""
    ring_link: float
    """Bytes per second of a device; between nodes, of a network card."""
    ulysses_link: float
    latency: float
    near: float = 1.0
    """Speed of links within a node, as a multiple of those between nodes."""
    nodes: Nodes | None = None
    """Places of the ring's ranks; ``None``: within a node."""


def attention_cost(case: PlanCase, window: int | None) -> AttentionCost:
    """Return the cost of a layer's attention.

    Args:
        case: the job and the choice.
        window: keys that a query sees; ``None``: all before it.
    """
    job, machine, nodes = case.job, case.job.timed, _ring_nodes(case)
    ring, ulysses = (
        machine.link(crosses=case.crosses_nodes(axis)) for axis in (Axis.RING, Axis.ULYSSES)
    )
    near = machine.node_link / ring
    if nodes is not None and case.choice.exchange == "all_gather":
        ring /= max(1.0, nodes.stride / nodes.cards)  # of neighbouring rings, one rank each sends
    if case.crosses_nodes(Axis.ULYSSES):
        ulysses *= machine.cards(case.devices_per_node) / case.devices_per_node
    rates = (machine.attention_forward, machine.attention_backward)
    links = (ring, ulysses, machine.latency, near, nodes)
    dims = (job.model.head_dim, job.model.value_dim)
    sizes = (case.heads, *dims, job.compute_itemsize, case.choice.exchange)
    return call_cost(AttentionCostInputs(case.layout, window, *sizes, rates, machine.tiles, *links))


def _ring_nodes(case: PlanCase) -> Nodes | None:
    """Return the places of a ring's ranks, if it goes beyond a node."""
    if not case.crosses_nodes(Axis.RING):
        return None
    mesh, devices = case.choice.mesh, case.devices_per_node
    stride = mesh.ulysses * mesh.tp
    ranks = stride * mesh.ring
    # Where rings do not fill nodes, one that begins late in a node goes beyond it.
    first = max(start % devices for start in range(0, mesh.devices, ranks))
    return Nodes(devices, case.job.machine.cards(devices), stride, first)


@lru_cache(maxsize=4096)
def call_cost(call: AttentionCostInputs) -> AttentionCost:
    """Return the cost of a call; cached, since meshes that differ elsewhere share it."""
    plan = _plan(call.layout, call.window)
    sizes = {
        "batch": 1,
        "head_dim": call.head_dim,
        "value_dim": call.value_dim,
        "itemsize": call.itemsize,
        "accumulate_itemsize": ACCUMULATE_ITEMSIZE,
        "exchange": call.exchange,
    }
    traffic = attention_traffic(plan, call.heads, 0, **sizes)
    # Rates are FlashAttention's, which pads the narrower of K and V (``Capabilities.one_width``).
    width = max(call.head_dim, call.value_dim)
    per_second = [
        rate / (flops * call.heads.local_heads * width)
        for rate, flops in zip(_rates(call, plan), (FORWARD_FLOPS, BACKWARD_FLOPS), strict=True)
    ]
    busiest = max(plan.work)
    return AttentionCost(
        plan.work,
        attention_memory(plan, call.heads, 0, **sizes, one_width=True),
        traffic,
        ForwardBackward(
            _ring_seconds(call, plan, traffic[0], per_second[0], backward=False),
            _ring_seconds(call, plan, traffic[1], per_second[1], backward=True),
        ),
        ForwardBackward(*(busiest / rate for rate in per_second)),
        ForwardBackward(
            *(_ulysses_seconds(one, call.ulysses_link, call.latency) for one in traffic)
        ),
    )


def _plan(layout: SequenceLayout, window: int | None) -> Schedule:
    return schedule(layout, None, Mask() if window is None else Mask(window=(window - 1, 0)))


def _rates(call: AttentionCostInputs, plan: Schedule) -> tuple[float, float]:
    return mean_tile_rates(plan, call.tiles) if call.tiles else call.rates


def _ring_seconds(
    call: AttentionCostInputs,
    plan: Schedule,
    sent: Traffic,
    pairs_per_second: float,
    *,
    backward: bool,
) -> float:
    """Return the seconds of compute and key exchange over the ring axis on the slowest rank."""
    if call.exchange == "all_gather" and call.layout.ring_size > 1:
        return _gather_seconds(call, plan, sent, pairs_per_second, backward=backward)
    kv_heads = max(map(call.heads.num_local_kv, range(call.heads.ulysses_size)))
    per_byte = kv_heads * (call.head_dim + call.value_dim) / call.ring_link * pairs_per_second
    model = CostModel(
        round(call.itemsize * per_byte),
        hop=0,  # launches are far ahead of a GPU
        latency=round(call.latency * pairs_per_second),
        gradient=round(ACCUMULATE_ITEMSIZE * per_byte),
        near=call.near,
        nodes=call.nodes,
        rotates=call.exchange == "rotation",
    )
    return _ring_cost(model, plan, backward) / pairs_per_second


@lru_cache(maxsize=1024)
def _ring_cost(model: CostModel, plan: Schedule, backward: bool) -> int:
    return model.cost(plan, backward=backward)


def _gather_seconds(
    call: AttentionCostInputs,
    plan: Schedule,
    sent: Traffic,
    pairs_per_second: float,
    *,
    backward: bool,
) -> float:
    """Return the seconds of a pass that gathers all keys, a block of heads at a time."""
    blocks, ones = sent.all_gather_calls, np.ones((len(plan.work), sent.all_gather_calls))
    computes = np.array(plan.work)[:, None] * ones / (blocks * pairs_per_second)

    def messages(nbytes: int) -> Messages:
        return Messages(ones * (nbytes / blocks / call.ring_link + call.latency))

    loads = {KEYS: messages(sent.all_gather_bytes), GRADIENTS: messages(sent.reduce_scatter_bytes)}
    return float(elapsed(gather_order(blocks, backward=backward), computes, loads).max())


def _ulysses_seconds(sent: Traffic, link: float, latency: float) -> float:
    """Return the seconds of the Ulysses exchanges: a rank computes nothing between their posts and waits."""
    return sent.all_to_all_bytes / link + sent.all_to_all_calls * latency
