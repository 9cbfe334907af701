"""Base of kernels around FlashAttention's operators: one dense call per long tile, packs of short ones.

An operator takes dense tensors [B, L, H, D], or packed ones [T, H, D] with the start of each sequence
(``cu_seqlens``); its masks are aligned at the bottom right. A launch has one mask, so tiles of one
``FlashMask`` are packed together. Within a launch each query and each key occurs once, so that results are
merged, and gradients added, by plain reads and writes: no atomic additions, the same bits every time.

A launch per tile leaves a GPU idle where tiles are small: the launch takes longer than its compute. Long
tiles fill the GPU alone, are not worth copying, and would enlarge the launch's grid for the short ones.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from typing_extensions import override

from lightning_cp.kernels.devices import IdentityKey, to_device
from lightning_cp.kernels.merge import Accumulator, GradientSums
from lightning_cp.kernels.per_tile import (
    Gradients,
    PerTileKernel,
    is_causal,
    pad_to_widest,
    replace_infinities,
    trim_gradients,
    trim_width,
    with_unit_strides,
)
from lightning_cp.kernels.protocol import QKV, Output, Scores
from lightning_cp.layout.mask import Mask
from lightning_cp.layout.tiles import ALL_ROWS, Tile

# Band tiles as FlashAttention's windows. The operator aligns windows at the bottom right: query i sees key j
# iff ``-left <= j - i - (k_len - q_len) <= right``; in a tile iff ``-mask.left <= j - i - delta <=
# mask.right``. So each side shifts by the difference of the two origins. The operator also treats a window of
# at least ``k_len`` as unbounded, and an unbounded side next to a bounded one as ``k_len``; both are only
# correct while ``q_len <= k_len``, so a taller band tile is cut.

UNBOUNDED_WINDOW = -1
"""The operator's value for an unbounded side."""


def bottom_right_window(tile: Tile, mask: Mask) -> tuple[int | None, int | None]:
    """Return ``window_size_left, window_size_right`` of a tile; ``None`` unless it is a band."""
    if tile.mask != "band":
        return None, None
    shift = tile.k_len - tile.q_len - tile.delta
    left, right = mask.left + shift, mask.right - shift
    # A negative window would be read as unbounded. The schedule trims each tile to the queries and
    # keys that see each other, so that its last query sees a key, and its last key is seen.
    assert left >= 0, f"{tile}: its last query sees none of its keys"
    assert right >= 0, f"{tile}: its last key is seen by none of its queries"
    return _clip(left, tile.k_len), _clip(right, tile.k_len)


def split_band(tile: Tile, mask: Mask) -> list[Tile]:
    """Return the tile, or at most three parts of it that the operator's window can express.

    Every query sees a key. So the queries that do not see the last key are fewer than the keys, and so
    are those that do not see the first: cut at both places, each band has at least as many keys as queries.
    """
    if tile.mask != "band" or tile.q_len <= tile.k_len:
        return [tile]
    low, high = tile.delta - mask.left, tile.delta + mask.right
    sees_last = min(max(tile.k_len - 1 - high, 0), tile.q_len)  # first query that sees the last key
    loses_first = min(max(1 - low, 0), tile.q_len)  # first query that no longer sees the first key
    cuts = sorted({0, sees_last, loses_first, tile.q_len})
    return [_cut_queries(tile, first, end, low, high) for first, end in pairwise(cuts)]


def _cut_queries(tile: Tile, first: int, end: int, low: int, high: int) -> Tile:
    """Cut queries ``first .. end`` of a tile whose query i sees the keys ``i + low .. i + high``."""
    k_first = max(0, first + low)
    k_end = min(tile.k_len, end + high)
    full = end - 1 + low <= k_first and k_end - 1 <= first + high
    return tile._replace(
        q_start=tile.q_start + first,
        q_len=end - first,
        k_start=tile.k_start + k_first,
        k_len=k_end - k_first,
        delta=tile.delta + first - k_first,
        mask="full" if full else "band",
    )


def _clip(window: int, k_len: int) -> int:
    return window if window < k_len else UNBOUNDED_WINDOW


Span = tuple[int, int, int]
"""(batch row, first token, tokens)."""


class PackRule(NamedTuple):
    """Limits of a pack: at least ``fewest`` tiles of at most ``longest`` queries and keys each."""

    fewest: int = 4
    longest: int = 4096


DEFAULT_RULE = PackRule()


class FlashMask(NamedTuple):
    """A tile's mask in FlashAttention's terms, aligned at the bottom right; only bands have a window."""

    causal: bool
    left: int
    right: int


