"""Kernels through schedules against the dense float64 answer: out, lse, dq, dk and dv.

The last tests show that the cells can fail: each breaks one thing and must turn them red.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from lightning_cp.kernels import merge
from lightning_cp.kernels.protocol import Kernel
from lightning_cp.kernels.select import kernels
from lightning_cp.layout.mask import Mask
from lightning_cp.layout.sequence import SequenceLayout
from lightning_cp.layout.tiles import Tile
from tests.helpers.kernels.cells import DOCUMENTS, HEADS, KERNEL_MASKS, KERNELS, LAYOUTS, cell
from tests.helpers.kernels.dense import (
    Answer,
    Problem,
    Rank,
    check,
    dense,
    in_dtype,
    is_wrong,
    sharded,
    with_tiles,
)

MULTI_HOP = [name for name in LAYOUTS if name != "1"]
CROSSING = [(kernel, mask) for kernel, mask in KERNEL_MASKS if mask != "diagonal"]
"""Without the mask under which a query sees only itself: no hop is needed, and dq and dk are 0."""


@pytest.mark.quick(
    "reference-full-mha-dense-1",
    "reference-causal-mha-dense-3_zigzag",
    "reference-causal-gqa-dense-1",
    "reference-causal_window-gqa-packed-3_zigzag",
    "reference-window-gqa-packed-3_zigzag",
    "aten_cpu_flash-causal-mha-dense-1",
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("kernel", "mask"), KERNEL_MASKS)
def test_equals_dense(kernel: str, mask: str, heads: str, documents: str, layout: str) -> None:
    chosen, problem = cell(kernel, mask, heads, documents)
    check(sharded(problem, chosen, LAYOUTS[layout]), problem)


@pytest.mark.quick("reference-causal-dense-dtype1")
@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("documents", ["dense", "rows"])
@pytest.mark.parametrize(("kernel", "mask"), KERNEL_MASKS)
def test_equals_dense_in_lower_precision(
    kernel: str, mask: str, documents: str, dtype: torch.dtype
) -> None:
    chosen, problem = cell(kernel, mask, "gqa", documents)
    problem = in_dtype(problem, dtype)
    answer = sharded(problem, chosen, LAYOUTS["3_zigzag"])
    assert answer.out.dtype == dtype
    assert {x.dtype for x in answer[1:]} == {torch.float32}
    check(answer, problem)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("value_dim", [1, 5, 12])
@pytest.mark.parametrize("layout", ["1", "3_zigzag"])
@pytest.mark.parametrize(("kernel", "mask"), KERNEL_MASKS)
def test_values_of_another_width(
    kernel: str, mask: str, layout: str, value_dim: int, dtype: torch.dtype
) -> None:
    chosen, problem = cell(kernel, mask, "gqa", "rows")
    problem = replace(problem, value_dim=value_dim, dtype=dtype)
    answer = sharded(problem, chosen, LAYOUTS[layout])
    assert answer.out.is_contiguous()
    check(answer, problem)


@pytest.mark.parametrize("kernel", KERNELS)
def test_longer_than_the_default_blocks(kernel: str) -> None:
    problem = Problem(Mask(), seq_len=700, batch=1)
    check(sharded(problem, kernels()[kernel], SequenceLayout(700, ring_size=2)), problem)


@pytest.mark.parametrize("layout", MULTI_HOP)
@pytest.mark.parametrize(("kernel", "mask"), CROSSING)
def test_red_without_the_keys_of_other_ranks(kernel: str, mask: str, layout: str) -> None:
    chosen, problem = cell(kernel, mask, "gqa", "dense")
    answer = sharded(problem, chosen, LAYOUTS[layout], num_hops=1)
    assert all(is_wrong(answer, problem, name) for name in Answer._fields)


@pytest.mark.parametrize(("kernel", "mask"), CROSSING)
def test_red_for_zeros(kernel: str, mask: str) -> None:
    _, problem = cell(kernel, mask, "gqa", "packed")
    zeros = Answer(*(torch.zeros_like(x) for x in dense(problem)))
    assert all(is_wrong(zeros, problem, name) for name in Answer._fields)


@pytest.mark.parametrize("layout", MULTI_HOP)
@pytest.mark.parametrize("kernel", KERNELS)
def test_red_when_lse_is_ignored_in_the_merge(
    kernel: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def average(
        out: torch.Tensor, lse: torch.Tensor, new_out: torch.Tensor, new_lse: torch.Tensor
    ) -> None:
        weight = torch.where(lse == -torch.inf, 1.0, 0.5).transpose(1, 2).unsqueeze(-1)
        out.lerp_(new_out, weight.to(out.dtype))
        lse.copy_(torch.maximum(lse, new_lse))

    monkeypatch.setattr(merge, "merge", average)
    chosen, problem = cell(kernel, "full", "gqa", "dense")
    answer = sharded(problem, chosen, LAYOUTS[layout])
    assert all(is_wrong(answer, problem, name) for name in Answer._fields)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_red_when_causality_is_dropped(kernel: str, layout: str) -> None:
    def uncover(tiles: Sequence[Tile]) -> list[Tile]:
        return [tile._replace(mask="full") for tile in tiles]

    chosen, problem = cell(kernel, "causal", "gqa", "packed")
    answer = sharded(problem, with_tiles(chosen, uncover), LAYOUTS[layout])
    assert all(is_wrong(answer, problem, name) for name in Answer._fields)


@pytest.mark.parametrize("kernel", KERNELS)
def test_red_when_a_tile_is_lost(kernel: str) -> None:
    chosen, problem = cell(kernel, "causal", "mha", "packed")
    answer = sharded(problem, with_tiles(chosen, lambda tiles: tiles[1:]), LAYOUTS["2_zigzag"])
    assert all(is_wrong(answer, problem, name) for name in Answer._fields)


@pytest.mark.parametrize("kernel", KERNELS)
def test_red_when_backward_is_given_a_local_result(kernel: str) -> None:
    chosen, problem = cell(kernel, "full", "gqa", "dense")
    merged, layout = dense(problem), LAYOUTS["2_zigzag"]
    local = sharded(problem, chosen, layout, num_hops=1)
    assert not any(_wrong_gradients(problem, chosen, layout, merged))
    assert all(_wrong_gradients(problem, chosen, layout, local))


def _wrong_gradients(
    problem: Problem, kernel: Kernel, layout: SequenceLayout, result: Answer
) -> list[bool]:
    """Whether dq, dk and dv are wrong when backward is given the out and lse of ``result``."""
    q, k, v, dout = problem.tensors()
    ranks = range(layout.ring_size)
    dk, dv = ([torch.zeros_like(layout.shard(x, rank)) for rank in ranks] for x in (k, v))
    dq: list[torch.Tensor] = []
    for rank in ranks:
        out, lse = layout.shard(result.out, rank), layout.shard(result.lse, rank, dim=2)
        part = Rank(problem, kernel, layout, rank)
        dq.append(part.backward(dout, q, k, v, out, lse, dk, dv))
    gradients = (layout.unshard(shards) for shards in (dq, dk, dv))
    answer = Answer(result.out, result.lse, *gradients)
    return [is_wrong(answer, problem, name) for name in ("dq", "dk", "dv")]
