"""Ranks that make different calls: an error on every rank, before any data moves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from lightning_cp.attention.api import context_parallel_attention
from lightning_cp.attention.spec import AttentionSpec
from lightning_cp.errors import BatchMismatchError, ConfigError, RankFailure, ShapeError
from lightning_cp.layout import Documents, SequenceLayout
from tests.helpers.attention.distributed import mesh_of
from tests.helpers.attention.problems import Grid
from tests.helpers.attention.wire import Wire
from tests.helpers.pool import RankError, expect_on_every_rank, run_ranks

GRIDS = [Grid(2), Grid(1, 2), Grid(2, 2)]


CAUSAL = AttentionSpec()


@dataclass(frozen=True)
class Call:
    """The arguments of one rank's call."""

    batch: int = 2
    length: int = 47
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    dtype: torch.dtype = torch.float32
    kind: str = "zigzag"
    documents: tuple[int, ...] | None = None
    spec: AttentionSpec = CAUSAL
    kernel: str = "reference"
    returned: str = ""
    """What to return beside the output."""
    exchange: str = "ring"
    trained: bool = False
    """Whether the queries require a gradient."""
    short_by: int = 0
    """Tokens that are missing from what the layout says."""


PLAIN = Call()
DIFFERENT: dict[str, Call] = {
    "batch": Call(batch=3),
    "local tokens": Call(length=63),
    "heads": Call(heads=6),
    "head dim": Call(head_dim=16),
    "K/V heads": Call(kv_heads=4),
    "dtype": Call(dtype=torch.bfloat16),
    "sequence length": Call(length=48),
    "documents": Call(documents=(0, 20, 47)),
    "causality and window": Call(spec=AttentionSpec(causal=False)),
    "softmax_scale": Call(spec=AttentionSpec(softmax_scale=0.5)),
    "whether backward comes through": Call(trained=True),
    "kernel": Call(kernel="aten"),
    "alibi slopes": Call(spec=AttentionSpec(alibi_slopes=torch.ones(4))),
    "sinks": Call(spec=AttentionSpec(sinks=torch.ones(4))),
    "what is returned": Call(returned="return_lse"),
    "exchange": Call(exchange="all_gather"),
}


def make(rank: int, world_size: int, calls: dict[int, Call], grid: Grid) -> None:
    """Call attention with the arguments of this rank; nothing but the agreement may be sent."""
    call = calls.get(rank, PLAIN)
    rows = None if call.documents is None else Documents.from_cu_seqlens(call.documents)
    layout: Any = SequenceLayout(call.length, grid.ring, grid.ulysses, call.kind, rows)  # type: ignore[arg-type]
    shape = (call.batch, layout.local_len - call.short_by)
    q = torch.zeros(*shape, call.heads, call.head_dim, dtype=call.dtype)
    k = torch.zeros(*shape, call.kv_heads, call.head_dim, dtype=call.dtype)
    q.requires_grad_(call.trained)
    with mesh_of(grid) as mesh, Wire() as wire:
        try:
            returned: dict[str, Any] = {call.returned: True} if call.returned else {}
            how: dict[str, Any] = {"spec": call.spec, "kernel": call.kernel, **returned}
            how["exchange"] = call.exchange
            context_parallel_attention(q, k, k, mesh=mesh, layout=layout, **how)
        finally:
            moved = set(wire.counts) & {"alltoall_base_", "send", "recv_"}
            assert not moved, f"data moved although the ranks disagree: {moved}"


@pytest.mark.quick("kernel-ring 2 zigzag")
@pytest.mark.pairwise
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("field", DIFFERENT)
def test_a_different_call_is_named_on_every_rank(field: str, grid: Grid) -> None:
    odd = grid.world_size - 1
    expect_on_every_rank(
        grid.world_size,
        make,
        {odd: DIFFERENT[field]},
        grid,
        error=BatchMismatchError,
        match=rf"context_parallel_attention: ranks .* disagree on {field} .*rank {odd}: ",
    )


OTHER_SPECS = {
    "window .rank 0: .True, .5, -1..*": AttentionSpec(window=(5, -1)),
    r"softmax_scale .rank 0: 0\.5, rank 1: 0\.50001": AttentionSpec(softmax_scale=0.5),
    r"softcap .rank 0: 30\.0, rank 1: 0\.0": AttentionSpec(softcap=30.0),
}


@pytest.mark.parametrize("part", OTHER_SPECS)
def test_every_part_of_the_mask_and_the_scores_counts(part: str) -> None:
    """Shown as they were given, with advice on calls and not on batches."""
    almost = AttentionSpec(softmax_scale=0.50001) if "scale" in part else CAUSAL
    calls = {0: Call(spec=OTHER_SPECS[part]), 1: Call(spec=almost)}
    match = f"disagree on .*{part}.*make the same call, with the same settings"
    expect_on_every_rank(2, make, calls, Grid(2), error=BatchMismatchError, match=match)


@pytest.mark.parametrize(
    ("kind", "documents"),
    [("contiguous", None), ("zigzag", (0, 21, 47)), ("contiguous", (0, 20, 47))],
)
def test_layouts_of_equal_size_are_told_apart(kind: str, documents: tuple[int, ...] | None) -> None:
    plain = Call(documents=(0, 20, 47) if documents else None, length=47)
    calls = {0: plain, 1: replace(plain, kind=kind, documents=documents)}
    field = "layout" if kind == "contiguous" else "documents"
    expect_on_every_rank(
        2, make, calls, Grid(2), error=BatchMismatchError, match=f"disagree on {field}"
    )


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_refused_rank_raises_its_own_error_and_the_others_carry_it(grid: Grid) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(grid.world_size, make, {1: Call(short_by=1)}, grid)
    errors = caught.value.errors
    assert list(errors) == list(range(grid.world_size))
    for rank, error in errors.items():
        assert isinstance(error, ShapeError if rank == 1 else RankFailure), error
        assert "the layout gives each rank" in str(error)
        assert rank == 1 or "rank 1 raised ShapeError" in str(error)


def make_nonsense(rank: int, world_size: int, argument: str) -> None:
    """A call in which rank 0 passes something of the wrong type."""
    call: dict[str, Any] = {
        **dict.fromkeys(("q_BLHD", "k_BLKD", "v_BLKD"), torch.zeros(1, 8, 2, 4)),
        "layout": SequenceLayout(16, 2),
        "kernel": "reference",
    }
    if not rank:
        call[argument] = [None]
    with mesh_of(Grid(2)) as mesh:
        context_parallel_attention(mesh=mesh, **call)


@pytest.mark.parametrize(
    ("argument", "error"),
    [
        ("q_BLHD", ConfigError),
        ("v_BLKD", ConfigError),
        ("layout", ConfigError),
        ("kernel", TypeError),
    ],
)
def test_even_an_error_of_no_type_of_ours_reaches_every_rank(
    argument: str, error: type[Exception]
) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, make_nonsense, argument, timeout=20)
    errors = caught.value.errors
    assert type(errors[0]) is error
    assert isinstance(errors[1], RankFailure), errors[1]
    assert f"rank 0 raised {type(errors[0]).__name__}" in str(errors[1])
