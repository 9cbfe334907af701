"""Values of whole sequences on several ranks: one process's numbers and gradients, whatever ranks weigh."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from lightning_cp.errors import ConfigError
from lightning_cp.layout import Documents, SequenceLayout
from lightning_cp.layout.axes import Flat
from lightning_cp.loss.sequence import SequenceTokens, gather_rows
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.utils.autograd_notes import is_frozen, note_sequence
from tests.helpers.pool import expect_on_every_rank, run_ranks

ROWS, LENGTH = 2, 37
GRIDS = [(2, 1), (1, 2), (3, 1), (2, 2)]


def documents_of(kind: str) -> Documents | None:
    if kind == "rows":
        return None
    if kind == "padded":
        mask = torch.ones(ROWS, LENGTH, dtype=torch.int64)
        mask[0, :9], mask[1, 20:] = 0, 0
        return Documents.from_padding_mask(mask)
    return Documents.from_cu_seqlens(torch.tensor([[0, 5, 30, 37], [0, 37, 37, 37]]))


def learned_of(weights: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Weights of tokens with a gradient, some of which are exactly 0."""
    return torch.where(weights > 0.3, weights * scale.exp(), scale - scale.detach())


def loss_of(
    x: torch.Tensor,
    weights: torch.Tensor,
    learned: torch.Tensor,
    tokens: SequenceTokens,
    group: Any,
) -> torch.Tensor:
    """A function of sums, means and single tokens that is not linear in any of them."""
    sums = tokens.sum(x.square(), weights).over(group)
    means = tokens.mean(x, weights > 0.5).over(group)
    last, first = (tokens.pick(x, at).over(group) for at in (-1, 0))
    every = tokens.sum(x).over(group)  # of padding, too, if it counted
    gated, pooled = (of(x, learned).over(group) for of in (tokens.sum, tokens.mean))
    found = (last * first + every).sin() + (gated * pooled).cos()
    return F.logsigmoid(sums.mean() - means.exp().sum()) + found.sum()


def on_ranks(
    rank: int, world_size: int, ring: int, ulysses: int, layout_kind: Any, kind: str, shares: Any
) -> tuple[float, torch.Tensor]:
    mesh = ContextParallelMesh(ring_size=ring, ulysses_size=ulysses)
    layout = SequenceLayout(LENGTH, ring, ulysses, layout_kind, documents_of(kind))
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(ROWS, LENGTH, 3, dtype=torch.float64, generator=generator)
    weights = torch.rand(ROWS, LENGTH, dtype=torch.float64, generator=generator)
    scale = torch.randn(3, dtype=torch.float64, generator=generator).requires_grad_()
    local = mesh.shard(whole, layout, pad_value=1e3)
    tokens = SequenceTokens.of(layout, mesh.cp_rank, ROWS)
    own_weights = mesh.shard(weights, layout)
    learned = learned_of(own_weights, scale[0])
    loss = loss_of(local * scale, own_weights, learned, tokens, mesh.group(Flat.CP))
    weight = shares[mesh.cp_rank] * mesh.cp_size / sum(shares)
    (loss * weight).backward()
    assert scale.grad is not None
    dist.all_reduce(scale.grad)  # the engine's mean
    mesh.destroy()
    return loss.item(), scale.grad / world_size


@pytest.mark.pairwise
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "balanced"])
@pytest.mark.parametrize("kind", ["rows", "padded", "packed"])
@pytest.mark.parametrize("shares", [(1, 1, 1, 1), (5, 0, 2, 1)])
def test_values_and_gradients_equal_one_process(
    grid: tuple[int, int], layout: str, kind: str, shares: tuple[int, ...]
) -> None:
    ring, ulysses = grid
    found = run_ranks(
        ring * ulysses, on_ranks, ring, ulysses, layout, kind, shares[: ring * ulysses]
    )
    ((want, gradient),) = run_ranks(1, on_ranks, 1, 1, "contiguous", kind, (1,))
    for loss, of_rank in found:
        assert loss == pytest.approx(want, rel=1e-12)
        torch.testing.assert_close(of_rank, gradient, rtol=1e-11, atol=1e-12)


def of_all_rows(
    rank: int, world_size: int, ring: int, data: int
) -> tuple[float, torch.Tensor, torch.Tensor]:
    mesh = ContextParallelMesh(ring_size=ring, data_parallel_shard_size=data)
    layout = SequenceLayout(LENGTH, ring, 1, "zigzag")
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(4, LENGTH, 3, dtype=torch.float64, generator=generator)
    rows = whole.chunk(data)[mesh.data_rank]
    scale = torch.randn(3, dtype=torch.float64, generator=generator).requires_grad_()
    local = mesh.shard(rows, layout) * scale
    tokens = SequenceTokens.of(layout, mesh.cp_rank, len(rows))
    own = tokens.mean(local.tanh()).over(mesh.group(Flat.CP))
    every = gather_rows(own, mesh.group(Flat.DATA))
    loss = F.cross_entropy(every @ every.T, torch.arange(4))  # each row against all others
    loss.backward()
    assert scale.grad is not None
    dist.all_reduce(scale.grad)
    mesh.destroy()
    return loss.item(), scale.grad / world_size, every.detach()


