"""What a replayed rank does: the calls of the real ring, all of them and no others; nothing is sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks import replay
from benchmarks.no_comm import Arrivals, OneRank, one_rank
from benchmarks.peers.common import of_documents
from benchmarks.replay import ZigzagCalls
from lightning_cp.bench.methods import AttentionCase, ContextParallelMethod
from lightning_cp.kernels.aten import AtenCpuFlash, AtenCudaFlash
from lightning_cp.kernels.auto import LONG_TILES
from lightning_cp.kernels.protocol import Output, Scores
from lightning_cp.kernels.select import kernels
from lightning_cp.layout import Mask, SequenceLayout, Tile
from tests.helpers import oracle
from tests.helpers.attention.wire import Wire
from tests.helpers.kernels.emulated import cuda_operators_on_cpu

CASE = AttentionCase(96, 4, 4, 2, 8, dtype=torch.float32)
KERNEL = AtenCpuFlash()


@contextmanager
def watched(name: str) -> Iterator[list[Tile]]:
    """The tiles that the operator is called with."""
    tiles: list[Tile] = []
    own = getattr(AtenCpuFlash, name)

    def call(self: Any, *inputs: Any) -> Any:
        tiles.append(inputs[-2])
        return own(self, *inputs)

    with mock.patch.object(AtenCpuFlash, name, call):
        yield tiles


def area(tile: Tile) -> int:
    """Visible pairs of a tile that is full, or causal and square."""
    return tile.q_len * (tile.q_len + 1) // 2 if tile.mask == "causal" else tile.q_len * tile.k_len


def passes(alone: OneRank) -> Any:
    alone.forward()
    return alone.backward()


@pytest.mark.parametrize("packed", [0, 5])
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ranks_together_compute_every_visible_pair_once(ranks: int, packed: int) -> None:
    case = replace(CASE, ranks=ranks, packed=packed)
    pairs = case.flops / (4 * case.head_dim * case.heads)
    way = ContextParallelMethod(1, ranks, kernel="aten_cpu_flash")
    with watched("attend") as forward, watched("differentiate") as backward:
        for rank in range(ranks):
            with one_rank(way, case, rank, arrived=True) as alone, Wire() as wire:
                passes(alone)
            assert wire.counts == {}
    assert sum(map(area, forward)) == sum(map(area, backward)) == pairs
    assert len(forward) == len(backward)


def test_a_dense_zigzag_rank_makes_one_call_a_hop() -> None:
    way = ContextParallelMethod(1, 4, kernel="aten_cpu_flash")
    for rank in range(4):
        with watched("attend") as calls, one_rank(way, CASE, rank, arrived=True) as alone:
            alone.forward()
        assert len(calls) == 4
        theirs = ZigzagCalls(KERNEL, Scores(1.0, Mask()), rank, 4).tiles(24)
        assert [(x.q_len, x.k_len, x.mask) for x in calls] == [
            (x.q_len, x.k_len, x.mask) for x in theirs
        ]


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_other_package_s_calls_are_attention(ranks: int) -> None:
    """Given every rank's keys in turn, its sequence of calls is exact; gradients are summed over ranks."""
    case = replace(CASE, dtype=torch.float64)
    q, k, v = (x.detach() for x in case.inputs(case.tokens))
    dout = torch.randn(q.shape, dtype=torch.float64)
    scores = Scores(case.head_dim**-0.5, Mask())
    want = oracle.attention(q, k, v, dout, causal=True)
    layout = SequenceLayout(case.tokens, ranks)
    shards = [[layout.shard(x, rank).float() for x in (q, k, v, dout)] for rank in range(ranks)]
    gradients = [(torch.zeros_like(shard[1]), torch.zeros_like(shard[2])) for shard in shards]
    outs: list[torch.Tensor] = []
    dqs: list[torch.Tensor] = []
    for rank, (own_q, _, _, own_dout) in enumerate(shards):
        calls = ZigzagCalls(KERNEL, scores, rank, ranks)

        def keys(step: int, rank: int = rank) -> tuple[torch.Tensor, torch.Tensor]:
            arrived = shards[(rank - step) % ranks]
            return arrived[1], arrived[2]

        out, lse = calls.forward(own_q, keys)

        def came(step: int, rank: int = rank) -> tuple[torch.Tensor, torch.Tensor]:
            return gradients[(rank - step) % ranks]

        dq, *own = calls.backward(Output(own_dout, out, lse), own_q, keys, came)
        outs.append(out)
        dqs.append(dq)
        for total, part in zip(gradients[rank], own, strict=True):
            total += part
    dk, dv = (layout.unshard([pair[at] for pair in gradients]) for at in range(2))
    found = (layout.unshard(outs), layout.unshard(dqs), dk, dv)
    for got, name in zip(found, ("out", "dq", "dk", "dv"), strict=True):
        torch.testing.assert_close(got.double(), getattr(want, name), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_other_package_s_packed_calls_are_attention(ranks: int) -> None:
    """Of documents that divide into two chunks a rank, its varlen calls are exact."""
    lengths = [2 * ranks * n for n in (1, 3, 2)]
    ends = list(accumulate(lengths))
    shape = (1, ends[-1], 4, 8)
    torch.manual_seed(5)
    q, dout = torch.randn(shape), torch.randn(shape)
    k, v = (torch.randn(*shape[:2], 2, 8) for _ in range(2))
    rows = [[(end - length, end) for end, length in zip(ends, lengths, strict=True)]]
    want = oracle.attention(q, k, v, dout, causal=True, documents=rows)
    held = [of_documents(lengths, ranks, rank, zigzag=True) for rank in range(ranks)]
    local = tuple(length // ranks for length in lengths)
    gradients = [(torch.zeros(1, sum(local), 2, 8), torch.zeros(1, sum(local), 2, 8)) for _ in held]
    found = {name: torch.empty_like(x) for name, x in (("out", q), ("dq", q), ("dk", k), ("dv", v))}
    own: list[Any] = []
    scores = Scores(8**-0.5, Mask())
    with cuda_operators_on_cpu():
        for rank, at in enumerate(held):
            calls = replay.PackedZigzagCalls(AtenCudaFlash(), scores, rank, ranks, local)

            def keys(step: int, rank: int = rank) -> tuple[torch.Tensor, torch.Tensor]:
                arrived = held[(rank - step) % ranks]
                return k[:, arrived], v[:, arrived]

            def came(step: int, rank: int = rank) -> tuple[torch.Tensor, torch.Tensor]:
                return gradients[(rank - step) % ranks]

            out, lse = calls.forward(q[:, at], keys)
            merged = Output(dout[:, at], out, lse)
            found["out"][:, at] = out
            dq, *dkv = calls.backward(merged, q[:, at], keys, came)
            found["dq"][:, at] = dq
            own.append(dkv)
    for at, dkv, others in zip(held, own, gradients, strict=True):
        found["dk"][:, at], found["dv"][:, at] = (a + b for a, b in zip(dkv, others, strict=True))
    for name, got in found.items():
        torch.testing.assert_close(got.double(), getattr(want, name), rtol=1e-4, atol=1e-5)


def test_packed_rows_have_the_other_package_s_calls() -> None:
    case = replace(CASE, packed=5)
    with (
        cuda_operators_on_cpu(),
        mock.patch.object(AtenCudaFlash, "capabilities", AtenCpuFlash().capabilities),
    ):
        rows = list(
            replay.packed_rows(case, "aten_cuda_flash", replay.Seconds(1.0, 1.0), repeats=1)
        )
    assert [row.calls for row in rows] == ["ours", "ring-flash-attention"]
    assert all(row.rate.forward > 0 and row.rate.backward > 0 for row in rows)
    assert rows[0].rate != rows[1].rate


def test_the_heaviest_ranks_are_replayed() -> None:
    plan = ContextParallelMethod(1, 8, layout="contiguous").schedule(replace(CASE, ranks=8))
    assert set(replay.heaviest(plan)) >= {6, 7}


def test_efficiency_is_the_whole_over_ranks_times_the_slowest() -> None:
    slowest = replay.Seconds.slowest([replay.Seconds(1.0, 4.0), replay.Seconds(2.0, 3.0)])
    assert (slowest.forward, slowest.backward, slowest.both) == (2.0, 4.0, 6.0)
    row = replay.DenseRow("k", "ours", 4, 64, replay.Seconds(6.0, 12.0), slowest)
    assert [row.efficiency(x) for x in ("forward", "backward", "both")] == [0.75, 0.75, 0.75]


def test_two_tables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--tokens-per-rank", "32", "--dense-ranks", "2", "--packed-ranks", "2", "4"]
    monkeypatch.setattr("sys.argv", ["replay", "--device", "cpu", "--repeats", "1", *sizes])
    replay.main()
    dense, packed = capsys.readouterr().out.split("\n\n")
    assert [row.split(" | ")[1] for row in dense.splitlines()[2:]] == [
        "ours",
        "ring-flash-attention",
    ]
    rows = [row.strip("| ").split(" | ") for row in packed.splitlines()[2:]]
    assert [row[2:6] for row in rows] == [["2", "2", "64", "4"], ["4", "3", "128", "8"]]
    assert len({*map(len, rows), len(replay.PACKED_HEAD)}) == 1


def test_what_arrives_is_there_already_and_as_large_as_asked() -> None:
    """Every hop has memory of its own; the next pass finds it again."""
    like = torch.empty(1, dtype=torch.float64)
    post = Arrivals()

    def one_pass() -> list[torch.Tensor | None]:
        post.begin()
        return [post(None, 0, shape, 1, like, None).wait() for shape in [(3, 2), (3, 2), (4, 2)]]

    first, again = one_pass(), one_pass()
    assert all(x is y for x, y in zip(first, again, strict=True))
    found = [x for x in first if x is not None]
    assert len({x.data_ptr() for x in found}) == 3
    assert [tuple(x.shape) for x in found] == [(3, 2), (3, 2), (4, 2)]
    assert {x.dtype for x in found} == {torch.float64}
    assert post(None, 0, None, 1, like, None).wait() is None


def test_hops_of_a_replayed_rank_read_memory_of_their_own() -> None:
    with one_rank(ContextParallelMethod(1, 4), CASE, 1, arrived=True) as alone, Wire() as wire:
        assert alone.arrivals is not None
        for _ in range(2):
            passes(alone)
        moved = dict(wire.counts)
        kept = [x for made in alone.arrivals._made.values() for x in made]
    assert len({x.data_ptr() for x in kept}) == len(kept) == 3 + 3  # keys, and gradients of our own
    with one_rank(ContextParallelMethod(1, 4), CASE, 1) as alone, Wire() as wire:
        alone.forward()
    assert moved == {} != wire.counts


def test_kernels_that_auto_chooses_are_replayed_where_they_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def kernels_of_a_gpu() -> dict[str, Any]:
        every = {name: kernel.capabilities for name, kernel in kernels().items()}
        able = {name: replace(each, obstacle=None) for name, each in every.items()}
        able["flash_attn_3"] = replace(able["flash_attn_3"], obstacle=lambda: "not installed")
        return {name: SimpleNamespace(capabilities=each) for name, each in able.items()}

    monkeypatch.setattr(replay, "kernels", kernels_of_a_gpu)
    size, names = replay.ReplaySizes(8192, [8], [8], 1), replay.KERNELS["cuda"]
    dense = replay.refusals(names, size.dense(8))
    assert dense == {"flash_attn_3": "cannot run: not installed"}
    packed = replay.refusals(names, size.packed(8))
    assert packed.keys() == {"aten_cuda_cudnn", "flash_attn_3"}
    assert "packed documents" in packed["aten_cuda_cudnn"]
    assert set(LONG_TILES[9][:3]) <= set(names)
