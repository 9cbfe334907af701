"""Tile lists that no schedule makes, strides that callers have, and how much memory is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_cp.kernels.aten import AtenCpuFlash
from lightning_cp.kernels.merge import Accumulator, GradientSums
from lightning_cp.kernels.per_tile import replace_infinities
from lightning_cp.kernels.protocol import QKV, Kernel, Output, Scores
from lightning_cp.kernels.reference import ReferenceKernel
from lightning_cp.kernels.select import kernels
from lightning_cp.layout.mask import Mask
from lightning_cp.layout.tiles import ALL_ROWS, Tile
from tests.helpers.kernels.cells import REFERENCE
from tests.helpers.kernels.dense import (
    SCALE,
    TOLERANCE,
    Answer,
    check_errors,
    dense_attention,
    errors,
    run,
)

BATCH, QUERIES, KEYS = 2, 17, 19
ON_CPU = [REFERENCE, AtenCpuFlash()]
KINDS: tuple[Literal["full", "causal", "band"], ...] = ("full", "causal", "band")
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def draw(queries: int = QUERIES, keys: int = KEYS, heads: int = 4, kv_heads: int = 2) -> Tensors:
    """q, k, v and dout in float64."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(queries, heads), (keys, kv_heads), (keys, kv_heads), (queries, heads)]
    q, k, v, dout = (
        torch.randn(BATCH, *shape, 8, generator=generator, dtype=torch.float64) for shape in shapes
    )
    return q, k, v, dout


def seen_by(
    tiles: list[Tile], mask: Mask, queries: int = QUERIES, keys: int = KEYS
) -> torch.Tensor:
    """bool [B, queries, keys]: what the tiles' definition says, one tile after the other."""
    visible = torch.zeros(BATCH, queries, keys, dtype=torch.bool)
    for t in tiles:
        ahead = torch.arange(t.k_len).unsqueeze(0) - torch.arange(t.q_len).unsqueeze(1) - t.delta
        inside = {
            "full": torch.ones_like(ahead, dtype=torch.bool),
            "causal": ahead <= 0,
            "band": (ahead >= -mask.left) & (ahead <= mask.right),
        }[t.mask]
        rows = range(BATCH) if t.row == ALL_ROWS else [t.row]
        for row in rows:
            part = visible[row, t.q_start : t.q_start + t.q_len, t.k_start : t.k_start + t.k_len]
            assert not bool((part & inside).any()), "the tiles overlap"
            part |= inside
    return visible


def check_tiles(kernel: Kernel, tensors: Tensors, tiles: list[Tile], mask: Mask) -> Answer:
    """Compare one call with the dense answer."""
    q, k = tensors[:2]
    expected = dense_attention(*tensors, seen_by(tiles, mask, q.shape[1], k.shape[1]))
    answer = run(kernel, tensors, tiles, mask)
    check_errors(errors(answer, expected), TOLERANCE[q.dtype])
    return answer


@st.composite
def tile_lists(draw_: st.DrawFn) -> list[Tile]:
    """Tiles over disjoint key ranges: any queries, rows, masks and offsets, empty ones too."""
    edges = sorted([0, *draw_(st.lists(st.integers(0, KEYS), min_size=1, max_size=5))])
    tiles: list[Tile] = []
    for start, end in zip(edges, [*edges[1:], KEYS], strict=True):
        q_start = draw_(st.integers(0, QUERIES - 1))
        q_len = draw_(st.integers(0, QUERIES - q_start))
        row = draw_(st.sampled_from([ALL_ROWS, 0, 1]))
        delta = draw_(st.integers(-KEYS, QUERIES))
        kind = draw_(st.sampled_from(KINDS))
        tiles.append(Tile(row, q_start, q_len, start, end - start, delta, kind))
    return draw_(st.permutations(tiles))


@settings(max_examples=150)
@given(
    tiles=tile_lists(),
    window=st.tuples(st.integers(-1, 6), st.integers(-1, 6)),
    causal=st.booleans(),
    blocks=st.tuples(st.integers(1, 20), st.integers(1, 20)),
)
def test_reference_runs_any_tile_list(
    tiles: list[Tile], window: tuple[int, int], causal: bool, blocks: tuple[int, int]
) -> None:
    check_tiles(ReferenceKernel(*blocks), draw(), tiles, Mask(causal=causal, window=window))


@pytest.mark.parametrize("kernel", ON_CPU, ids=lambda kernel: kernel.name)
def test_same_queries_in_several_tiles_and_rows(kernel: Kernel) -> None:
    tiles = [
        Tile(ALL_ROWS, 2, 9, 0, 9, 0, "causal"),
        Tile(0, 0, QUERIES, 9, 4, 5, "full"),
        Tile(1, 5, 3, 9, 3, 5, "full"),
        Tile(1, 4, 10, 14, 5, 5, "full"),
        Tile(ALL_ROWS, 0, 0, 0, KEYS, 0, "full"),
        Tile(0, 0, QUERIES, 3, 0, 0, "full"),
    ]
    answer = check_tiles(kernel, draw(), tiles, Mask())
    assert bool((answer.lse[1, :, :2] == -torch.inf).all())
    assert not bool(answer.out[1, :2].any())


