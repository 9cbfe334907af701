"""Host code of FlashAttention-2 in Triton: a hop's tiles in one launch forward, in two backward.

Triton is imported at the first launch, with the device code. Integer tables describe all tiles of a hop to a
launch. A program owns one block of queries (or, for dk and dv, of keys) and passes over all the tiles that
touch it, so that each result is written once, by one program. Blocks are cut where a tile starts or ends:
then all tokens of a block are within the same tiles.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from lightning_cp.kernels.devices import IdentityKey, pre_ampere_obstacle, to_device
from lightning_cp.kernels.merge import Accumulator, GradientSum, GradientSums
from lightning_cp.kernels.per_tile import with_unit_strides
from lightning_cp.kernels.protocol import QKV, Capabilities, Output, Request, Scores
from lightning_cp.kernels.triton.blocks import BlockConfig, BlockConfigs, block_configs
from lightning_cp.layout.mask import UNBOUNDED, Mask
from lightning_cp.layout.tiles import ALL_ROWS, Tile

Ints = npt.NDArray[np.int64]

FAR = 1 << 30
"""An unbounded reach: beyond any local length; sums with a length still fit int32."""


@dataclass(frozen=True)
class Table:
    """A tile list for one launch; tensors are int32 on the device.

    Attributes:
        tiles: [tiles, 7]: first query and end, first key and end, then ``low, high, shift`` in
            local indices: query i sees key j iff ``low <= j - i <= high``, at the global distance
            ``|i - j + shift|``.
        blocks: [blocks, 5]: batch row (``ALL_ROWS``: each), first token, end, first and end index
            into ``refs``.
        refs: indices of the tiles of each block; blocks cut from the same tokens share theirs.
        span: first token and end of all blocks.
        is_gapless: every token of the span is in a block, in every row.
        is_per_row: blocks name their batch row; otherwise each is for every row.
    """

    tiles: torch.Tensor
    blocks: torch.Tensor
    refs: torch.Tensor
    span: tuple[int, int]
    is_gapless: bool
    is_per_row: bool


def make_table(
    tiles: Sequence[Tile],
    mask: Mask,
    batch: int,
    over: Literal["queries", "keys"],
    size: int,
    device: torch.device,
) -> Table | None:
    """Return the table of a tile list, cached; ``None`` if all tiles are empty.

    Args:
        tiles: the tiles of a hop.
        mask: the mask of ``band`` tiles.
        batch: batch rows.
        over: the side whose blocks programs own.
        size: most tokens of a block.
        device: of the kernel.
    """
    return _cached_table(IdentityKey(tiles), mask, batch, over, size, device)


@lru_cache(maxsize=1024)
def _cached_table(
    key: IdentityKey, mask: Mask, batch: int, over: str, size: int, device: torch.device
) -> Table | None:
    nonempty = [tile for tile in key.tiles if tile.q_len and tile.k_len]
    if not nonempty:
        return None
    is_per_row = any(tile.row != ALL_ROWS for tile in nonempty)
    if is_per_row:
        nonempty = list(_spread_rows(nonempty, batch))
    row, q_start, q_len, k_start, k_len, delta = np.array(
        [tile[:6] for tile in nonempty], dtype=np.int64
    ).T
    shift = delta + k_start - q_start
    low, high = (np.clip(x + shift, -FAR, FAR) for x in _reach(nonempty, mask))
    columns = (q_start, q_start + q_len, k_start, k_start + k_len, low, high, shift)
    start, length = (q_start, q_len) if over == "queries" else (k_start, k_len)
    blocks, refs = _cut_blocks(row, start, length, size)
    first, end = int(start.min()), int((start + length).max())
    every = (end - first) * (batch if is_per_row else 1)
    covered = int((blocks[:, 2] - blocks[:, 1]).sum())
    return Table(
        _to_device(np.column_stack(columns), device),
        _to_device(blocks, device),
        _to_device(refs, device),
        span=(first, end),
        is_gapless=covered == every,
        is_per_row=is_per_row,
    )


def _spread_rows(tiles: Sequence[Tile], batch: int) -> Iterator[Tile]:
    """Repeat tiles of all rows for each row: next to tiles of single rows they share owners."""
    for tile in tiles:
        rows = range(batch) if tile.row == ALL_ROWS else [tile.row]
        yield from (tile._replace(row=row) for row in rows)


def _reach(tiles: Sequence[Tile], mask: Mask) -> tuple[Ints, Ints]:
    """Return the lowest and highest key, relative to its own position, that each tile's queries see."""
    bounds = {
        "full": (-UNBOUNDED, UNBOUNDED),
        "causal": (-UNBOUNDED, 0),
        "band": (-mask.left, mask.right),
    }
    low, high = np.array([bounds[tile.mask] for tile in tiles], dtype=np.int64).T
    return low, high


