"""Other implementations beside ours: right or told to be wrong, and counted as the closed forms say."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard

from benchmarks import side_by_side
from benchmarks.peers import common as shards
from benchmarks.peers import flash_standin as stand_in
from benchmarks.peers import registry as peers
from benchmarks.peers import ring_flash_attn, torch_context_parallel, yunchang
from benchmarks.peers.registry import all_peers, peer_ways
from benchmarks.side_by_side import (
    Line,
    WayResult,
    all_ways,
    measure_rank,
    merge_ranks,
    peer_advantages,
)
from lightning_cp.bench.methods import AttentionCase, ContextParallelMethod
from lightning_cp.bench.processes import on_ranks
from lightning_cp.bench.timers import Figure, Samples
from lightning_cp.layout import HeadSplit, attention_traffic, schedule

HEADS, KV_HEADS, DIM = 4, 2, 8
DENSE = AttentionCase(48, 2, HEADS, KV_HEADS, DIM)
PACKED = replace(DENSE, tokens=90, packed=5)
UNEVEN = replace(DENSE, tokens=53)
CASES = {"dense": DENSE, "packed": PACKED, "padded": UNEVEN}


def measure_cases(
    cases: list[AttentionCase], notes: Path
) -> list[tuple[Samples, list[WayResult | str]]]:
    """On every rank, all ways; then PyTorch's public call, had it a rule for the CPU operator."""
    plain = F.scaled_dot_product_attention
    found = [measure_rank(case, all_ways(case), 1, notes) for case in cases]
    assert F.scaled_dot_product_attention is plain
    public = torch_context_parallel.PublicCall()
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers |= dict.fromkeys(torch_context_parallel.OPERATORS["cpu"], around_the_ring)
    torch_context_parallel._try_public.cache_clear()
    return [*found, measure_rank(UNEVEN, [public], 1, notes)]


