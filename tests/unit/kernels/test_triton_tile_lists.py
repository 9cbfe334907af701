"""Our Triton kernels on tile lists that no schedule makes, odd tensors, and what must not leak."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cp.kernels.merge import Accumulator, GradientSums
from lightning_cp.kernels.protocol import QKV, Kernel, Output, Scores
from lightning_cp.kernels.reference import ReferenceKernel
from lightning_cp.kernels.triton.launch import TritonFA2
from lightning_cp.layout.mask import Mask
from lightning_cp.layout.tiles import ALL_ROWS, Tile
from tests.helpers import oracle
from tests.helpers.kernels.dense import SCALE, Answer, dense_attention, errors, run
from tests.helpers.kernels.devices import DEVICES, SMALL, triton_on
from tests.unit.kernels.test_tile_lists import (
    KEYS,
    QUERIES,
    Tensors,
    paired,
    seen_by,
    strided_last,
    tile_lists,
    token_first,
)

LISTS: dict[str, list[Tile]] = {
    "rows_share_queries": [
        Tile(ALL_ROWS, 2, 9, 0, 9, 0, "causal"),
        Tile(0, 0, QUERIES, 9, 4, 5, "full"),
        Tile(1, 5, 3, 9, 3, 5, "full"),
        Tile(1, 4, 10, 14, 5, 5, "full"),
        Tile(ALL_ROWS, 0, 0, 0, KEYS, 0, "full"),
        Tile(0, 0, QUERIES, 3, 0, 0, "full"),
    ],
    "causal_off_the_diagonal": [
        Tile(ALL_ROWS, 0, 12, 4, 15, 3, "causal"),
        Tile(ALL_ROWS, 12, 5, 0, 9, -4, "causal"),
    ],
    "bands": [Tile(0, 0, 17, 0, 19, 2, "band"), Tile(1, 3, 14, 5, 14, -3, "band")],
    "hidden": [Tile(ALL_ROWS, 0, 17, 0, 19, -40, "causal"), Tile(1, 0, 3, 0, 2, 0, "full")],
}
SQUARE = Tile(ALL_ROWS, 0, 17, 0, 17, 0, "causal")
WINDOW = Mask(causal=False, window=(4, 3))


def draw(device: str, queries: int = QUERIES, keys: int = KEYS) -> Tensors:
    """q, k, v and dout of two rows; two query heads share a K/V head."""
    generator, heads = torch.Generator().manual_seed(3), 1 if device == "cpu" else 2
    shapes = [(queries, 2 * heads), (keys, heads), (keys, heads), (queries, 2 * heads)]
    q, k, v, dout = (torch.randn(2, *shape, 32, generator=generator) for shape in shapes)
    return q.to(device), k.to(device), v.to(device), dout.to(device)


def on_cpu(answer: Answer) -> Answer:
    return Answer(*(x.cpu() for x in answer))


def check_tiles(kernel: Kernel, tensors: Tensors, tiles: list[Tile], mask: Mask) -> Answer:
    """Compare one call with the dense answer, and its error with the reference kernel's."""
    q, k, v, dout = (x.cpu() for x in tensors)
    visible = seen_by(tiles, mask, q.shape[1], k.shape[1])
    expected = dense_attention(q, k, v, dout, visible)
    answer = on_cpu(run(kernel, tensors, tiles, mask))
    allowed = errors(run(ReferenceKernel(), (q, k, v, dout), tiles, mask), expected)
    found = errors(answer, expected)
    assert all(found[name] <= 2 * allowed[name] + 1e-6 for name in found), (found, allowed)
    return answer


@pytest.mark.quick("bands-cpu", "hidden-cpu", "*cuda*")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LISTS)
def test_lists(name: str, device: str) -> None:
    answer = check_tiles(triton_on(device), draw(device), LISTS[name], WINDOW)
    if name == "rows_share_queries":
        assert bool((answer.lse[1, :, :2] == -torch.inf).all())
        assert not bool(answer.out[1, :2].any())