@pytest.mark.parametrize("kernel", ON_CPU, ids=lambda kernel: kernel.name)
def test_no_tiles(kernel: Kernel) -> None:
    answer = check_tiles(kernel, draw(), [], Mask())
    assert bool((answer.lse == -torch.inf).all())


def test_scores_beyond_the_range_of_exp() -> None:
    q, k, v, dout = draw()
    tensors = (q * 1e3, k * 10, v, dout)
    tiles = [Tile(ALL_ROWS, 0, 17, 0, 17, 0, "causal"), Tile(0, 0, 3, 17, 2, 0, "full")]
    expected = dense_attention(*tensors, seen_by(tiles, Mask()))
    assert float(expected.lse.max()) > 1e3 > -1e3 > float(expected.lse.min())
    answer = run(REFERENCE, tensors, tiles, Mask())
    found = errors(answer, expected)
    assert found["out"] <= 1e-13
    assert found["lse"] <= 1e-13
    assert all(bool(x.isfinite().all()) for x in (answer.dq, answer.dk, answer.dv))


@pytest.mark.parametrize("kernel", ON_CPU, ids=lambda kernel: kernel.name)
def test_nan_is_not_hidden(kernel: Kernel) -> None:
    q, k, v, dout = draw()
    q[0, 3, 1, 2] = torch.nan
    answer = run(kernel, (q, k, v, dout), [Tile(ALL_ROWS, 0, 17, 0, 17, 0, "causal")], Mask())
    assert bool(answer.out[0, 3, 1].isnan().all())
    assert bool(answer.lse[0, 1, 3].isnan())
    assert not bool(answer.out[1].isnan().any())


def test_replaced_infinities_keep_nan() -> None:
    lse = torch.tensor([-torch.inf, torch.inf, torch.nan, 1.5])
    expected = torch.tensor([-torch.inf, -torch.inf, torch.nan, 1.5])
    assert torch.equal(replace_infinities(lse, -torch.inf)[[0, 1, 3]], expected[[0, 1, 3]])
    assert bool(replace_infinities(lse, -torch.inf)[2].isnan())


def token_first(x: torch.Tensor) -> torch.Tensor:
    """The same values, stored [L, B, H, D]."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def paired(x: torch.Tensor) -> torch.Tensor:
    """The same values, stored between others along the heads."""
    return torch.stack([x, torch.full_like(x, torch.nan)], dim=3).flatten(2, 3)[:, :, ::2]


def strided_last(x: torch.Tensor) -> torch.Tensor:
    """The same values, with the head dim stored outermost."""
    return x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)


@pytest.mark.parametrize("store", [token_first, paired, strided_last])
@pytest.mark.parametrize("kernel", ON_CPU, ids=lambda kernel: kernel.name)
def test_any_strides(kernel: Kernel, store: Callable[[torch.Tensor], torch.Tensor]) -> None:
    q, k, v, dout = (store(x) for x in draw())
    assert not q.is_contiguous()
    tiles = [Tile(ALL_ROWS, 1, 12, 2, 12, 0, "causal"), Tile(1, 0, 17, 14, 5, 0, "full")]
    check_tiles(kernel, (q, k, v, dout), tiles, Mask())


@pytest.mark.parametrize("kernel", ON_CPU, ids=lambda kernel: kernel.name)
def test_expanded_gradient(kernel: Kernel) -> None:
    q, k, v, _ = draw()
    dout = torch.ones((), dtype=q.dtype).expand(q.shape)  # what sum().backward() passes
    check_tiles(kernel, (q, k, v, dout), [Tile(ALL_ROWS, 0, 17, 0, 17, 0, "causal")], Mask())


@pytest.mark.parametrize("name", ["reference", "aten_cpu_flash"])
def test_inputs_are_only_read(name: str) -> None:
    tensors = draw()
    copies = [x.clone() for x in tensors]
    run(kernels()[name], tensors, [Tile(ALL_ROWS, 0, 17, 0, 17, 0, "causal")], Mask())
    assert all(torch.equal(x, copy) for x, copy in zip(tensors, copies, strict=True))


class _LargestNew(TorchDispatchMode):
    """The largest storage, in entries, that appears while it is active."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.entries = 0
        self._known = {x.untyped_storage().data_ptr() for x in known}

    @override
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self._known:
                self.entries = max(self.entries, x.untyped_storage().nbytes() // x.element_size())
        return result


def test_reference_takes_no_more_than_a_block() -> None:
    length, block = 256, 16
    q, k, v, dout = draw(length, length)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    scores, tiles = Scores(SCALE, Mask()), [Tile(ALL_ROWS, 0, length, 0, length, 0, "causal")]
    state = Accumulator(q, q.dtype)
    out, lse = state.result(q.dtype)  # makes the buffers, which are the caller's
    kernel = ReferenceKernel(block, block)
    with _LargestNew(q, k, v, dout, dq, dk, dv, out, lse) as largest:
        kernel.forward(QKV(q, k, v), tiles, scores, state)
        merged, gradients = Output(dout, out, lse), GradientSums.of(dq, dk, dv)
        kernel.backward(merged, QKV(q, k, v), tiles, scores, gradients)
    assert 0 < largest.entries <= BATCH * q.shape[2] * block * block
