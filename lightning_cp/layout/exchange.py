"""The exchange of keys over the ring axis (``Exchange``), and the schedules of a rotation and an all-gather.

Gathered keys lie in rank order (all of ring rank 0, then all of rank 1, ...). In *sequence order* (global
positions) the keys that a chunk of queries sees lie between two positions, so that one kernel call with one
slice serves it: a causal tile then extends from the first key of a document to the query itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import numpy as np

from lightning_cp.errors import ConfigError
from lightning_cp.layout.sequence import SequenceLayout
from lightning_cp.layout.tile_arrays import (
    TileArrays,
    concat_tiles,
    cut_segments,
    pair_pieces,
    trim_to_visible,
)
from lightning_cp.layout.tiles import (
    ALL_ROWS,
    Hop,
    Ranges,
    Schedule,
    Tile,
    coalesce,
    tiles_by_source,
)

Execution = Literal["two_kernel", "fused"]
EXECUTIONS: tuple[str, ...] = get_args(Execution)


@lru_cache(maxsize=256)
def ring_hops(plan: Schedule, ring_rank: int, exchange: str) -> tuple[Hop, ...]:
    """Return the hops of a rank; in a ``rotation`` all keys go around, from each rank to the next one."""
    own, *hops = plan.rank(ring_rank).hops
    if exchange != "rotation":
        return own, *hops
    size, whole = plan.layout.ring_size, ((0, plan.layout.ring_len),)
    neighbours = {"source": (ring_rank - 1) % size, "dest": (ring_rank + 1) % size}
    return own, *(replace(hop, **neighbours, recv=whole, send=whole) for hop in hops)


class GatheredCall(NamedTuple):
    """One kernel call: concatenated slices of all keys in sequence order, and their tiles."""

    slices: Ranges
    tiles: tuple[Tile, ...]
    """``k_start`` counts within the concatenated slices."""


@dataclass(frozen=True)
class GatheredSchedule:
    """The work of one ring rank once it holds every key.

    Args:
        rank_order: ranges of the rank order whose concatenation is the sequence order.
        two_kernel: one call per chunk of queries, with the keys that it needs.
        fused: one call for all chunks, with concatenated slices: keys that several chunks see are repeated.
    """

    rank_order: Ranges
    two_kernel: tuple[GatheredCall, ...]
    fused: tuple[GatheredCall, ...]

    def calls(self, execution: str) -> tuple[GatheredCall, ...]:
        """Return the kernel calls of an execution."""
        return self.fused if execution == "fused" else self.two_kernel


@lru_cache(maxsize=256)
def gathered_schedule(plan: Schedule, ring_rank: int) -> GatheredSchedule:
    """Return the calls of one ring rank; cached, since layers and steps share them."""
    columns = _columns(plan, ring_rank)
    ends = np.cumsum(plan.layout.segments(ring_rank)[:, 1])
    segment = np.searchsorted(ends, columns.q_start, "right")
    joins = plan.mask.joins_segments
    of_segments = (columns.select(segment == index) for index in range(ends.size))
    calls = tuple(_call(coalesce(found, joins)) for found in of_segments if found.size)
    return GatheredSchedule(_rank_order(plan.layout), calls, _fuse(calls))


def _columns(plan: Schedule, ring_rank: int) -> TileArrays:
    """Make the tiles of one rank's queries and of all keys, as if a single rank held these."""
    mask, whole = plan.mask, SequenceLayout(plan.layout.seq_len)
    parts: list[TileArrays] = []
    for index, (queries, intervals) in enumerate(zip(plan.pieces, plan.rows, strict=True)):
        keys = cut_segments(whole, intervals)
        pairs = pair_pieces(queries.of_rank(ring_rank), keys, mask.left, mask.right)
        row = ALL_ROWS if plan.documents.shared else index
        parts.append(trim_to_visible(pairs, row, mask.left, mask.right))
    return concat_tiles(parts)


def _call(columns: TileArrays) -> GatheredCall:
    start = int(columns.k_start.min())
    end = int((columns.k_start + columns.k_len).max())
    (tiles,) = tiles_by_source(columns.with_columns(k_start=columns.k_start - start), 1)
    return GatheredCall(((start, end),), tiles)