@pytest.mark.parametrize("device", [pytest.param(*DEVICES[1].values, marks=DEVICES[1].marks)])
@settings(max_examples=150)
@given(
    tiles=tile_lists(),
    window=st.tuples(st.integers(-1, 6), st.integers(-1, 6)),
    causal=st.booleans(),
)
def test_any_tile_list(
    device: str, tiles: list[Tile], window: tuple[int, int], causal: bool
) -> None:
    """On a device; the interpreter is too slow, and ``test_triton_tiles.py`` has the tables."""
    check_tiles(TritonFA2(SMALL), draw(device), tiles, Mask(causal=causal, window=window))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tiles", [[], [Tile(0, 0, QUERIES, 3, 0, 0, "full")]])
def test_no_pairs(tiles: list[Tile], device: str) -> None:
    answer = check_tiles(triton_on(device), draw(device), tiles, Mask())
    assert bool((answer.lse == -torch.inf).all())


@pytest.mark.nightly
@pytest.mark.parametrize("store", [token_first, paired, strided_last])
@pytest.mark.parametrize("device", DEVICES)
def test_any_strides(device: str, store: Callable[[torch.Tensor], torch.Tensor]) -> None:
    q, k, v, dout = (store(x) for x in draw(device))
    assert not q.is_contiguous()
    tiles = [Tile(ALL_ROWS, 1, 12, 2, 12, 0, "causal"), Tile(1, 0, 17, 14, 5, 0, "full")]
    check_tiles(triton_on(device), (q, k, v, dout), tiles, Mask())


@pytest.mark.parametrize("device", DEVICES)
def test_expanded_gradient(device: str) -> None:
    q, k, v, _ = draw(device)
    dout = torch.ones((), device=device).expand(q.shape)  # what sum().backward() passes
    check_tiles(triton_on(device), (q, k, v, dout), [SQUARE], Mask())


@pytest.mark.nightly
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_added(device: str) -> None:
    q, k, v, dout = draw(device)
    kernel, scores, mask = triton_on(device), Scores(SCALE, Mask()), Mask()
    once = run(kernel, (q, k, v, dout), [SQUARE], mask)
    sums = GradientSums.of(*(torch.full_like(x, 3.0) for x in (q, k, v)))
    kernel.backward(Output(dout, once.out, once.lse), QKV(q, k, v), [SQUARE], scores, sums)
    for total, part in zip(sums.totals, (once.dq, once.dk, once.dv), strict=True):
        assert torch.equal(total, part + 3.0)


@pytest.mark.parametrize("device", DEVICES)
def test_head_groups_of_keys_that_begin_late(device: str) -> None:
    """Parts of query heads hold the keys of the tiles alone."""
    check_tiles(triton_on(device), draw(device), [Tile(ALL_ROWS, 2, 9, 5, 9, 0, "causal")], Mask())


@pytest.mark.parametrize("device", DEVICES)
def test_a_scale_of_zero(device: str) -> None:
    """All keys that a query sees have the same weight, and those that it does not see have none."""
    q, k, v, _ = draw(device)
    state = Accumulator(q, torch.float32)
    triton_on(device).forward(QKV(q, k, v), [SQUARE], Scores(0.0, Mask()), state)
    out, lse = state.result(torch.float32)
    seen = torch.arange(1, QUERIES + 1, device=device)
    mean = v[:, :QUERIES].cumsum(1).repeat_interleave(2, dim=2) / seen[:, None, None]
    torch.testing.assert_close(out, mean)
    torch.testing.assert_close(lse, seen.log().expand_as(lse).to(lse.dtype))


@pytest.mark.parametrize("device", DEVICES)
def test_the_only_result_is_rounded_by_the_kernel(device: str) -> None:
    """So it is written once, in half the bytes; a result that others join stays wide."""
    q, k, v, _ = (x.half() for x in draw(device))
    wide, half = Accumulator(q, torch.float32), Accumulator(q, torch.float32, single=True)
    part = Accumulator(q, torch.float32, single=True)
    for state, length in ((wide, QUERIES), (half, QUERIES), (part, 9)):
        tiles = [SQUARE._replace(q_len=length, k_len=length)]
        triton_on(device).forward(QKV(q, k, v), tiles, Scores(SCALE, Mask()), state)
    assert wide.result(torch.float32)[0].data_ptr() == wide.result(torch.float32)[0].data_ptr()
    assert half.result(torch.float16)[0].data_ptr() == half.result(torch.float16)[0].data_ptr()
    assert torch.equal(half.result(torch.float16)[0], wide.result(torch.float16)[0])
    assert half.result(torch.float32)[1].dtype == torch.float32
    exact = part.result(torch.float32)[0]
    assert not torch.equal(exact, exact.half().float())


