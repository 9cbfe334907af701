"""Gathers and all-to-alls: what they move, that each backward is the adjoint, and their sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_cp.attention.keys import split_pair
from lightning_cp.comm.all_gather import all_gather, start_all_gather, start_reduce_scatter
from lightning_cp.comm.all_to_all import gather_heads, scatter_heads
from lightning_cp.comm.reduce import all_sum
from lightning_cp.comm.transfer import start_transfer
from lightning_cp.layout import HeadSplit
from tests.helpers.pool import run_ranks

SIZES = [2, 3, 4, 8]
BATCH, TOKENS, DIM = 2, 5, 4


def world() -> dist.ProcessGroup:
    """The group of all ranks."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def draw(seed: int, *shape: int) -> torch.Tensor:
    """The same float64 tensor in every process."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dot(a: torch.Tensor, b: torch.Tensor) -> float:
    """The inner product of two tensors."""
    return float((a * b).sum())


def gathered(rank: int, world_size: int) -> tuple[float, float]:
    """This rank's share of <f(x), y> and of <x, f'(y)>."""
    x = draw(rank, 3, TOKENS).requires_grad_()
    shards = all_gather(x, world())
    for source, shard in enumerate(shards):
        assert torch.equal(shard, draw(source, 3, TOKENS))
    ys = [draw(100 + world_size * rank + source, 3, TOKENS) for source in range(world_size)]
    (dx,) = torch.autograd.grad(shards, x, ys)
    return sum(dot(a.detach(), y) for a, y in zip(shards, ys, strict=True)), dot(x.detach(), dx)


@pytest.mark.parametrize("world_size", SIZES)
def test_all_gather_and_its_adjoint(world_size: int) -> None:
    check_adjoint(run_ranks(world_size, gathered))


def check_adjoint(shares: Sequence[tuple[float, float]]) -> None:
    """<f(x), y> = <x, f'(y)>, summed over ranks."""
    left, right = (sum(parts) for parts in zip(*shares, strict=True))
    assert abs(left) > 1e-3  # random vectors are not orthogonal
    assert abs(left - right) <= 1e-12 * sum(abs(part) for part, _ in shares)


def gather_one_of_many(rank: int, world_size: int) -> torch.Tensor:
    """The gradient where only rank 1's shard is used, and only on rank 0."""
    x = draw(rank, 3, TOKENS).t().requires_grad_()  # not contiguous
    shards = all_gather(x, world())
    for source, shard in enumerate(shards):
        assert torch.equal(shard, draw(source, 3, TOKENS).t())
    loss = shards[1].sum() if rank == 0 else sum(shard.sum() * 0 for shard in shards)
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    assert x.grad is not None
    return x.grad


def test_unused_shards_have_no_gradient() -> None:
    for rank, gradient in enumerate(run_ranks(3, gather_one_of_many)):
        assert torch.equal(gradient, torch.full((TOKENS, 3), float(rank == 1), dtype=torch.float64))


def gather_and_scatter(rank: int, world_size: int) -> tuple[float, float]:
    """This rank's share of <f(x), y> and of <x, f'(y)>; x is not contiguous."""
    x = draw(rank, TOKENS, 6, DIM)[:, 1:4]
    whole = start_all_gather(x, world()).wait()
    every = [draw(source, TOKENS, 6, DIM)[:, 1:4] for source in range(world_size)]
    assert torch.equal(whole, torch.cat(every))
    back = start_reduce_scatter(whole, world()).wait()
    torch.testing.assert_close(back, world_size * x, rtol=1e-15, atol=0)
    y = draw(100 + rank, world_size * TOKENS, 6, DIM)[:, 1:4]
    return dot(whole, y), dot(x, start_reduce_scatter(y, world()).wait())


@pytest.mark.parametrize("world_size", [1, *SIZES])
def test_gathering_keys_and_sending_gradients_home_are_adjoints(world_size: int) -> None:
    check_adjoint(run_ranks(world_size, gather_and_scatter))


def sum_of_ranks(rank: int, world_size: int) -> None:
    """Each rank's part of the sum, in bits: added in rank order."""
    parts = [draw(source, world_size, TOKENS) for source in range(world_size)]
    total = start_reduce_scatter(parts[rank], world()).wait()
    assert torch.equal(total, torch.stack([part[rank : rank + 1] for part in parts]).sum(0))


def test_gradients_add_up_in_rank_order() -> None:
    run_ranks(4, sum_of_ranks)