@dataclass(frozen=True, eq=False)
class Pack:
    """Tiles for one launch: their concatenated queries and keys, and their mask."""

    mask: FlashMask
    q: Spans
    k: Spans


class Spans:
    """Disjoint ranges of tokens of ``[B, L, ...]`` tensors, concatenated to ``[T, ...]``."""

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
        """(row, first token) if the spans are consecutive tokens of one row, which need no copy."""

    def cu_seqlens(self, device: torch.device) -> torch.Tensor:
        """Return int32 [spans + 1]: the boundaries of the spans."""
        return self._on(device)[0]

    def index(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Make int64 [T] row, and index within it, of each token; not cached, being as long as they are."""
        _, table, lengths = self._on(device)
        span = torch.repeat_interleave(lengths, output_size=self.total)
        rows, shifts = table.index_select(1, span)
        return rows, shifts + torch.arange(self.total, device=device)

    def take(self, x_BL: torch.Tensor) -> torch.Tensor:
        """Return the tokens of ``x`` [B, L, ...] as [T, ...]: a view if they are a run, else a copy."""
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
    """Return the mask of one tile in FlashAttention's terms."""
    left, right = bottom_right_window(tile, mask)
    unbounded = UNBOUNDED_WINDOW
    return FlashMask(
        tile.mask == "causal",
        unbounded if left is None else left,
        unbounded if right is None else right,
    )


def expressible_tiles(tiles: Iterable[Tile], mask: Mask) -> Iterator[Tile]:
    """Yield the tiles without empty ones; cut those whose window cannot be expressed."""
    for tile in tiles:
        if tile.q_len and tile.k_len:
            yield from split_band(tile, mask)


def pack_tiles(
    tiles: Sequence[Tile], mask: Mask, batch: int, rule: PackRule
) -> tuple[tuple[Tile, ...], tuple[Pack, ...]]:
    """Return the tiles for single calls, and the packs of the others; cached for the same tuple.

    Args:
        tiles: of one hop.
        mask: the mask of their bands.
        batch: rows that a tile of all rows stands for.
        rule: limits of a pack.
    """
    return _cached_packs(IdentityKey(tiles), mask, batch, rule)


@lru_cache(maxsize=256)
def _cached_packs(
    key: IdentityKey, mask: Mask, batch: int, rule: PackRule
) -> tuple[tuple[Tile, ...], tuple[Pack, ...]]:
    single: list[Tile] = []
    groups: dict[tuple[FlashMask, bool], list[Tile]] = defaultdict(list)
    for tile in expressible_tiles(key.tiles, mask):
        if max(tile.q_len, tile.k_len) > rule.longest:
            single.append(tile)
        else:
            groups[flash_mask(tile, mask), tile.row == ALL_ROWS].append(tile)
    packs: list[Pack] = []
    for (flash, _), group in groups.items():
        for chosen in _disjoint(group):
            if len(chosen) < rule.fewest:
                single += chosen
            else:
                packs.append(_pack(flash, chosen, batch))
    return tuple(single), tuple(packs)


def _disjoint(tiles: Iterable[Tile]) -> list[list[Tile]]:
    """Group tiles so that no two of a group share a query or a key."""
    return [
        sorted(group, key=_queries)
        for by_queries in _group_disjoint((_queries(tile), tile) for tile in tiles)
        for group in _group_disjoint((_keys(tile), tile) for tile in by_queries)
    ]


def _group_disjoint(spans: Iterable[tuple[Span, Tile]]) -> list[list[Tile]]:
    """Make the fewest groups of disjoint spans: each joins a group whose last span ends before it."""
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


@dataclass(frozen=True, eq=False)
class FlashCall:
    """One call of the operator: mask, longest sequences and, if packed, starts of sequences.

    A sequence is a packed document, or a row of a batch.
    """

    mask: FlashMask
    max_q: int
    max_k: int
    cu_seqlens: tuple[torch.Tensor, torch.Tensor] | None = None
    """int32 [sequences + 1] of the queries and of the keys; ``None``: dense."""


class VarlenKernel(PerTileKernel):
    """A kernel around an operator of FlashAttention; subclasses adapt the operator."""

    def __init__(self, rule: PackRule = DEFAULT_RULE) -> None:
        self._rule = rule

    @abstractmethod
    def run_forward(
        self, inputs: QKV, call: FlashCall, scores: Scores
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``out`` like q and ``lse`` [B, H, i], or [H, T] packed; infinite without keys.

        q, k and v have one head dim.
        """

    @abstractmethod
    def run_backward(
        self, merged: Output, inputs: QKV, call: FlashCall, scores: Scores
    ) -> Gradients:
        """Return the gradients; ``merged.lse`` is contiguous, as operators require.

        All tensors have one head dim.
        """

    @override
    def calls(self, tiles: Sequence[Tile], mask: Mask) -> Iterable[Tile]:
        """Yield tiles whose window the operator can express."""
        return expressible_tiles(tiles, mask)

    @override
    def attend(self, inputs: QKV, tile: Tile, scores: Scores) -> tuple[torch.Tensor, torch.Tensor]:
        """Make one dense call, on slices with any strides but the last."""
        return self._forward(inputs, _dense_call(tile, scores.mask), scores)

    @override
    def differentiate(self, merged: Output, inputs: QKV, tile: Tile, scores: Scores) -> Gradients:
        """Make one dense call; operators ignore the strides of ``lse``, so it is copied."""
        merged = merged._replace(lse=merged.lse.contiguous())
        return self._backward(merged, inputs, _dense_call(tile, scores.mask), scores)

    def _forward(
        self, inputs: QKV, call: FlashCall, scores: Scores
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Make one call with tensors of any head dims; lse is -inf without keys."""
        out, lse = self.run_forward(QKV(*pad_to_widest(*inputs)), call, scores)
        return trim_width(out, inputs.v.shape[-1]), replace_infinities(lse, -torch.inf)

    def _backward(self, merged: Output, inputs: QKV, call: FlashCall, scores: Scores) -> Gradients:
        """Make one call with tensors of any head dims."""
        dout, out, *wide = pad_to_widest(merged.dout, merged.out, *inputs)
        merged = merged._replace(dout=dout, out=out)
        return trim_gradients(self.run_backward(merged, QKV(*wide), call, scores), inputs)

    @override
    def forward(
        self, inputs: QKV, tiles: Sequence[Tile], scores: Scores, state: Accumulator
    ) -> None:
        """Attend within each tile and merge the results into ``state``."""
        device = inputs.q.device
        single, packs = self._pack(tiles, scores.mask, inputs.q.shape[0])
        super().forward(inputs, single, scores, state)
        inputs = QKV(*with_unit_strides(*inputs))
        for pack in packs:
            call = _packed_call(pack, device)
            out_THD, lse_HT = self._forward(_gather_inputs(pack, inputs), call, scores)
            if pack.q.run is None:
                state.add_at(*pack.q.index(device), out_THD, lse_HT)
            else:
                state.add(*pack.q.run, out_THD.unsqueeze(0), lse_HT.unsqueeze(0))

    @override
    def backward(
        self,
        merged: Output,
        inputs: QKV,
        tiles: Sequence[Tile],
        scores: Scores,
        gradients: GradientSums,
    ) -> None:
        """Add each tile's share to ``gradients``."""
        single, packs = self._pack(tiles, scores.mask, inputs.q.shape[0])
        if single:
            super().backward(merged, inputs, single, scores, gradients)
        inputs, results = (
            QKV(*with_unit_strides(*inputs)),
            with_unit_strides(merged.dout, merged.out),
        )
        for pack in packs:
            dout_THD, out_THD = (pack.q.take(x) for x in results)
            lse_HT = replace_infinities(pack.q.take(merged.lse.transpose(1, 2)).T, torch.inf)
            known = Output(dout_THD, out_THD, lse_HT.contiguous())
            call = _packed_call(pack, inputs.q.device)
            parts = self._backward(known, _gather_inputs(pack, inputs), call, scores)
            for spans, gradient, part in zip(
                (pack.q, pack.k, pack.k), gradients, parts, strict=True
            ):
                spans.add(gradient.total, part)

    def _pack(
        self, tiles: Sequence[Tile], mask: Mask, batch: int
    ) -> tuple[Sequence[Tile], Sequence[Pack]]:
        """Return the tiles for single calls, and packs of the others; no packs for few tiles."""
        if len(tiles) < self._rule.fewest:
            return tiles, ()
        return pack_tiles(tiles, mask, batch, self._rule)


def _dense_call(tile: Tile, mask: Mask) -> FlashCall:
    is_causal(tile)  # asserts that the diagonal ends at the bottom right
    return FlashCall(flash_mask(tile, mask), tile.q_len, tile.k_len)


def _packed_call(pack: Pack, device: torch.device) -> FlashCall:
    cu_seqlens = pack.q.cu_seqlens(device), pack.k.cu_seqlens(device)
    return FlashCall(pack.mask, pack.q.longest, pack.k.longest, cu_seqlens)


def _gather_inputs(pack: Pack, inputs: QKV) -> QKV:
    return QKV(pack.q.take(inputs.q), pack.k.take(inputs.k), pack.k.take(inputs.v))
