"""Packing short tiles into one launch: what goes together, and that nothing is lost or counted twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from lightning_cp.kernels import varlen as packs
from lightning_cp.kernels.aten import AtenCudaFlash
from lightning_cp.kernels.protocol import QKV, Scores
from lightning_cp.kernels.varlen import FlashCall, PackRule, Spans, flash_mask, pack_tiles
from lightning_cp.layout.documents import Documents
from lightning_cp.layout.mask import Mask
from lightning_cp.layout.sequence import SequenceLayout
from lightning_cp.layout.tiles import ALL_ROWS, Tile, schedule
from tests.helpers.kernels.cells import (
    DOCUMENTS,
    HEADS,
    LAYOUTS,
    MASKS,
    SEQ_LEN,
    WINDOWS,
    intervals,
)
from tests.helpers.kernels.dense import Problem, check, in_dtype, is_wrong, run, sharded
from tests.helpers.kernels.emulated import cuda_operators_on_cpu
from tests.unit.kernels.test_tile_lists import check_tiles, draw, paired, token_first

ALWAYS = PackRule(fewest=1)
PACKED = AtenCudaFlash(ALWAYS)
Token = tuple[int, int]


@pytest.fixture(autouse=True)
def _emulated() -> Iterator[None]:
    with cuda_operators_on_cpu():
        yield


class Spy(AtenCudaFlash):
    """Notes its calls: the number of sequences of each (0: dense), and their queries."""

    def __init__(self, rule: PackRule = PackRule()) -> None:  # noqa: B008 - a constant
        super().__init__(rule)
        self.sequences: list[int] = []
        self.queries: list[torch.Tensor] = []

    @override
    def run_forward(
        self, inputs: QKV, call: FlashCall, scores: Scores
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.sequences.append(len(call.cu_seqlens[0]) - 1 if call.cu_seqlens else 0)
        self.queries.append(inputs.q)
        return super().run_forward(inputs, call, scores)


@pytest.mark.pairwise
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("heads", ["mha", "gqa"])
@pytest.mark.parametrize("mask", MASKS | WINDOWS)
def test_packed_is_exact(mask: str, heads: str, documents: str, layout: str) -> None:
    problem = Problem((MASKS | WINDOWS)[mask], HEADS[heads], DOCUMENTS[documents], seq_len=SEQ_LEN)
    check(sharded(problem, PACKED, LAYOUTS[layout]), problem)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    problem = in_dtype(Problem(Mask(), intervals=DOCUMENTS["rows"]), dtype)
    answer = sharded(problem, PACKED, LAYOUTS["2_zigzag"])
    assert {x.dtype for x in answer[1:]} == {torch.float32}
    check(answer, problem)


MANY = (intervals(*[3] * 17, 2), intervals(5, *[4] * 12))


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=False), Mask(window=(1, -1))], ids=str)
def test_many_short_documents_are_one_launch_each_kind(mask: Mask) -> None:
    problem = Problem(mask, intervals=MANY, seq_len=SEQ_LEN)
    spy = Spy()
    check(sharded(problem, spy, LAYOUTS["1"]), problem)
    assert sum(spy.sequences) >= 30  # of 31 documents
    assert len(spy.sequences) <= 2


def test_few_tiles_are_called_where_they_lie() -> None:
    spy = Spy()
    problem = Problem(Mask())
    check(sharded(problem, spy, LAYOUTS["2_zigzag"]), problem)
    assert set(spy.sequences) == {0}
    q, k, v, _ = draw(17, 17)
    run(spy, (q, k, v, q), [Tile(ALL_ROWS, 0, 17, 0, 17, 0, "causal")], Mask())
    assert spy.queries[-1].data_ptr() == q.data_ptr()


def test_long_tiles_stay_alone() -> None:
    spy = Spy(PackRule(fewest=2, longest=4))
    rows = (intervals(20, 3, 2, 3, 25),)
    problem = Problem(Mask(), intervals=rows, seq_len=SEQ_LEN)
    check(sharded(problem, spy, LAYOUTS["1"]), problem)
    assert sorted(spy.sequences) == [0, 0, 2 * 3]  # three short documents in two rows


@pytest.mark.parametrize("store", [token_first, paired])
def test_documents_end_to_end_are_not_copied(store) -> None:  # type: ignore[no-untyped-def]
    q, k, v, dout = (store(x[:1]) for x in draw(16, 16))
    tiles = [Tile(0, at, 4, at, 4, 0, "causal") for at in range(0, 16, 4)]
    spy = Spy()
    answer = run(spy, (q, k, v, dout), tiles, Mask())
    assert spy.sequences == [4]
    assert spy.queries[0].data_ptr() == q.data_ptr()
    dense = run(AtenCudaFlash(PackRule(fewest=99)), (q, k, v, dout), tiles, Mask())
    assert all(torch.equal(a, b) for a, b in zip(answer, dense, strict=True))


def test_queries_and_keys_in_several_tiles() -> None:
    tiles = [
        Tile(0, 0, 17, 0, 3, 0, "full"),
        Tile(0, 2, 9, 3, 5, 0, "full"),
        Tile(0, 11, 6, 3, 5, 0, "full"),  # the keys of the one before
        Tile(1, 0, 4, 0, 4, 0, "causal"),
        Tile(1, 1, 3, 4, 2, 0, "full"),
        Tile(ALL_ROWS, 5, 9, 9, 9, 0, "causal"),
        Tile(ALL_ROWS, 0, 1, 18, 1, 0, "full"),
        Tile(0, 0, 0, 0, 5, 0, "full"),
    ]
    spy = Spy(ALWAYS)
    check_tiles(spy, draw(), tiles, Mask())
    assert len(spy.sequences) < len(tiles) - 1


def test_red_when_a_key_is_taken_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (intervals(16, 21, 16),)
    problem = Problem(Mask(causal=False, window=(9, 9)), intervals=rows, seq_len=SEQ_LEN)
    layout = SequenceLayout(SEQ_LEN, ring_size=4)
    check(sharded(problem, AtenCudaFlash(ALWAYS), layout), problem)
    monkeypatch.setattr(packs, "_disjoint", lambda tiles: [sorted(tiles)])
    packs._cached_packs.cache_clear()
    answer = sharded(problem, AtenCudaFlash(ALWAYS), layout)
    packs._cached_packs.cache_clear()
    assert is_wrong(answer, problem, "dk")


@st.composite
def squares(draw_: st.DrawFn) -> tuple[Tile, ...]:
    """Full tiles anywhere, and causal ones that are square."""
    tiles: list[Tile] = []
    for _ in range(draw_(st.integers(0, 12))):
        row = draw_(st.sampled_from([ALL_ROWS, 0, 1]))
        at, keys = draw_(st.integers(0, 20)), draw_(st.integers(0, 20))
        size, k_len = draw_(st.integers(1, 8)), draw_(st.integers(1, 8))
        if draw_(st.booleans()):
            tiles.append(Tile(row, at, size, keys, size, 0, "causal"))
        else:
            tiles.append(Tile(row, at, size, keys, k_len, 0, "full"))
    return tuple(tiles)


def tokens(spans: Spans) -> list[Token]:
    """(row, token) of each packed token."""
    if spans.run is None:
        rows, positions = spans.index(torch.device("cpu"))
        return list(zip(rows.tolist(), positions.tolist(), strict=True))
    row, start = spans.run
    return [(row, start + i) for i in range(spans.total)]


@settings(max_examples=200)
@given(tiles=squares(), fewest=st.integers(1, 5), longest=st.integers(2, 8))
def test_every_tile_is_somewhere_and_no_token_twice(
    tiles: tuple[Tile, ...], fewest: int, longest: int
) -> None:
    batch = 2
    alone, packed = pack_tiles(tiles, Mask(), batch, PackRule(fewest, longest))
    found: Counter[object] = Counter()
    for tile in alone:
        rows = range(batch) if tile.row == ALL_ROWS else [tile.row]
        found.update((flash_mask(tile, Mask()), pairs(tile._replace(row=row))) for row in rows)
    for pack in packed:
        queries, keys = tokens(pack.q), tokens(pack.k)
        assert len(set(queries)) == len(queries)
        assert len(set(keys)) == len(keys)
        ends = [x.cu_seqlens(torch.device("cpu")).tolist() for x in (pack.q, pack.k)]
        assert max(pack.q.longest, pack.k.longest) <= longest
        for (a, b), (c, d) in zip(*(pairwise(e) for e in ends), strict=True):
            assert len({row for row, _ in queries[a:b] + keys[c:d]}) == 1
            found[pack.mask, (tuple(queries[a:b]), tuple(keys[c:d]))] += 1
    every: Counter[object] = Counter()
    for tile in tiles:
        rows = range(batch) if tile.row == ALL_ROWS else [tile.row]
        every.update((flash_mask(tile, Mask()), pairs(tile._replace(row=row))) for row in rows)
    assert found == every


def pairs(tile: Tile) -> tuple[tuple[Token, ...], tuple[Token, ...]]:
    """The queries and the keys of a tile of one row."""
    queries = ((tile.row, tile.q_start + i) for i in range(tile.q_len))
    keys = ((tile.row, tile.k_start + j) for j in range(tile.k_len))
    return tuple(queries), tuple(keys)


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_launches_of_a_packed_row(kind) -> None:  # type: ignore[no-untyped-def]
    documents = Documents.from_cu_seqlens([*range(0, 4000, 50), 4000])
    layout = SequenceLayout(4000, ring_size=4, kind=kind, documents=documents)
    for rank in range(4):
        tiles = schedule(layout, None, Mask()).rank(rank).hops[0].tiles
        assert len(tiles) >= 20
        alone, packed = pack_tiles(tiles, Mask(), 1, PackRule())
        assert len(alone) + len(packed) <= 2


def test_meta_kernels_accept_packed_calls() -> None:
    tensors = in_dtype(Problem(Mask(), seq_len=64), torch.bfloat16).tensors()
    q, k, v, dout = (x.to("meta") for x in tensors)
    tiles = [Tile(0, at, 4, at + 2, 4, 0, "causal") for at in range(0, 40, 5)]
    answer = run(AtenCudaFlash(), (q, k, v, dout), tiles, Mask())
    assert answer.lse.shape == (2, 4, 64)
    assert {x.dtype for x in answer[1:]} == {torch.float32}