@pytest.mark.parametrize(("ring", "data"), [(1, 2), (2, 1), (2, 2)])
def test_a_loss_of_the_rows_of_all_data_ranks(ring: int, data: int) -> None:
    ((want, gradient, rows),) = run_ranks(1, of_all_rows, 1, 1)
    for loss, of_rank, every in run_ranks(ring * data, of_all_rows, ring, data):
        assert loss == pytest.approx(want, rel=1e-12)
        torch.testing.assert_close(every, rows, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(of_rank, gradient, rtol=1e-11, atol=1e-12)


def of_frozen_rows(rank: int, world_size: int) -> list[float]:
    every = gather_rows(note_sequence(torch.tensor([1.0, 2.0]) + rank), dist.group.WORLD)
    assert is_frozen(every)  # its backward ends there, without a message
    return every.tolist()


def test_rows_of_frozen_layers_of_all_data_ranks() -> None:
    assert run_ranks(3, of_frozen_rows) == [[1.0, 2.0, 2.0, 3.0, 3.0, 4.0]] * 3


def messages(rank: int, world_size: int) -> None:
    """One all-reduce of the result's size each way, whatever a token's values are."""
    mesh = ContextParallelMesh(ring_size=world_size)
    layout = SequenceLayout(LENGTH, world_size)
    tokens, group = SequenceTokens.of(layout, rank, ROWS), mesh.group(Flat.CP)
    x = torch.randn(ROWS, layout.local_len, 3, requires_grad=True)
    mask = torch.rand(ROWS, layout.local_len) < 0.5
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as send:
        for own, size in [
            (tokens.sum(x, mask), 6),
            (tokens.mean(x, mask), 8),  # and the sums of the mask
            (tokens.mean(x), 6),
            (tokens.pick(x, -1), 6),
        ]:
            send.reset_mock()
            value = own.over(group)
            assert [call.args[0].numel() for call in send.call_args_list] == [size]
            value.sum().backward()
            assert [call.args[0].numel() for call in send.call_args_list] == [size, size]
    mesh.destroy()


def test_messages() -> None:
    run_ranks(2, messages)


COLLECTIVES = (
    *(
        "all_reduce",
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_to_all_single",
    ),
    *("reduce_scatter_tensor", "broadcast", "batch_isend_irecv"),
)


def exchanges(rank: int, world_size: int) -> list[tuple[str, bool]]:
    """The messages of sums and of gathered rows, both ways, and whether each may come later."""
    found: list[tuple[str, bool]] = []

    def noting(name: str, own: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            found.append((name, kwargs.get("async_op", name == "batch_isend_irecv")))
            return own(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(mock.patch.object(dist, name, noting(name, getattr(dist, name))))
        on_ranks(rank, world_size, 2, 1, "zigzag", "packed", (1, 1))
        of_all_rows(rank, world_size, 1, 2)
    return found


def test_results_do_not_depend_on_when_data_arrives() -> None:
    """All messages block. One that does not needs a cell of ``LateDelivery``, as attention has."""
    for found in run_ranks(2, exchanges):
        assert {name for name, _ in found} == {"all_reduce", "all_gather", "all_to_all_single"}
        assert not any(is_late for _, is_late in found)


def second_derivative(rank: int, world_size: int, way: str) -> None:
    mesh = ContextParallelMesh(ring_size=world_size)
    layout, group = SequenceLayout(LENGTH, world_size), mesh.group(Flat.CP)
    tokens = SequenceTokens.of(layout, rank, ROWS)
    x = torch.randn(ROWS, layout.local_len, requires_grad=True)
    try:
        if way == "unshard":
            value = mesh.unshard(x, layout)
        elif way == "gather_data":
            value = gather_rows(x, group)
        else:
            of = {"sum": tokens.sum, "mean": tokens.mean, "pick": partial(tokens.pick, index=0)}
            value = of[way](x).over(group)
        torch.autograd.grad(value.square().sum(), x, create_graph=True)
    finally:
        mesh.destroy()


@pytest.mark.parametrize("way", ["sum", "mean", "pick", "unshard", "gather_data"])
def test_second_derivatives_are_refused(way: str) -> None:
    match = "of unshard, gather_data, .* has no second derivative"
    expect_on_every_rank(2, second_derivative, way, error=ConfigError, match=match)