def gather_several(rank: int, world_size: int) -> None:
    """Two tensors travel as one, head by head, each as wide as it is."""
    pairs = [
        [draw(2 * source + at, TOKENS, 1, 3, dim) for at, dim in enumerate((DIM, 5))]
        for source in range(world_size)
    ]
    whole = start_all_gather(pairs[rank], world()).wait()
    for at, got in enumerate(split_pair(whole, DIM)):
        assert torch.equal(got, torch.cat([pair[at] for pair in pairs]))


def scatter_in_another_order(rank: int, world_size: int) -> None:
    """Early halves of all shards first, then the late ones from the last rank on, as in zigzag."""
    early = [(2 * at, 2 * at + 1) for at in range(world_size)]
    order = (*early, *((end, end + 1) for _, end in reversed(early)))
    x = draw(rank, 2 * world_size, DIM)
    plain = start_reduce_scatter(x, world()).wait()
    moved = torch.cat([x[start:end] for start, end in order])
    assert torch.equal(start_reduce_scatter(moved, world(), order=order).wait(), plain)


def scatter_as_with_nccl(rank: int, world_size: int) -> None:
    """The same by the backend's own reduce-scatter, which gloo has too: against the sum of all parts."""
    early = [(2 * at, 2 * at + 1) for at in range(world_size)]
    order = (*early, *((end, end + 1) for _, end in reversed(early)))
    parts = [draw(source, 2 * world_size, 6, DIM)[:, 1:4] for source in range(world_size)]
    want = torch.stack(parts).sum(0)[2 * rank : 2 * rank + 2]
    moved = torch.cat([parts[rank][start:end] for start, end in order])
    with mock.patch.object(dist, "get_backend", return_value=dist.Backend.NCCL):
        for x, how in ((parts[rank], None), (parts[rank], ((0, len(moved)),)), (moved, order)):
            with mock.patch.object(dist, "all_to_all_single", side_effect=AssertionError):
                total = start_reduce_scatter(x, world(), order=how).wait()
            torch.testing.assert_close(total, want, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("check", [gather_several, scatter_in_another_order, scatter_as_with_nccl])
def test_what_lies_apart_travels_in_rank_order(check: Callable[[int, int], None]) -> None:
    for world_size in (1, 3):
        run_ranks(world_size, check)


def send_and_return(rank: int, world_size: int, hop: int) -> tuple[float, float]:
    """Keys go hop ranks on, their gradients as many back: this rank's share of both products."""
    ahead, behind = (rank + hop) % world_size, (rank - hop) % world_size
    x, y = draw(rank, TOKENS, DIM), draw(100 + rank, TOKENS, DIM)
    there = start_transfer(x, ahead, x.shape, behind, x, world()).wait()
    home = start_transfer(y, behind, y.shape, ahead, y, world()).wait()
    assert there is not None
    assert home is not None
    back = start_transfer(there, behind, x.shape, ahead, x, world()).wait()
    assert back is not None
    assert torch.equal(back, x)
    return dot(there, y), dot(x, home)


@pytest.mark.parametrize(("world_size", "hop"), [(2, 1), (3, 1), (3, 2), (4, 2), (8, 5)])
def test_a_hop_and_the_way_home_are_adjoints(world_size: int, hop: int) -> None:
    check_adjoint(run_ranks(world_size, send_and_return, hop))


def head_ranges(num_heads: int, num_kv_heads: int, world_size: int) -> list[tuple[int, int]]:
    """K/V heads that each rank needs; the query heads for equal numbers."""
    split = HeadSplit(num_heads, num_kv_heads, world_size)
    return [split.kv_range(rank) for rank in range(world_size)]


def scatter(rank: int, world_size: int, num_heads: int, num_kv_heads: int) -> tuple[float, float]:
    """This rank's share of <f(x), y> and of <x, f'(y)>; x comes back as often as it was sent."""
    ranges = head_ranges(num_heads, num_kv_heads, world_size)
    first, last = ranges[rank]
    x = draw(rank, BATCH, TOKENS, num_kv_heads, DIM)
    (heads,) = scatter_heads([(x,)], [ranges], rank, world()).wait()
    every = [draw(source, BATCH, TOKENS, num_kv_heads, DIM) for source in range(world_size)]
    assert torch.equal(heads, torch.cat(every, dim=1)[:, :, first:last].transpose(0, 1))

    (back,) = gather_heads([[heads]], [ranges], rank, world()).wait()
    holders = [sum(a <= head < b for a, b in ranges) for head in range(num_kv_heads)]
    torch.testing.assert_close(back, x * torch.tensor(holders).view(-1, 1), rtol=1e-15, atol=0)
    if num_heads == num_kv_heads:
        assert torch.equal(back, x)

    y = draw(100 + rank, *heads.shape)
    (adjoint,) = gather_heads([[y]], [ranges], rank, world()).wait()
    return dot(heads, y), dot(x, adjoint)


@pytest.mark.quick("2-*", "3-*", "4-8-1", "8-16-4")
@pytest.mark.parametrize(
    ("world_size", "num_heads", "num_kv_heads"),
    [
        *[(size, 2 * size, 2 * size) for size in SIZES],
        *[(size, 2 * size, 1) for size in SIZES],  # every rank holds the only K/V head
        (2, 6, 3),
        (3, 12, 4),
        (4, 12, 3),
        (8, 24, 3),
        (8, 16, 4),
    ],
)
def test_heads_are_scattered_and_gathered_by_adjoints(
    world_size: int, num_heads: int, num_kv_heads: int
) -> None:
    check_adjoint(run_ranks(world_size, scatter, num_heads, num_kv_heads))


def scatter_strided(rank: int, world_size: int, dtype: torch.dtype) -> None:
    ranges = head_ranges(4, 4, world_size)
    x = draw(rank, BATCH, 4, TOKENS, DIM).to(dtype).transpose(1, 2)
    (heads,) = scatter_heads([(x,)], [ranges], rank, world()).wait()
    assert heads.dtype == dtype
    strided = heads.transpose(0, 1).contiguous().transpose(0, 1)
    (back,) = gather_heads([[strided]], [ranges], rank, world()).wait()
    assert torch.equal(back, x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_strided_heads_come_back_in_every_dtype(dtype: torch.dtype) -> None:
    run_ranks(2, scatter_strided, dtype)


def together(rank: int, world_size: int, num_heads: int, num_kv_heads: int, value_dim: int) -> None:
    """Queries, keys and values in one message: what comes is what comes one by one."""
    queries = head_ranges(num_heads, num_heads, world_size)
    keys = head_ranges(num_heads, num_kv_heads, world_size)
    q, k, v = (
        draw(10 * rank + at, BATCH, TOKENS, heads, dim)
        for at, (heads, dim) in enumerate(
            ((num_heads, DIM), (num_kv_heads, DIM), (num_kv_heads, value_dim))
        )
    )
    q_TBHD, kv_TBKD = scatter_heads([(q,), (k, v)], [queries, keys], rank, world()).wait()
    alone = [
        scatter_heads([(x,)], [ranges], rank, world()).wait()[0]
        for x, ranges in ((q, queries), (k, keys), (v, keys))
    ]
    for got, want in zip((q_TBHD, *split_pair(kv_TBKD, DIM)), alone, strict=True):
        assert torch.equal(got, want)

    narrow = torch.float32
    pending = gather_heads([alone[:1], alone[1:]], [queries, keys], rank, world(), narrow)
    dq, dk, dv = pending.wait()
    for got, sent, ranges in zip((dq, dk, dv), alone, (queries, keys, keys), strict=True):
        (want,) = gather_heads([[sent.to(narrow)]], [ranges], rank, world()).wait()
        assert got.dtype == narrow
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("world_size", "num_heads", "num_kv_heads"),
    [(2, 4, 4), (2, 6, 3), (4, 8, 4), (4, 12, 3), (4, 8, 1)],
)
@pytest.mark.parametrize("value_dim", [DIM, DIM - 2, DIM + 3])
def test_one_message_brings_what_several_bring(
    world_size: int, num_heads: int, num_kv_heads: int, value_dim: int
) -> None:
    run_ranks(world_size, together, num_heads, num_kv_heads, value_dim)


def empty_batch(rank: int, world_size: int, num_kv_heads: int) -> None:
    ranges = head_ranges(4, num_kv_heads, world_size)
    first, last = ranges[rank]
    x = torch.zeros(0, TOKENS, num_kv_heads, DIM)
    (heads,) = scatter_heads([(x, x)], [ranges], rank, world()).wait()
    assert heads.shape == (world_size * TOKENS, 0, last - first, 2 * DIM)
    for back in gather_heads([list(split_pair(heads, DIM))], [ranges], rank, world()).wait():
        assert back.shape == x.shape


@pytest.mark.parametrize("num_kv_heads", [4, 1])
def test_no_rows_are_no_error(num_kv_heads: int) -> None:
    run_ranks(2, empty_batch, num_kv_heads)


def sum_over(rank: int, world_size: int) -> torch.Tensor:
    x = torch.tensor([rank, 10.0 * rank], requires_grad=True)
    total = all_sum(x, world())
    assert torch.equal(x.detach(), torch.tensor([rank, 10.0 * rank]))
    assert not total.requires_grad
    return total


def test_all_sum_leaves_its_input() -> None:
    for total in run_ranks(3, sum_over):
        assert torch.equal(total, torch.tensor([3.0, 30.0]))