def _fuse(calls: tuple[GatheredCall, ...]) -> tuple[GatheredCall, ...]:
    if len(calls) < 2:
        return calls
    slices = tuple(call.slices[0] for call in calls)
    lengths = [end - start for start, end in slices]
    shifts = [sum(lengths[:index]) for index in range(len(lengths))]
    tiles = (
        tile._replace(k_start=tile.k_start + shift)
        for call, shift in zip(calls, shifts, strict=True)
        for tile in call.tiles
    )
    return (GatheredCall(slices, tuple(tiles)),)


def _rank_order(layout: SequenceLayout) -> Ranges:
    segments = [layout.segments(rank) for rank in range(layout.ring_size)]
    starts = np.concatenate([table[:, 0] for table in segments])
    lengths = np.concatenate([table[:, 1] for table in segments])
    places = np.cumsum(lengths) - lengths  # in rank order, since ranks have equally many tokens
    order = np.argsort(starts)
    places, lengths = places[order], lengths[order]
    first = np.flatnonzero(np.concatenate([[True], places[1:] != (places + lengths)[:-1]]))
    total = np.add.reduceat(lengths, first)
    return tuple(zip(places[first].tolist(), (places[first] + total).tolist(), strict=True))


KEY_GRADIENTS = ("accumulate", "compute")
EXCHANGES = ("ring", "rotation", "all_gather", "ring_flash_attn")

_USE_ALL_GATHER = (
    "Use exchange='all_gather' (mode='zigzag_llama3' of the strategies), or leave the setting out."
)


@dataclass(frozen=True)
class Exchange:
    """The exchange of keys over the ring axis, and the execution of attention to gathered keys.

    Args:
        name: ``ring`` sends needed keys from their owner, hop by hop; ``rotation`` sends all keys on from
            each rank to the next one; ``all_gather`` gathers them once; ``ring_flash_attn`` delegates the
            ring to the package of that name.
        forward: of ``all_gather``: ``two_kernel`` (one kernel call per chunk of queries, least memory) or
            ``fused`` (one call, with copies of the keys that several chunks see).
        backward: likewise.
        kv_heads_per_gather: of ``all_gather``: K/V heads gathered at a time, which bounds its memory;
            ``None`` gathers all heads at once.
        key_gradients: of ``ring``: dtype in which gradients of keys travel, ``accumulate`` (that of their
            sums) or ``compute`` (that of the inputs, with half the bytes; each hop's part is rounded).

    Raises:
        ConfigError: an unknown value, or one that the exchange does not use.
    """

    name: str = "ring"
    forward: str = "two_kernel"
    backward: str = "two_kernel"
    kv_heads_per_gather: int | None = 1
    key_gradients: str = "accumulate"

    def __post_init__(self) -> None:
        _check("exchange", self.name, EXCHANGES)
        _check("forward_execution", self.forward, EXECUTIONS)
        _check("backward_execution", self.backward, EXECUTIONS)
        _check("key_gradients", self.key_gradients, KEY_GRADIENTS)
        heads = self.kv_heads_per_gather
        if heads is not None and (type(heads) is not int or heads < 1):
            raise ConfigError(
                f"kv_heads_per_gather must be an integer of at least 1, or None for all heads at once, "
                f"got {heads!r}. "
                "1 takes the least memory."
            )
        self._check_unused_options()

    def _check_unused_options(self) -> None:
        if self.key_gradients != "accumulate" and self.name != "ring":
            raise ConfigError(
                f"key_gradients={self.key_gradients!r} says how gradients travel from hop to hop of "
                f"exchange='ring', and exchange={self.name!r} sends none or sums of them. Leave one of the "
                "two settings out."
            )
        if self.name == "all_gather":
            return
        for name in ("forward", "backward"):
            if getattr(self, name) != "two_kernel":
                raise ConfigError(
                    f"{name}_execution={getattr(self, name)!r} says how gathered keys are attended to, but "
                    f"exchange={self.name!r} gathers none. {_USE_ALL_GATHER}"
                )
        if self.kv_heads_per_gather != 1:
            raise ConfigError(
                f"kv_heads_per_gather={self.kv_heads_per_gather} says how many K/V heads are gathered at a "
                f"time, but exchange={self.name!r} gathers none. {_USE_ALL_GATHER}"
            )


def _check(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(
            f"{name} must be one of {', '.join(allowed)}, got {value!r}. Choose one of these names."
        )
