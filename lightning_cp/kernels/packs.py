"""Which tiles of a hop go into one varlen launch, and where their tokens lie.

A launch has one mask: tiles of one ``FlashMask`` go together. Within a launch no query and no key
occurs twice, so that results are merged, and gradients added, by plain reads and writes: no atomic
additions, the same bits every time.

A launch per tile leaves a GPU idle where tiles are small: it takes longer to ask for one than to
compute it. Long tiles fill the GPU by themselves, are not worth copying, and would stretch the
launch's grid for the short ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from lightning_cp.kernels.devices import to_device
from lightning_cp.kernels.flash_window import (
    UNBOUNDED_WINDOW,
    bottom_right_window,
    representable,
)
from lightning_cp.kernels.same import Same
from lightning_cp.layout.tiles import ALL_ROWS, Mask, Tile

Span = tuple[int, int, int]
"""(batch row, first token, tokens)."""


class PackRule(NamedTuple):
    """When tiles are packed: at least ``fewest`` of at most ``longest`` queries and keys each."""

    fewest: int = 4
    longest: int = 4096


DEFAULT_RULE = PackRule()


class FlashMask(NamedTuple):
    """A tile's mask as FlashAttention takes it, aligned at the bottom right; a window is a band's."""

    causal: bool
    left: int
    right: int


@dataclass(frozen=True, eq=False)
class Pack:
    """Tiles for one launch: their queries and keys, each laid end to end, and their mask."""

    mask: FlashMask
    q: Spans
    k: Spans


class Spans:
    """Disjoint ranges of tokens of ``[B, L, ...]`` tensors, laid end to end as ``[T, ...]``."""

    def __init__(self, spans: Sequence[Span]) -> None:
        rows, starts, lengths = zip(*spans, strict=True)
        self._ends = [0, *accumulate(lengths)]
        self._table = [rows, [start - at for start, at in zip(starts, self._ends, strict=False)]]
        self._lengths = lengths
        self._tensors: dict[torch.device, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self.total: int = self._ends[-1]
        self.longest: int = max(lengths)
        follows = all(
            row == next_row and start + length == next_start
            for (row, start, length), (next_row, next_start, _) in pairwise(spans)
        )
        self.run: tuple[int, int] | None = (rows[0], starts[0]) if follows else None
        """(row, first token) if the spans are consecutive tokens of one row: nothing is copied."""

    def cu_seqlens(self, device: torch.device) -> torch.Tensor:
        """int32 [spans + 1]: where each span begins and ends."""
        return self._on(device)[0]

    def index(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [T] row, and token within it, of each token; made anew, it is as long as they."""
        _, table, lengths = self._on(device)
        span = torch.repeat_interleave(lengths, output_size=self.total)
        rows, shifts = table.index_select(1, span)
        return rows, shifts + torch.arange(self.total, device=device)

    def take(self, x_BL: torch.Tensor) -> torch.Tensor:
        """The tokens of ``x`` [B, L, ...] as [T, ...]: a view if they are a run, else a copy."""
        if self.run is not None:
            row, start = self.run
            return x_BL[row, start : start + self.total]
        return x_BL[self.index(x_BL.device)]

    def add(self, x_BL: torch.Tensor, part_T: torch.Tensor) -> None:
        """Add ``part`` [T, ...] to the tokens of ``x`` [B, L, ...], in place."""
        if self.run is not None:
            self.take(x_BL).add_(part_T)
            return
        index = self.index(x_BL.device)
        x_BL[index] = x_BL[index] + part_T  # no token occurs twice

    def _on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if device not in self._tensors:
            self._tensors[device] = (
                to_device(torch.tensor(self._ends, dtype=torch.int32), device),
                to_device(torch.tensor(self._table, dtype=torch.int64), device),
                to_device(torch.tensor(self._lengths, dtype=torch.int64), device),
            )
        return self._tensors[device]


def flash_mask(tile: Tile, mask: Mask) -> FlashMask:
    """The mask of one tile in FlashAttention's terms."""
    left, right = bottom_right_window(tile, mask)
    unbounded = UNBOUNDED_WINDOW
    return FlashMask(
        tile.mask == "causal",
        unbounded if left is None else left,
        unbounded if right is None else right,
    )


def in_flash_terms(tiles: Iterable[Tile], mask: Mask) -> Iterator[Tile]:
    """The tiles, but for empty ones; those whose window cannot be expressed are cut."""
    for tile in tiles:
        if tile.q_len and tile.k_len:
            yield from representable(tile, mask)


def pack_tiles(
    tiles: Sequence[Tile], mask: Mask, batch: int, rule: PackRule
) -> tuple[tuple[Tile, ...], tuple[Pack, ...]]:
    """The tiles to call one by one, and the packs of the others; cached for the same tuple.

    Args:
        tiles: of one hop.
        mask: what their bands mean.
        batch: rows that a tile of all rows stands for.
        rule: which tiles are packed.
    """
    return _packs(Same(tiles), mask, batch, rule)


@lru_cache(maxsize=256)
def _packs(
    same: Same, mask: Mask, batch: int, rule: PackRule
) -> tuple[tuple[Tile, ...], tuple[Pack, ...]]:
    alone: list[Tile] = []
    groups: dict[tuple[FlashMask, bool], list[Tile]] = defaultdict(list)
    for tile in in_flash_terms(same.tiles, mask):
        if max(tile.q_len, tile.k_len) > rule.longest:
            alone.append(tile)
        else:
            groups[flash_mask(tile, mask), tile.row == ALL_ROWS].append(tile)
    packs: list[Pack] = []
    for (flash, _), group in groups.items():
        for chosen in _disjoint(group):
            if len(chosen) < rule.fewest:
                alone += chosen
            else:
                packs.append(_pack(flash, chosen, batch))
    return tuple(alone), tuple(packs)


def _disjoint(tiles: Iterable[Tile]) -> list[list[Tile]]:
    """The tiles in groups within which no two share a query or a key."""
    return [
        sorted(group, key=_queries)
        for by_queries in _apart((_queries(tile), tile) for tile in tiles)
        for group in _apart((_keys(tile), tile) for tile in by_queries)
    ]


def _apart(spans: Iterable[tuple[Span, Tile]]) -> list[list[Tile]]:
    """Groups of disjoint spans, as few as can be: each goes where the last one ends before it."""
    ends: list[tuple[int, int]] = []
    groups: list[list[Tile]] = []
    for (row, start, length), tile in sorted(spans):
        at = next((i for i, end in enumerate(ends) if end <= (row, start)), len(ends))
        if at == len(ends):
            ends.append((row, start))
            groups.append([])
        ends[at] = (row, start + length)
        groups[at].append(tile)
    return groups


def _pack(flash: FlashMask, tiles: Sequence[Tile], batch: int) -> Pack:
    rows = range(batch) if tiles[0].row == ALL_ROWS else [None]
    each = [tile if row is None else tile._replace(row=row) for row in rows for tile in tiles]
    return Pack(flash, Spans([_queries(t) for t in each]), Spans([_keys(t) for t in each]))


def _queries(tile: Tile) -> Span:
    return tile.row, tile.q_start, tile.q_len


def _keys(tile: Tile) -> Span:
    return tile.row, tile.k_start, tile.k_len
