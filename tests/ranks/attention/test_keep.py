"""Activation checkpointing: exact with and without keeping, and no communication is repeated."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lightning_cp.attention.api import context_parallel_attention
from lightning_cp.attention.checkpointing import Stash, current_stash, keep_attention
from lightning_cp.attention.spec import AttentionSpec
from lightning_cp.layout import SequenceLayout
from lightning_cp.mesh import ContextParallelMesh
from tests.helpers.attention.distributed import mesh_of
from tests.helpers.attention.problems import Grid, gather
from tests.helpers.attention.wire import Wire
from tests.helpers.pool import run_ranks

GRIDS = [
    Grid(1, 2),
    Grid(2),
    pytest.param(Grid(4), marks=pytest.mark.nightly),
    Grid(2, 2),
    Grid(2, 2, exchange=gather("two_kernel", "fused")),
]
BATCH, LENGTH, HEADS, KV_HEADS, DIM = 2, 29, 4, 2, 4
WIDTH = HEADS * DIM

Checkpoint = Callable[..., torch.Tensor]
HOW: dict[str, Checkpoint] = {
    "plain": lambda block, x: block(x),
    "recomputed": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
    "kept": lambda block, x: checkpoint(block, x, use_reentrant=False, context_fn=keep_attention),
}


@dataclass
class Block:
    """Attention layers with residuals; writes down what each of its runs communicates."""

    mesh: ContextParallelMesh
    layout: SequenceLayout
    weights: list[torch.Tensor]
    kernel: str
    grid: Grid
    use_lse: bool = False
    sinks: torch.Tensor | None = None
    """With them, the scores are capped too, and the largest are looked at."""
    runs: list[dict[str, int]] = field(default_factory=list)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[B, L, WIDTH] to the same."""
        with Wire() as wire:
            try:
                for weight in self.weights:
                    x = self._layer(x, weight)
                return x
            finally:  # a recomputation is stopped by an exception once it has all it needs
                self.runs.append(wire.counts)

    def _layer(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        qkv = (x @ weight).unflatten(-1, (-1, DIM))
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=2)
        how: dict[str, Any] = {"mesh": self.mesh, "layout": self.layout, "kernel": self.kernel}
        how.update(self.grid.how)
        if self.sinks is not None:
            how["spec"] = AttentionSpec(sinks=self.sinks, softcap=0.5)
            how["return_max_logits"] = True
        found: Any = context_parallel_attention(q, k, v, **how, return_lse=self.use_lse)
        out, *others = found if isinstance(found, tuple) else (found,)
        for other in others:
            out = out * other.sigmoid().transpose(1, 2).unsqueeze(-1)
        return x + torch.tanh(out.flatten(2))


@dataclass(frozen=True)
class Result:
    """What one way of checkpointing gave on one rank."""

    gradients: list[torch.Tensor]
    runs: list[dict[str, int]]
    backward: dict[str, int]


def make_block(
    mesh: ContextParallelMesh, grid: Grid, layers: int, kernel: str, dtype: torch.dtype
) -> tuple[Block, torch.Tensor]:
    """A block and its input; equal for equal arguments."""
    torch.manual_seed(0)
    layout = SequenceLayout(LENGTH, grid.ring, grid.ulysses)
    x = mesh.shard(torch.randn(BATCH, LENGTH, WIDTH, dtype=dtype), layout).requires_grad_()
    outputs = (HEADS + 2 * KV_HEADS) * DIM
    weights = [
        (torch.randn(WIDTH, outputs, dtype=dtype) / 4).requires_grad_() for _ in range(layers)
    ]
    return Block(mesh, layout, weights, kernel, grid), x


def differentiate(
    rank: int,
    world_size: int,
    grid: Grid,
    layers: int,
    kernel: str,
    backwards: int,
    use_lse: bool = False,
    with_sinks: bool = False,
) -> dict[str, Result]:
    """Gradients after some backwards through one graph, each way."""
    found: dict[str, Result] = {}
    with mesh_of(grid) as mesh:
        for how, run in HOW.items():
            if how == "reentrant" and backwards > 1:
                continue  # PyTorch's reentrant kind cannot go through a graph twice
            block, x = make_block(mesh, grid, layers, kernel, torch.float64)
            block.use_lse = use_lse
            if with_sinks:
                sinks = 0.5 + torch.arange(HEADS, dtype=torch.float64)
                block.sinks = sinks.requires_grad_()
            out = run(block, x)
            with Wire() as wire:
                for index in range(backwards):
                    out.square().sum().backward(retain_graph=index + 1 < backwards)
            leaves = [x, *block.weights, *([block.sinks] if block.sinks is not None else [])]
            assert current_stash() is None
            found[how] = Result([leaf.grad for leaf in leaves], block.runs, wire.counts)  # type: ignore[misc]
    return found


