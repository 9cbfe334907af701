"""Capped and biased scores, and the largest of them, through schedules and in blocks of all sizes.

The last tests show that the cells can fail: each breaks one thing and must turn them red.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from lightning_cp.kernels import reference
from lightning_cp.kernels.protocol import Kernel
from lightning_cp.layout.tiles import Tile
from tests.helpers import oracle
from tests.helpers.kernels.cells import (
    DOCUMENTS,
    HEADS,
    LAYOUTS,
    MASKS,
    REFERENCE,
    SEQ_LEN,
    WINDOWS,
)
from tests.helpers.kernels.dense import (
    SCALE,
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

CAP = 1.5
BY_HEAD = 0.3 * torch.cos(torch.arange(4, dtype=torch.float32) + 0.5)
BY_ROW = 0.3 * torch.cos(torch.arange(8, dtype=torch.float32) + 0.5).view(2, 4)
HOW: dict[str, oracle.Scores] = {
    "softcap": oracle.Scores(softcap=CAP),
    "alibi": oracle.Scores(alibi_slopes=BY_HEAD),
    "both": oracle.Scores(softcap=CAP, alibi_slopes=BY_ROW),
}
KERNELS: dict[str, Kernel] = {"reference": REFERENCE}
CASES = [(kernel, how) for kernel in KERNELS for how in HOW]


def problem_of(mask: str, how: str, documents: str = "dense", heads: str = "gqa") -> Problem:
    masks = MASKS | WINDOWS
    return Problem(masks[mask], HEADS[heads], DOCUMENTS[documents], seq_len=SEQ_LEN, how=HOW[how])


@pytest.mark.quick(
    "reference-softcap-causal-dense-1",
    "reference-softcap-window-dense-2_zigzag",
    "reference-softcap-window-rows-3_zigzag",
    "reference-softcap-lookahead-packed-3_contiguous",
    "reference-alibi-causal-dense-1",
    "reference-alibi-lookahead-dense-2_zigzag",
    "reference-both-lookahead-rows-1",
)
@pytest.mark.parametrize("layout", ["1", "2_zigzag", "3_zigzag", "3_contiguous"])
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("mask", ["full", "causal", "window", "lookahead"])
@pytest.mark.parametrize(("kernel", "how"), CASES)
def test_equals_dense(kernel: str, how: str, mask: str, documents: str, layout: str) -> None:
    problem = problem_of(mask, how, documents)
    check(sharded(problem, KERNELS[kernel], LAYOUTS[layout]), problem)


@pytest.mark.parametrize("heads", ["mha", "mqa"])
@pytest.mark.parametrize(("kernel", "how"), CASES)
def test_other_groups_of_heads(kernel: str, how: str, heads: str) -> None:
    problem = problem_of("causal", how, "rows", heads)
    check(sharded(problem, KERNELS[kernel], LAYOUTS["3_zigzag"]), problem)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kernel", "how"), CASES)
def test_equals_dense_in_lower_precision(kernel: str, how: str, dtype: torch.dtype) -> None:
    problem = in_dtype(problem_of("causal", how, "rows"), dtype)
    check(sharded(problem, KERNELS[kernel], LAYOUTS["3_zigzag"]), problem)


@pytest.mark.quick("reference-softcap-causal-packed-3_zigzag")
@pytest.mark.pairwise
@pytest.mark.parametrize("layout", ["1", "3_zigzag"])
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
@pytest.mark.parametrize(("kernel", "how"), CASES)
def test_the_largest_scores(kernel: str, how: str, mask: str, documents: str, layout: str) -> None:
    """Of the scores as they enter the softmax; -inf for padding; not where nobody asks."""
    scores = replace(HOW[how], max_logits=True)
    problem = replace(problem_of(mask, how, documents), how=scores)
    q, k, v, dout = problem.tensors()
    want = oracle.attend(q, k, v, dout, problem.visible(), SCALE, scores).max_logits
    assert want is not None
    chosen, spread = KERNELS[kernel], LAYOUTS[layout]
    for rank in range(spread.ring_size):
        part = Rank(problem, chosen, spread, rank)
        part.forward(q, k, v)
        assert part.state is not None
        expected = spread.shard(want, rank, dim=2, pad_value=-torch.inf)
        assert oracle.max_error(part.state.max_logits, expected) < 1e-6
        unasked = Rank(replace(problem, how=HOW[how]), chosen, spread, rank)
        unasked.forward(q, k, v)
        assert unasked.state is not None
        assert (unasked.state.max_logits == -torch.inf).all()


# -- red -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOW)
def test_red_without_the_feature(how: str) -> None:
    problem = problem_of("causal", how)
    plain = dense(replace(problem, how=oracle.PLAIN))
    assert all(is_wrong(plain, problem, name) for name in Answer._fields)


def test_red_when_the_derivative_of_the_cap_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right out and lse, wrong dq and dk."""
    problem = problem_of("causal", "softcap")

    def none(capped: torch.Tensor, softcap: float) -> torch.Tensor:
        return torch.ones_like(capped)

    monkeypatch.setattr(reference, "_cap_derivative", none)
    answer = sharded(problem, REFERENCE, LAYOUTS["2_zigzag"])
    assert [name for name in Answer._fields if is_wrong(answer, problem, name)] == ["dq", "dk"]


@pytest.mark.parametrize(
    "change", [lambda t: t._replace(delta=t.delta + 1), lambda t: t._replace(delta=0)]
)
def test_red_when_distances_are_not_global(change: Callable[[Tile], Tile]) -> None:
    """All tiles are full here, so that a wrong delta changes the bias and no mask."""
    problem = problem_of("full", "alibi")
    broken = with_tiles(REFERENCE, lambda tiles: [change(tile) for tile in tiles])
    answer = sharded(problem, broken, LAYOUTS["3_zigzag"])
    assert all(is_wrong(answer, problem, name) for name in Answer._fields)


def test_red_when_slopes_are_of_another_row() -> None:
    problem = problem_of("full", "both")
    other = oracle.Scores(softcap=CAP, alibi_slopes=BY_ROW.flip(0))
    answer = sharded(replace(problem, how=other), REFERENCE, LAYOUTS["3_zigzag"])
    assert all(is_wrong(answer, problem, name) for name in Answer._fields)
