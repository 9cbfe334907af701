"""Attention problems over a whole sequence, and the grids of ranks that they are spread over."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from lightning_cp.attention.spec import AttentionSpec
from lightning_cp.layout import Documents, SequenceLayout
from lightning_cp.layout.exchange import Exchange
from lightning_cp.layout.sequence import LayoutKind
from tests.helpers import oracle

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""q [B, S, H, D], k and v [B, S, K, D], and dout like q."""

BATCH = 2
RING = Exchange()


class Sequences(NamedTuple):
    """The length of a batch's rows and their documents; one row of documents stands for all."""

    length: int
    documents: tuple[tuple[tuple[int, int], ...], ...] | None = None


SEQUENCES: dict[str, Sequences] = {
    "dense": Sequences(53),  # divides by no grid, so that every layout pads
    "divides": Sequences(48),
    "packed": Sequences(53, (((0, 1), (1, 14), (14, 30), (30, 31), (31, 53)),)),
    "long": Sequences(53, (((0, 1), (1, 10), (10, 53)),)),  # packed, with one longer than windows
    "rows": Sequences(53, (((0, 20), (20, 50)), ((7, 10), (10, 50)))),  # padded left and right
    "equal_rows": Sequences(53, (((0, 25), (25, 53)),) * BATCH),
    "short": Sequences(53, (((10, 30),), ())),  # ranks, and a whole row, of padding only
}

_MANY = (((0, 3), (3, 200), (200, 330), (330, 512)), ((11, 100), (100, 460)))
ROUNDED: dict[str, Sequences] = {"512": Sequences(512), "512 rows": Sequences(512, _MANY)}
"""Longer ones, in which rounding adds up."""


@dataclass(frozen=True)
class Problem:
    """One attention call, by the names of its parts; ``heads`` are query and K/V heads."""

    heads: tuple[int, int] = (4, 2)
    sequences: str = "dense"
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    dtype: torch.dtype = torch.float64
    head_dim: int = 8
    scale: float | None = None
    softcap: float = 0.0
    alibi: int = 0
    """Dims of the slopes: 1 is a slope per head, 2 one per row and head, 0 none."""
    sinks: bool = False
    max_logits: bool = False
    """Whether the largest score of each query is asked for too."""
    value_dim: int | None = None
    """Head dim of v; that of q and k by default."""

    @property
    def shape(self) -> Sequences:
        """Length and documents."""
        return {**SEQUENCES, **ROUNDED}[self.sequences]

    @property
    def spec(self) -> AttentionSpec:
        """The mask and the scores in the package's terms."""
        return AttentionSpec(
            causal=self.causal,
            softmax_scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            alibi_slopes=self.slopes,
            sinks=self.sink_logits,
        )

    @property
    def scores(self) -> oracle.Scores:
        """What is done to scores, in the oracle's terms."""
        return oracle.Scores(self.softcap, self.slopes, self.sink_logits, self.max_logits)

    @property
    def slopes(self) -> torch.Tensor | None:
        """Of both signs and all different, so that a bias of another head or row shows."""
        if not self.alibi:
            return None
        count = self.heads[0] * (BATCH if self.alibi == 2 else 1)
        slopes = 0.3 * torch.cos(torch.arange(count, dtype=torch.float32) + 0.5)
        return slopes.view(BATCH, -1) if self.alibi == 2 else slopes

    @property
    def sink_logits(self) -> torch.Tensor | None:
        """As large as a sum over many keys, and all different."""
        if not self.sinks:
            return None
        return (2.0 + torch.sin(3.0 * torch.arange(self.heads[0]))).to(self.dtype)

    def layout(self, grid: Grid) -> SequenceLayout:
        """The layout over a grid of ranks, with the problem's documents."""
        length, rows = self.shape
        documents = None
        if rows is not None:
            documents = Documents(
                [np.array(row, dtype=np.int64).reshape(-1, 2) for row in rows], length
            )
        sizes, mask = (length, grid.ring, grid.ulysses), self.spec.mask
        return SequenceLayout(*sizes, grid.kind, documents, mask, grid.chunks)

    def tensors(self) -> Tensors:
        """q, k, v and dout, the same ones in every process."""
        generator = torch.Generator().manual_seed(7)
        heads, kv_heads = self.heads

        def draw(count: int, dim: int) -> torch.Tensor:
            shape = (BATCH, self.shape.length, count, dim)
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)

        dim, of_values = self.head_dim, self.value_dim or self.head_dim
        of_keys = draw(heads, dim), draw(kv_heads, dim)
        return *of_keys, draw(kv_heads, of_values), draw(heads, of_values)

    def __str__(self) -> str:
        heads = "{}/{} heads".format(*self.heads)
        mask = "causal" if self.causal else "full"
        window = "" if self.window == (-1, -1) else f", window {self.window}"
        names = ("scale", "softcap", "alibi", "sinks", "max_logits", "value_dim")
        scores = "".join(f", {name} {getattr(self, name)}" for name in names if getattr(self, name))
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.sequences}, {mask}{window}, {heads}{scores}, {dtype}"