def _cut_blocks(row: Ints, start: Ints, length: Ints, size: int) -> tuple[Ints, Ints]:
    """Cut one side of the tiles into blocks [n, 5] of at most ``size`` tokens; also return their tiles."""
    # All rows at once, on one line: each gets a stretch longer than its tiles reach.
    stretch = int((start + length).max()) + 1
    begin = start + (row - ALL_ROWS) * stretch
    end = begin + length
    edges = np.unique(np.concatenate([begin, end]))
    refs, part, first_ref, num_refs = _tiles_of_parts(
        np.searchsorted(edges, begin), np.searchsorted(edges, end)
    )
    pieces, owner = _pieces(edges[part], edges[part + 1], size)
    line = pieces[:, :1] // stretch
    end_ref = first_ref + num_refs
    blocks = np.column_stack(
        [line + ALL_ROWS, pieces - line * stretch, first_ref[owner], end_ref[owner]]
    )
    return blocks, refs


def _tiles_of_parts(first: Ints, last: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Find the tiles that cover each part between two edges; tile t covers ``first[t] .. last[t]``.

    Returns:
        The tiles, part by part; the parts that have any; the start and the count of each part's tiles.
    """
    tile, offset = _count_up(last - first)
    part = first[tile] + offset
    order = np.argsort(part, kind="stable")
    return tile[order], *np.unique(part[order], return_index=True, return_counts=True)


def _pieces(begin: Ints, end: Ints, size: int) -> tuple[Ints, Ints]:
    """Cut intervals into pieces [n, 2] of at most ``size``; also return the interval of each piece."""
    owner, index = _count_up(-(-(end - begin) // size))
    start = begin[owner] + index * size
    return np.stack([start, np.minimum(start + size, end[owner])], axis=1), owner


def _count_up(counts: Ints) -> tuple[Ints, Ints]:
    """Return ``(0, 0), (0, 1) .. (0, counts[0] - 1), (1, 0) ..`` as two columns."""
    which = np.repeat(np.arange(counts.size), counts)
    return which, np.arange(which.size) - np.repeat(np.cumsum(counts) - counts, counts)


def _to_device(x: Ints, device: torch.device) -> torch.Tensor:
    return to_device(torch.from_numpy(x.astype(np.int32)), device)


# Arguments of a launch: tensors with their strides, tables, constants.


@contextmanager
def result_memory(
    sums: Sequence[GradientSum], tiled: Table
) -> Iterator[tuple[bool, Sequence[torch.Tensor]]]:
    """Yield memory of unit stride for a launch's gradients, and True if the launch adds to what it holds.

    Sums that are empty are written instead, if the launch reaches all tokens of its span.
    """
    adds = not (tiled.is_gapless and all(one.is_empty for one in sums))
    totals = [one.total if adds else one.begin(ALL_ROWS, *tiled.span) for one in sums]
    parts = [x if x.stride(-1) == 1 else x.new_zeros(x.shape) for x in totals]
    yield adds, parts
    for total, part in zip(totals, parts, strict=True):
        if part is not total:
            total.copy_(total + part if adds else part)


class StridedTensor(NamedTuple):
    """A tensor and its strides for device code: ``x.at``, ``x.batch``, ...; D has stride 1."""

    at: torch.Tensor
    batch: int
    token: int
    head: int


def by_head(x: torch.Tensor) -> StridedTensor:
    """Make it for [B, L, H, D] with unit stride along D, or for [B, L, H]."""
    # Within a block of at most 128 tokens device code counts in 32 bits.
    assert x.stride(1) < 1 << 24, f"tokens {x.stride(1)} entries apart"
    return StridedTensor(x, x.stride(0), x.stride(1), x.stride(2))


def grid(tiled: Table, heads: int, batch: int) -> tuple[int, int, int]:
    """Return the programs: blocks, heads, and batch rows unless blocks name their row."""
    return tiled.blocks.shape[0], heads, 1 if tiled.is_per_row else batch


def launch_tables(tiled: Table, scores: Scores) -> tuple[Any, ...]:
    """Return slopes and tables."""
    return by_row(scores.alibi_slopes), tiled.tiles, tiled.blocks, tiled.refs


def by_row(slopes: torch.Tensor | None) -> StridedTensor | None:
    """Make it for float32 [H] or [B, H]."""
    if slopes is None:
        return None
    return StridedTensor(slopes, slopes.stride(0) if slopes.dim() == 2 else 0, 0, slopes.stride(-1))


_SMALLEST_FACTOR = 1e-30


def score_factors(scores: Scores) -> tuple[float, float]:
    """Return the factors of q.k and of the capped result; scores are in units of log2, for ``exp2``."""
    if scores.softcap:
        return scores.softmax_scale / scores.softcap, scores.softcap / math.log(2)
    # Device code masks before it scales: 0 would turn -inf into NaN. The plan negates q for a negative scale.
    return max(scores.softmax_scale / math.log(2), _SMALLEST_FACTOR), 1.0


def compile_constants(
    inputs: QKV, tiled: Table, scores: Scores, launch: BlockConfig
) -> dict[str, Any]:
    """Return the compile-time constants."""
    head_dim, value_dim = inputs.q.shape[-1], inputs.v.shape[-1]
    return {
        "GROUP": inputs.q.shape[2] // inputs.k.shape[2],
        "IS_PER_ROW": tiled.is_per_row,
        "HAS_CAP": bool(scores.softcap),
        "HAS_SLOPES": scores.alibi_slopes is not None,
        "D": head_dim,
        "BLOCK_D": padded_dim(head_dim),
        "DV": value_dim,
        "BLOCK_DV": padded_dim(value_dim),
        "num_warps": launch.warps,
        "num_stages": launch.stages,
    }


def padded_dim(head_dim: int) -> int:
    """Return the power of two to which a head dim is padded; tensor cores multiply at least 16 entries."""
    return max(16, 1 << (head_dim - 1).bit_length())


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Set the current device, on which Triton launches."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@dataclass(frozen=True)
class TritonCapabilities(Capabilities):
    """Capabilities on a machine that may lack Triton, or have only its interpreter."""

    @override
    def refusal(self, request: Request) -> str | None:
        """Return the reason why the request is not covered, or ``None`` if it is."""
        if not is_installed():
            return "needs triton, which is not installed: pip install triton"
        if request.device_type != "cuda" and not (
            request.device_type == "cpu" and is_interpreted()
        ):
            return (
                "runs on cuda (for tests on cpu, in Triton's interpreter: TRITON_INTERPRET=1), "
                f"not {request.device_type}"
            )
        return super().refusal(request)


def is_installed() -> bool:
    """Return True if Triton is installed."""
    return find_spec("triton") is not None


def is_interpreted() -> bool:
    """Return True if Triton interprets kernels in Python on CPU: slowly, for tests."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


@dataclass(frozen=True)
class TritonFA2:
    """FlashAttention-2 in Triton; deterministic, sums in float32.

    Args:
        blocks: block sizes; ``None`` chooses them by GPU, dtype and head dim.
        split_below: programs of dk and dv below which each query head of a group gets its own: four for each
            multiprocessor of an H100. It bounds the memory of the parts.
    """

    blocks: BlockConfigs | None = None
    split_below: int = 512

    @property
    def name(self) -> str:
        """Name by which users select the kernel."""
        return "triton"

    @property
    def capabilities(self) -> Capabilities:
        """Every mask and score feature."""
        return TritonCapabilities(
            device_types=frozenset({"cuda", "cpu"}),
            dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
            masks=frozenset({"full", "causal", "band"}),
            max_head_dim=256,
            features=frozenset({"softcap", "alibi", "max_logits"}),
            obstacle=lambda: pre_ampere_obstacle("triton"),
            only_by_name=frozenset({"cpu"}),
        )

    def forward(
        self, inputs: QKV, tiles: Sequence[Tile], scores: Scores, state: Accumulator
    ) -> None:
        """Attend within all tiles in one launch, and merge the result into ``state`` at once."""
        code = device_code()
        q_BLHD, k_BLKD, v_BLKD = inputs
        launch = self._launches(inputs).forward
        batch, _, heads, _ = q_BLHD.shape
        tiled = make_table(tiles, scores.mask, batch, "queries", launch.own, q_BLHD.device)
        if tiled is None:
            return
        q, k, v = (by_head(x) for x in with_unit_strides(q_BLHD, k_BLKD, v_BLKD))
        start, end = tiled.span
        shape = (batch, end - start, heads, v_BLKD.shape[-1])
        make = torch.empty if tiled.is_gapless else torch.zeros
        out = make(shape, dtype=state.part_dtype(end - start), device=q_BLHD.device)
        lse = torch.full((batch, heads, end - start), -torch.inf, device=q_BLHD.device)
        top = torch.full_like(lse, -torch.inf) if scores.max_logits else None
        with on_device(q_BLHD.device):
            code.forward[grid(tiled, heads, batch)](
                q,
                k,
                v,
                by_head(out),
                by_head(lse.transpose(1, 2)),
                None if top is None else by_head(top.transpose(1, 2)),
                *launch_tables(tiled, scores),
                start,
                *score_factors(scores),
                HAS_TOP=top is not None,
                BLOCK_Q=launch.own,
                BLOCK_K=launch.step,
                **compile_constants(inputs, tiled, scores, launch),
            )
        state.add(ALL_ROWS, start, out, lse, top)

    def backward(
        self,
        merged: Output,
        inputs: QKV,
        tiles: Sequence[Tile],
        scores: Scores,
        gradients: GradientSums,
    ) -> None:
        """Add all tiles' gradients: dq in one launch, then dk and dv in one."""
        launch, mask = self._launches(inputs), scores.mask
        batch, device = inputs.q.shape[0], inputs.q.device
        by_query = make_table(tiles, mask, batch, "queries", launch.queries.own, device)
        by_key = make_table(tiles, mask, batch, "keys", launch.keys.own, device)
        if by_query is None or by_key is None:
            return
        dout, out, *qkv = with_unit_strides(merged.dout, merged.out, *inputs)
        merged, inputs = Output(dout, out, merged.lse), QKV(*qkv)
        delta_BHL = torch.empty_like(merged.lse)
        with on_device(device):
            _backward_queries(
                merged, inputs, delta_BHL, by_query, scores, launch.queries, gradients.q
            )
            _backward_keys(
                *(merged, inputs, delta_BHL, by_key, scores, launch.keys),
                *(gradients, self.split_below),
            )

    def _launches(self, inputs: QKV) -> BlockConfigs:
        widest = max(x.shape[-1] for x in inputs)
        return self.blocks or block_configs(inputs.q.dtype, widest, inputs.q.device)


def _backward_queries(
    merged: Output,
    inputs: QKV,
    delta_BHL: torch.Tensor,
    tiled: Table,
    scores: Scores,
    launch: BlockConfig,
    total: GradientSum,
) -> None:
    """Launch the programs of dq, which also write delta."""
    batch, _, heads, _ = inputs.q.shape
    with result_memory([total], tiled) as (adds, (dq,)):
        device_code().backward_queries[grid(tiled, heads, batch)](
            by_head(merged.dout),
            *map(by_head, inputs),
            by_head(merged.out),
            by_head(merged.lse.transpose(1, 2)),
            by_head(delta_BHL.transpose(1, 2)),
            by_head(dq),
            *launch_tables(tiled, scores),
            scores.softmax_scale,
            *score_factors(scores),
            ADDS=adds,
            BLOCK_Q=launch.own,
            BLOCK_K=launch.step,
            **compile_constants(inputs, tiled, scores, launch),
        )


def _backward_keys(
    merged: Output,
    inputs: QKV,
    delta_BHL: torch.Tensor,
    tiled: Table,
    scores: Scores,
    launch: BlockConfig,
    gradients: GradientSums,
    split_below: int,
) -> None:
    """Launch the programs of dk and dv.

    Where they are few, each query head of a group gets its own, and the parts are added up afterwards.
    """
    (batch, _, heads, _), kv_heads, (start, end) = inputs.q.shape, inputs.k.shape[2], tiled.span
    sums = [gradients.k, gradients.v]
    split = kv_heads < heads and math.prod(grid(tiled, kv_heads, batch)) < split_below
    if split:
        shape = (batch, end - start, heads)
        kind = {"dtype": torch.float32, "device": inputs.q.device}
        make = torch.empty if tiled.is_gapless else torch.zeros
        memory = nullcontext((False, [make(*shape, x.shape[-1], **kind) for x in inputs[1:]]))
    else:
        memory = result_memory(sums, tiled)
    with memory as (adds, (dk, dv)):
        for results in ("kv",) if launch.launches == 1 else ("v", "k"):
            device_code().backward_keys[grid(tiled, heads if split else kv_heads, batch)](
                by_head(merged.dout),
                *map(by_head, inputs),
                by_head(merged.lse.transpose(1, 2)),
                by_head(delta_BHL.transpose(1, 2)),
                by_head(dk),
                by_head(dv),
                *launch_tables(tiled, scores),
                start if split else 0,
                scores.softmax_scale,
                *score_factors(scores),
                HEADS=1 if split else heads // kv_heads,
                ADDS=adds,
                OF_K="k" in results,
                OF_V="v" in results,
                BLOCK_Q=launch.step,
                BLOCK_K=launch.own,
                **compile_constants(inputs, tiled, scores, launch),
            )
    if split:
        for total, parts in zip(sums, (dk, dv), strict=True):
            total.add(ALL_ROWS, start, parts.unflatten(2, (kv_heads, -1)).sum(3))


def device_code() -> Any:
    """Import the device code, and Triton with it."""
    from lightning_cp.kernels.triton import device

    return device