def around_the_ring(operator: Any, args: Any, kwargs: Any) -> Any:
    """What the dispatcher of ``context_parallel`` does with CUDA's operators, for that of the CPU."""
    mesh = args[0].device_mesh
    args = [x.to_local() if isinstance(x, DTensor) else x for x in args]
    inner, common = torch_context_parallel._inner(), (mesh.get_group(), 2, operator)
    if len(args) < 7:
        q, k, v, dropout, causal = args
        found = inner._templated_ring_attention(
            *common, q, k, v, is_causal=causal, dropout_p=dropout, **kwargs
        )
    else:
        dout, q, k, v, out, lse, dropout, causal = args
        found = inner._templated_ring_attention_backward(
            *(*common, dout, "grad_out", q, k, v, out, lse),
            is_causal=causal,
            dropout_p=dropout,
            **kwargs,
        )
    return tuple(DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in found)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each of two found of each case, and of the public call."""
    return on_ranks(2, measure_cases, list(CASES.values()), tmp_path_factory.mktemp("notes"))


@pytest.fixture(scope="module")
def lines(ranks: list[Any]) -> dict[str, dict[str, Line]]:
    """Of each case, by name."""
    found: dict[str, dict[str, Line]] = {}
    for index, (name, case) in enumerate(CASES.items()):
        per_rank = [of_rank[index] for of_rank in ranks]
        found[name] = {
            way.name: merge_ranks(case, way, [rank[1][place] for rank in per_rank], 1.0)
            for place, way in enumerate(all_ways(case))
        }
    return found


@pytest.mark.parametrize("case", CASES)
def test_every_way_is_right_or_says_why_not(lines: dict[str, dict[str, Line]], case: str) -> None:
    for line in lines[case].values():
        assert line.obstacle is not None or line.error < 1e-5, line
        assert len(line.cells) == len(side_by_side.HEAD)
    ran = {name for name, line in lines[case].items() if line.obstacle is None}
    installed = {
        package for package in ("ring_flash_attn", "yunchang") if find_spec(package) is not None
    }
    assert {
        way.name for way in all_ways(CASES[case]) if isinstance(way, ContextParallelMethod)
    } < ran
    for peer in all_peers(CASES[case]):
        if peer.package in installed and (case != "packed" or peer.package == "ring_flash_attn"):
            assert (peer.name in ran) == (case != "packed" or "stripe" not in peer.name), peer
    assert "does not have a sharding strategy" in str(
        lines["dense"]["torch context_parallel"].obstacle
    )


def test_bytes_are_the_closed_forms(lines: dict[str, dict[str, Line]]) -> None:
    """Rings of peers send all keys, and gradients once more than needed.

    Ours sends rank 0 all keys of rank 1, which gets half of rank 0's, and sends their gradients home.
    """
    local = DENSE.tokens // 2 * DIM * 4
    keys, queries = KV_HEADS * local, HEADS * local
    gather = 2 * keys  # K and V to the one other rank
    once_more = 2 * gather
    wanted = {
        "ulysses": 2 * (2 * queries + 2 * keys) // 2,
        "zigzag ring": gather + gather + gather // 2,
        "zigzag_llama3 two_kernel/fused": gather + gather + gather,
        "ring-flash-attn zigzag": gather + gather + once_more,
        "ring-flash-attn ring": gather + gather + once_more,
        "ring-flash-attn llama3": gather + gather + gather,
        "torch's inner ring, alltoall": gather + gather + once_more,
        "torch's inner ring, allgather": gather + gather + once_more,
    }
    found = {name: lines["dense"][name] for name in wanted}
    ran = {name: line.sent for name, line in found.items() if line.obstacle is None}
    assert ran == {name: size for name, size in wanted.items() if name in ran}
    assert "ulysses" in ran
    # Agreements are told apart.
    assert found["ulysses"].control == 16  # a vote
    assert found["torch's inner ring, alltoall"].control == 0


@pytest.mark.parametrize("case", CASES)
def test_our_bytes_are_those_of_the_schedule(lines: dict[str, dict[str, Line]], case: str) -> None:
    for line in lines[case].values():
        if not isinstance(line.way, ContextParallelMethod):
            continue
        layout = line.way.sequence_layout(line.case)
        sent: list[int] = []
        for rank in range(2):
            passes = attention_traffic(
                schedule(layout, None, layout.mask),
                HeadSplit(HEADS, KV_HEADS, line.way.ulysses),
                rank,
                batch=1,
                head_dim=DIM,
                itemsize=4,
                accumulate_itemsize=4,
                exchange=line.way.exchange,
                kv_heads_per_gather=line.way.kv_heads_per_gather,
            )
            sent.append(sum(part.total_bytes for part in passes))
        assert line.sent == max(sent), line.way.name


def test_padding_and_calls(lines: dict[str, dict[str, Line]]) -> None:
    assert {line.padding for line in lines["dense"].values()} == {0}
    # Two ranks: own keys and one hop, forward and backward.
    assert lines["dense"]["zigzag ring"].kernels == 2 * 2 * 2
    assert lines["padded"]["zigzag ring"].padding == 3
    assert lines["packed"]["balanced ring"].error < 1e-5
    if find_spec("ring_flash_attn") is not None:
        padded = sum(-(-length // 4) * 4 for length in PACKED.lengths)
        packed = lines["packed"]["ring-flash-attn zigzag"]
        assert packed.padding == padded - PACKED.tokens > 0
        assert packed.kernels == 2 * 2 * 2 * len(PACKED.lengths)


def test_the_public_call_of_torch_is_measured_where_it_runs(ranks: list[Any]) -> None:
    way = torch_context_parallel.PublicCall()
    line = merge_ranks(UNEVEN, way, [of_rank[-1][1][0] for of_rank in ranks], 1.0)
    assert line.obstacle is None
    assert line.error < 1e-5
    assert (line.kernels, line.padding) == (2 * 2 * 2, 3)
    keys = KV_HEADS * 28 * DIM * 4
    assert line.sent == 4 * 2 * keys  # twice K and V, and their gradients once more than needed
    assert line.peak > 2 * keys


def test_this_process_has_no_stand_in(lines: dict[str, dict[str, Line]]) -> None:
    assert not isinstance(sys.modules.get("flash_attn"), stand_in.StandIn)
    assert "yunchang" not in sys.modules


def test_packages_to_install_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ring_flash_attn, yunchang):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    told = {peer.name: peer.obstacle(DENSE) for peer in all_peers(DENSE)}
    assert told["ring-flash-attn zigzag"] == "not installed: pip install ring-flash-attn"
    assert told["yunchang ulysses"] == "not installed: pip install yunchang"
    assert told["torch context_parallel"] is None  # until ranks try it
    monkeypatch.setattr(peers, "find_spec", lambda name: None if name != "torch" else True)
    assert {way.package for way in peer_ways(DENSE)} == {"torch"}
    monkeypatch.undo()
    four = replace(DENSE, ranks=4, packed=3)
    for peer in all_peers(four):
        if peer.package == "torch" or find_spec("yunchang") is None:
            continue
        if peer.package == "yunchang":
            assert "no documents" in str(peer.obstacle(four))
            assert ("K/V heads" in str(peer.obstacle(replace(four, packed=0)))) == (
                peer.name == "yunchang ulysses"
            )


def test_where_a_peer_has_less(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong ones do not count, and neither do obstacles."""
    named = {peer.name: peer for peer in all_peers(DENSE)}
    ratio = Figure(1.2, 0.1)
    own = Line(
        DENSE, ContextParallelMethod(2, 1), None, ratio, 1.3, sent=10**6, kernels=4, peak=3 * 10**6
    )
    better = replace(own, way=named["yunchang ulysses"], peak=2 * 10**6, ratio=Figure(1.25, 0))
    wrong = replace(own, way=named["ring-flash-attn ring"], peak=1, error=0.1)
    barred = Line(DENSE, named["torch context_parallel"], "fails")
    lines = [own, better, wrong, barred]
    assert list(peer_advantages(lines)) == [
        "- 48 tokens, 1 documents, 2 ranks: peak MB: yunchang ulysses 2.000, ours ulysses 3.000"
    ]
    monkeypatch.setattr(side_by_side, "compare", lambda *_: iter(lines))
    monkeypatch.setattr("sys.argv", ["side_by_side", "--tokens", "48", "--ranks", "2"])
    side_by_side.main()
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert [row[3] for row in rows[2:6]] == [line.way.name for line in lines]
    assert rows[2][4:] == ["1.200", "10%", "1.300", "1.00", "4", "0", "3.00", "0e+00"]
    assert rows[4][-1] == "1e-01 wrong"


def test_shards_hold_every_token_once() -> None:
    for found in (
        [shards.of_documents([7, 30, 16], 4, rank, zigzag=True) for rank in range(4)],
        [shards.of_documents([7, 30, 16], 4, rank, zigzag=False) for rank in range(4)],
        [shards.striped(53, 4, rank) for rank in range(4)],
        [shards.of_grid(53, 2, 2, rank) for rank in range(4)],
    ):
        assert len({len(positions) for positions in found}) == 1
        every = torch.cat(found)
        assert sorted(every[every < 53].tolist()) == list(range(53))