@dataclass(frozen=True)
class Grid:
    """How many ranks share a sequence, and how."""

    ring: int = 1
    ulysses: int = 1
    kind: LayoutKind = "zigzag"
    chunks: int | None = None
    """Of a ring rank, where they are dealt."""
    exchange: Exchange = RING

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.ring * self.ulysses

    @property
    def how(self) -> dict[str, Any]:
        """The exchange, in the arguments of ``context_parallel_attention``."""
        return {
            "exchange": self.exchange.name,
            "forward_execution": self.exchange.forward,
            "backward_execution": self.exchange.backward,
            "kv_heads_per_gather": self.exchange.kv_heads_per_gather,
            "key_gradients": self.exchange.key_gradients,
        }

    @property
    def mode(self) -> str:
        """ulysses, ring, hybrid, or with an all-gather in place of the ring."""
        if self.ring == 1:
            return "ulysses"
        if self.exchange.name == "all_gather":
            return "all_gather" if self.ulysses == 1 else "all_gather over ulysses"
        return "ring" if self.ulysses == 1 else "hybrid"

    def __str__(self) -> str:
        if self.world_size == 1:
            return "one rank"
        if self.mode == "ulysses":
            return f"ulysses {self.ulysses}"
        size = f"{self.ring}" if self.ulysses == 1 else f"{self.ring}x{self.ulysses}"
        dealt = f" {self.chunks}" if self.chunks else ""
        if self.exchange.name == "rotation":
            return f"rotation {size} {self.kind}{dealt}"
        if self.exchange.name == "ring":
            narrow = ", narrow gradients" if self.exchange.key_gradients == "compute" else ""
            return f"{self.mode} {size} {self.kind}{dealt}{narrow}"
        how = self.exchange
        stride = how.kv_heads_per_gather or "all"
        return f"gather {size} {self.kind}{dealt} {how.forward}/{how.backward} {stride}"


def gather(forward: str, backward: str, kv_heads: int | None = 1) -> Exchange:
    """An all-gather of some K/V heads at a time."""
    return Exchange("all_gather", forward, backward, kv_heads)


GATHERS: tuple[Grid, ...] = (
    Grid(2, exchange=gather("two_kernel", "two_kernel")),
    Grid(2, exchange=gather("fused", "fused", 2)),
    Grid(3, exchange=gather("two_kernel", "fused", None)),
    Grid(4, exchange=gather("two_kernel", "two_kernel", 2)),
    Grid(4, exchange=gather("two_kernel", "fused")),
    Grid(4, exchange=gather("fused", "two_kernel", None)),
    Grid(4, exchange=gather("fused", "fused")),
    Grid(4, kind="contiguous", exchange=gather("two_kernel", "two_kernel")),
    Grid(2, 2, exchange=gather("two_kernel", "two_kernel")),
    Grid(2, 2, exchange=gather("fused", "fused", None)),
    Grid(2, 3, exchange=gather("two_kernel", "fused")),
    Grid(8, exchange=gather("two_kernel", "two_kernel")),
    Grid(8, exchange=gather("fused", "fused", 2)),
    Grid(4, 2, exchange=gather("fused", "two_kernel")),
    Grid(2, 4, exchange=gather("two_kernel", "two_kernel", None)),
)
"""zigzag_llama3 in all four combinations of execution; sorted by world size."""