@pytest.mark.quick(
    "*-aten-2-1",
    "ring*-reference-2-2",
    "ulysses*-reference-1-2",
    "ring*-aten-1-*",
    "ulysses*-aten-2-2",
    "ring 2 zigzag-reference-2-1",
)
@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kernel", ["reference", "aten"])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_way_gives_the_same_bits(
    grid: Grid, kernel: str, layers: int, backwards: int
) -> None:
    for found in run_ranks(grid.world_size, differentiate, grid, layers, kernel, backwards):
        plain = found.pop("plain")
        assert all(gradient.abs().sum() > 0 for gradient in plain.gradients)
        for how, other in found.items():
            for one, two in zip(plain.gradients, other.gradients, strict=True):
                assert torch.equal(one, two), how


@pytest.mark.quick("*-1-True", "ring*-2-False", "ulysses*-2-False")
@pytest.mark.parametrize("use_lse", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_kept_recomputation_communicates_nothing(grid: Grid, layers: int, use_lse: bool) -> None:
    """Inside backward, Ulysses exchanges q with kv, and out; the ring does what it does anyway."""
    args = (grid, layers, "reference", 1, use_lse)
    for found in run_ranks(grid.world_size, differentiate, *args):
        plain, kept, recomputed = (found[how] for how in ("plain", "kept", "recomputed"))
        for one, two in zip(plain.gradients, kept.gradients, strict=True):
            assert torch.equal(one, two)
        assert kept.runs == [plain.runs[0], {}]
        assert recomputed.runs == [plain.runs[0]] * 2
        messages = 3 if grid.ring > 1 else 2  # kv has one of its own where a ring sends it on
        again = {"alltoall_base_": messages * layers} if grid.ulysses > 1 else {}
        assert kept.backward == {
            op: plain.backward.get(op, 0) + again.get(op, 0) for op in plain.backward | again
        }


@pytest.mark.quick("gather*-True", "ring*-True", "hybrid*-False")
@pytest.mark.parametrize("use_lse", [False, True])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_sinks_and_largest_scores_are_kept(grid: Grid, use_lse: bool) -> None:
    """The sinks' gradient too, and nothing is communicated when a block is run again."""
    args = (grid, 2, "reference", 2, use_lse, True)
    for found in run_ranks(grid.world_size, differentiate, *args):
        plain, kept = found["plain"], found["kept"]
        assert all(gradient.abs().sum() > 0 for gradient in plain.gradients)
        for how in ("recomputed", "kept"):
            for one, two in zip(plain.gradients, found[how].gradients, strict=True):
                assert torch.equal(one, two), how
        assert kept.runs == [plain.runs[0], {}, {}]


def keep_sizes(
    rank: int, world_size: int, grid: Grid, dtype: torch.dtype, kernel: str
) -> tuple[int, list[int]]:
    """Local tokens, and the bytes that each attention call keeps."""
    kept: list[Any] = []
    record = Stash.record

    def spy(stash: Stash, out: torch.Tensor, lse: torch.Tensor) -> None:
        record(stash, out, lse)
        kept.append(stash._results[-1])

    with mesh_of(grid) as mesh, mock.patch.object(Stash, "record", spy):
        block, x = make_block(mesh, grid, 2, kernel, dtype)
        HOW["kept"](block, x).sum().backward()
        sizes = [
            sum({s.data_ptr(): s.nbytes() for s in (x.untyped_storage() for x in pair)}.values())
            for pair in kept
        ]
        return block.layout.local_len, sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", ["reference", "aten"])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_call_keeps_no_more_than_it_says(grid: Grid, kernel: str, dtype: torch.dtype) -> None:
    """L * H * (D * itemsize + 4) bytes per batch row and rank."""
    for tokens, sizes in run_ranks(grid.world_size, keep_sizes, grid, dtype, kernel):
        assert sizes == [BATCH * tokens * HEADS * (DIM * dtype.itemsize + 4)] * 2


def forget(rank: int, world_size: int, grid: Grid) -> None:
    """What was kept holds no graph, and is freed with its own, not when garbage is collected."""
    alive: list[weakref.ref[torch.Tensor]] = []
    record = Stash.record

    def spy(stash: Stash, out: torch.Tensor, lse: torch.Tensor) -> None:
        record(stash, out, lse)
        alive.extend(weakref.ref(x) for x in stash._results[-1])

    with mesh_of(grid) as mesh, mock.patch.object(Stash, "record", spy):
        block, x = make_block(mesh, grid, 2, "reference", torch.float32)
        gc.collect()
        gc.disable()
        try:
            out = HOW["kept"](block, x)
            out.sum().backward(retain_graph=True)
            kept = [tensor() for tensor in alive]
            assert [tensor is not None and tensor.grad_fn is None for tensor in kept] == [True] * 4
            del kept
            out.sum().backward()
            del out
            assert [tensor() is None for tensor in alive] == [True] * 4
        finally:
            gc.enable()


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_what_was_kept_is_freed_with_the_graph(grid: Grid) -> None:
    run_ranks(grid.world_size, forget, grid)


def fail_inside(rank: int, world_size: int) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        assert current_stash() is not None
        raise ArithmeticError("broken block")

    with pytest.raises(ArithmeticError, match="broken block"):
        HOW["kept"](broken, torch.ones(2, requires_grad=True))
    assert current_stash() is None


def test_an_error_in_a_region_leaves_it() -> None:
    run_ranks(1, fail_inside)