@pytest.mark.nightly
@pytest.mark.parametrize("device", DEVICES)
def test_nothing_is_read_but_what_tiles_name(device: str) -> None:
    """NaN lies in every other token, between and beside the tiles' blocks."""
    tiles = [
        Tile(0, 2, 7, 1, 7, 0, "causal"),
        Tile(0, 10, 4, 9, 6, 0, "full"),
        Tile(1, 3, 11, 4, 9, 0, "band"),
    ]
    clean = draw(device)
    named = [torch.zeros(2, x.shape[1], dtype=torch.bool, device=device) for x in clean]
    for tile in tiles:
        for mark, of_keys in zip(named, (False, True, True, False), strict=True):
            start, length = (tile.k_start, tile.k_len) if of_keys else (tile.q_start, tile.q_len)
            mark[tile.row, start : start + length] = True
    q, k, v, dout = (
        x.masked_fill(~mark[:, :, None, None], torch.nan)
        for x, mark in zip(clean, named, strict=True)
    )
    assert bool(q.isnan().any())
    kernel = triton_on(device)
    before, after = run(kernel, clean, tiles, WINDOW), run(kernel, (q, k, v, dout), tiles, WINDOW)
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    assert not bool(after.out[:, :2].any())


@pytest.mark.nightly
@pytest.mark.parametrize("device", DEVICES)
def test_a_token_reaches_only_those_that_see_it(device: str) -> None:
    q, k, v, dout = draw(device)
    tiles = [SQUARE, Tile(0, 0, 17, 17, 2, 0, "full")]
    before = run(triton_on(device), (q, k, v, dout), tiles, Mask())
    k[0, 6] += 1.0
    v[0, 6] -= 100.0
    after = run(triton_on(device), (q, k, v, dout), tiles, Mask())
    changed = (before.out != after.out).flatten(2).any(-1)
    reached = torch.zeros(2, QUERIES, dtype=torch.bool, device=device)
    reached[0, 6:] = True
    assert torch.equal(changed, reached)
    assert torch.equal((before.lse != after.lse).any(1), reached)
    assert torch.equal((before.dq != after.dq).flatten(2).any(-1), reached)
    assert torch.equal(before.dk[1], after.dk[1])


@pytest.mark.parametrize("device", DEVICES)
def test_nan_is_not_hidden(device: str) -> None:
    q, k, v, _ = draw(device)
    q[0, 3, 1, 2] = torch.nan
    scores, state = Scores(SCALE, Mask(), max_logits=True), Accumulator(q, q.dtype)
    triton_on(device).forward(QKV(q, k, v), [SQUARE], scores, state)
    out, lse = state.result(q.dtype)
    assert bool(out[0, 3, 1].isnan().all())
    assert bool(lse[0, 1, 3].isnan())
    assert bool(state.max_logits[0, 1, 3].isnan())
    assert not bool(out[1].isnan().any())


@pytest.mark.parametrize("device", DEVICES)
def test_scores_beyond_the_range_of_exp(device: str) -> None:
    q, k, v, dout = draw(device)
    tensors = (q * 1e3, k * 10, v, dout)
    tiles = [SQUARE, Tile(0, 0, 3, 17, 2, 0, "full")]
    inputs = [x.cpu() for x in tensors]
    expected = dense_attention(*inputs, visible=seen_by(tiles, Mask()))
    assert float(expected.lse.max()) > 1e3 > -1e3 > float(expected.lse.min())
    answer = on_cpu(run(triton_on(device), tensors, tiles, Mask()))
    found = errors(answer, expected)
    assert found["lse"] <= 1e-6
    assert all(bool(x.isfinite().all()) for x in (answer.out, answer.dq, answer.dk, answer.dv))