NARROW = Exchange(key_gradients="compute")
"""A ring whose gradients travel in the inputs' dtype."""

ROTATION = Exchange("rotation")
ROTATIONS: tuple[Grid, ...] = (
    Grid(3, exchange=ROTATION),
    Grid(4, kind="contiguous", exchange=ROTATION),
    Grid(4, kind="balanced", chunks=4, exchange=ROTATION),
    Grid(2, 2, exchange=ROTATION),
    Grid(4, 2, exchange=ROTATION),
)
"""Rings in which all keys go around; sorted by world size."""

RINGS: tuple[Grid, ...] = (
    Grid(1, 2),
    Grid(2),
    Grid(2, kind="contiguous"),
    Grid(2, kind="balanced", chunks=5),
    Grid(1, 3),
    Grid(3),
    Grid(3, kind="contiguous"),
    Grid(1, 4),
    Grid(4),
    Grid(4, kind="contiguous"),
    Grid(4, kind="balanced", chunks=4),
    Grid(2, 2),
    Grid(2, 2, kind="contiguous"),
    Grid(2, 2, kind="balanced", chunks=3),
    Grid(3, 2),
    Grid(2, 3),
    Grid(1, 8),
    Grid(8),
    Grid(8, kind="contiguous"),
    Grid(8, kind="balanced", chunks=3),
    Grid(2, 4),
    Grid(4, 2),
    Grid(4, 2, kind="contiguous"),
)
GRIDS: tuple[Grid, ...] = tuple(
    sorted((*RINGS, *ROTATIONS, *GATHERS), key=lambda grid: grid.world_size)
)
"""Sorted by world size: another size makes the ranks regroup."""

QUICK = {str(grid) for grid in GRIDS if grid.world_size < 4} | {
    "ring 4 zigzag",
    "rotation 4 contiguous",
    "ulysses 4",
    "hybrid 2x2 zigzag",
    "gather 2x2 zigzag two_kernel/two_kernel 1",
    "gather 4 zigzag fused/fused 1",
    "hybrid 4x2 zigzag",
    "ring 8 balanced 3",
}
"""Of the quick suite, where a test takes seconds for each: every exchange, layout and number of ranks."""


def rarely(*grids: Grid) -> list[Any]:
    """Parameters of a test; the quick suite has some of them."""
    slow = [pytest.mark.nightly]
    return [
        pytest.param(grid, id=str(grid), marks=[] if str(grid) in QUICK else slow) for grid in grids
    ]


HEADS: dict[int, dict[str, tuple[int, int]]] = {
    1: {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)},
    2: {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1), "straddling": (6, 3)},
    3: {"mha": (6, 6), "gqa": (6, 2), "mqa": (6, 1), "straddling": (12, 4)},
    4: {"mha": (4, 4), "gqa": (8, 4), "mqa": (4, 1), "straddling": (12, 3)},
    8: {"mha": (8, 8), "gqa": (16, 4), "mqa": (8, 1), "straddling": (24, 3)},
}
"""By Ulysses size. Straddling: some rank's query heads use K/V heads unequally often."""


EVERY: dict[str, Any] = {
    "softcap": 1.5,
    "alibi": 2,
    "sinks": True,
    "scale": 0.7,
    "max_logits": True,
}
"""All that can be done to the scores of a problem, and asked of them."""


@lru_cache(maxsize=512)
def expected(problem: Problem) -> oracle.Attention:
    """What one process computes, in float64, from inputs rounded to the problem's dtype."""
    return oracle.attention(
        *problem.tensors(),
        causal=problem.causal,
        window=problem.window,
        documents=problem.shape.documents,
        softmax_scale=problem.scale,
        how=problem.scores,
    )


def voids(problem: Problem, grid: Grid) -> dict[str, oracle.Attention]:
    """Results that no cell may accept: all zeros, and each rank by itself."""
    layout = problem.layout(grid)
    return oracle.void_outputs(
        *problem.tensors(),
        [layout.positions(rank) for rank in range(grid.world_size)],
        causal=problem.causal,
        window=problem.window,
        documents=problem.shape.documents,
        softmax_scale=problem.scale,
        how=problem.scores,
    )