# Of dk and dv rows beyond a block's keys do overflow; nothing of them is stored or summed.
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("device", DEVICES)
def test_all_scores_far_below_zero(device: str) -> None:
    """Blocks are filled up with zeros, whose score of 0 would have a weight beyond float32."""
    q, k, v, dout = draw(device)
    tensors = (q + 4.0, k - 4.0, v, dout)
    tiles = [Tile(ALL_ROWS, 0, QUERIES, 0, KEYS, 0, "full")]
    inputs = [x.cpu() for x in tensors]
    expected = dense_attention(*inputs, visible=seen_by(tiles, Mask()))
    assert float(expected.lse.max()) < -100  # e^100 is too large for float32
    found = errors(on_cpu(run(triton_on(device), tensors, tiles, Mask())), expected)
    assert all(error < 1e-4 for error in found.values()), found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 2])
def test_largest_scores(rows: int, device: str) -> None:
    q, k, v, dout = draw(device)
    slopes = torch.tensor([[0.5, -0.25, 0.125, 0.0], [0.1, 0.2, -0.3, 0.4]])[:rows, : q.shape[2]]
    slopes = slopes.squeeze(0)
    tiles = [SQUARE._replace(row=0), SQUARE._replace(row=1, q_len=5, k_len=5)]
    how = oracle.Scores(softcap=2.0, alibi_slopes=slopes, max_logits=True)
    inputs = (q.cpu(), k.cpu(), v.cpu(), dout.cpu())
    want = oracle.attend(*inputs, seen_by(tiles, Mask()), SCALE, how).max_logits
    assert want is not None
    assert bool((want == -torch.inf).any())
    scores = Scores(SCALE, Mask(), 2.0, slopes.to(device), max_logits=True)
    state = Accumulator(q, torch.float32)
    for tile in tiles:
        triton_on(device).forward(QKV(q, k, v), [tile], scores, state)
    assert oracle.max_error(state.max_logits.cpu(), want) < 2e-6


@pytest.mark.parametrize("device", [pytest.param(*DEVICES[1].values, marks=DEVICES[1].marks)])
def test_tokens_further_apart_than_32_bits(device: str) -> None:
    length, heads, head_dim = 300, 2, 64
    gap = 2**31 // (length // 2)
    memory = torch.empty(length * gap, dtype=torch.float16, device=device)
    q = memory.as_strided((1, length, heads, head_dim), (0, gap, head_dim, 1))
    q.copy_(torch.randn(q.shape, device=device))
    tiles = [Tile(ALL_ROWS, 0, length, 0, length, 0, "causal")]
    far = run(triton_on(device), (q, q, q, q), tiles, Mask())
    x = q.contiguous()
    near = run(triton_on(device), (x, x, x, x), tiles, Mask())
    assert all(torch.equal(one, other) for one, other in zip(far, near, strict=True))


@pytest.mark.parametrize("name", ["rows_share_queries", "bands"])
@pytest.mark.parametrize("device", DEVICES)
def test_dk_and_dv_of_two_launches(device: str, name: str) -> None:
    """They have the bits of one launch; those of bands, which leave keys out, are added to zeros."""
    one = TritonFA2(SMALL, split_below=0)  # parts of query heads are never added to anything
    two = replace(one, blocks=SMALL._replace(keys=SMALL.keys._replace(launches=2)))
    tensors, tiles = draw(device), LISTS[name]
    found, wanted = (run(kernel, tensors, tiles, Mask()) for kernel in (two, one))
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
    assert float(found.dk.abs().max()) > 0


@pytest.mark.parametrize("device", [pytest.param(*DEVICES[1].values, marks=DEVICES[1].marks)])
def test_runs_are_equal(device: str) -> None:
    tensors, tiles = draw(device, 500, 500), [Tile(ALL_ROWS, 0, 500, 0, 500, 0, "causal")]
    first, second = (run(triton_on(device), tensors, tiles, Mask()) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
