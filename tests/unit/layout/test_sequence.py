"""Which rank holds which token; sharding and its inverse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_cp.errors import ConfigError, ShapeError
from lightning_cp.layout import Documents, SequenceLayout
from tests.helpers.layout.cases import layouts, ring_positions


@given(layouts())
def test_every_token_is_on_exactly_one_rank(layout: SequenceLayout) -> None:
    ranks = [layout.positions(rank) for rank in range(layout.cp_size)]
    assert all(held.dtype == torch.int64 and held.shape == (layout.local_len,) for held in ranks)
    assert sorted(torch.cat(ranks).tolist()) == list(range(layout.padded_len))


@given(layouts(kinds=("contiguous", "zigzag")))
def test_positions_follow_the_definition(layout: SequenceLayout) -> None:
    """Zigzag: chunks r and 2N-1-r of 2N; contiguous: chunk r of N; each ring rank sorted."""
    size = layout.ring_size
    for rank in range(size):
        held = ring_positions(layout, rank)
        assert (np.diff(held) > 0).all()
        if layout.kind == "contiguous" or size == 1:
            chunks = np.split(np.arange(layout.padded_len), size)
            wanted = chunks[rank]
        else:
            chunks = np.split(np.arange(layout.padded_len), 2 * size)
            wanted = np.concatenate([chunks[rank], chunks[2 * size - 1 - rank]])
        assert held.tolist() == wanted.tolist()


@given(layouts())
def test_padding_is_the_least_that_divides(layout: SequenceLayout) -> None:
    def divides(length: int) -> bool:
        chunks = {"zigzag": 2, "balanced": layout.chunks}.get(layout.kind, 1)
        chunks = 1 if layout.ring_size == 1 else chunks
        rest = length % (layout.ring_size * chunks)
        return rest == 0 and (length // layout.ring_size) % layout.ulysses_size == 0

    assert divides(layout.padded_len)
    assert not any(divides(length) for length in range(layout.seq_len, layout.padded_len))
    if layout.padded_len == layout.seq_len:
        layout.check_unpadded()
        return
    with pytest.raises(ShapeError, match=f"next valid length is {layout.padded_len};"):
        layout.check_unpadded()


DTYPES = {torch.int64: -100, torch.float64: 0.5, torch.bool: True, torch.bfloat16: float("-inf")}


@given(layouts(), st.data())
def test_unshard_inverts_shard(layout: SequenceLayout, data: st.DataObject) -> None:
    dims = data.draw(st.integers(1, 4))
    dim = data.draw(st.integers(-dims, dims - 1))
    dtype = data.draw(st.sampled_from(sorted(DTYPES, key=str)))
    shape = [2] * dims
    shape[dim] = layout.seq_len
    x = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
    shards = [layout.shard(x, rank, dim, DTYPES[dtype]) for rank in range(layout.cp_size)]
    for rank, shard in enumerate(shards):
        assert shard.dtype == dtype
        assert torch.equal(shard, padded(x, layout, dim).index_select(dim, layout.positions(rank)))
    whole = layout.unshard(shards, dim)
    assert whole.dtype == dtype
    assert torch.equal(whole, x)


def padded(x: torch.Tensor, layout: SequenceLayout, dim: int) -> torch.Tensor:
    """The whole sequence with its padding at the end."""
    shape = list(x.shape)
    shape[dim] = layout.padded_len - layout.seq_len
    return torch.cat([x, torch.full(shape, DTYPES[x.dtype], dtype=x.dtype)], dim)


def test_sharding_is_differentiable() -> None:
    layout = SequenceLayout(13, ring_size=2, ulysses_size=2)
    x = torch.randn(2, 13, dtype=torch.float64, requires_grad=True)
    shards = [layout.shard(x, rank) for rank in range(4)]
    weights = torch.randn(2, 13, dtype=torch.float64)
    (layout.unshard(shards) * weights).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, weights)


def test_a_layout_that_validation_used_first_is_differentiable() -> None:
    """Lightning validates in inference mode, and ``layout="auto"`` gives training the same object."""
    layout = SequenceLayout(13, ring_size=2, ulysses_size=2)
    x = torch.randn(2, 13, dtype=torch.float64, requires_grad=True)
    with torch.inference_mode():
        shards = [layout.shard(x, rank) for rank in range(4)]
        assert torch.equal(layout.unshard(shards), x)
    shards = [layout.shard(x, rank) for rank in range(4)]
    layout.unshard(shards).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones_like(x))


def test_layouts_compare_by_what_they_say() -> None:
    one = SequenceLayout(16, 2, documents=Documents.from_cu_seqlens([0, 4, 16]))
    same = SequenceLayout(16, 2, documents=Documents.from_cu_seqlens([0, 4, 16]))
    assert one == same
    assert hash(one) == hash(same)
    assert one != SequenceLayout(16, 2)
    assert one != SequenceLayout(16, 2, kind="contiguous")


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"seq_len": 7, "ring_size": 2, "ulysses_size": 2},
        ShapeError,
        "7 tokens is too short for ring_size=2 x ulysses_size=2: it must have at least 8",
    ),
    ({"seq_len": 0}, ShapeError, "0 tokens is too short .* at least 1 "),
    ({"seq_len": 16.0}, ShapeError, r"seq_len must be an integer, got 16\.0"),
    ({"seq_len": 16, "kind": "zig"}, ConfigError, "one of contiguous, zigzag, balanced, got 'zig'"),
    ({"seq_len": 16, "chunks": 2}, ConfigError, "chunks=2 is for the layout balanced, got zigzag"),
    ({"seq_len": 16, "kind": "balanced", "chunks": 0}, ConfigError, "at least 1, got 0"),
    ({"seq_len": 0, "kind": "balanced", "ring_size": 2}, ShapeError, "too short .* at least 4 "),
    ({"seq_len": 16, "ring_size": 0}, ConfigError, "ring_size must be .* at least 1, got 0"),
    ({"seq_len": 16, "ulysses_size": -2}, ConfigError, "ulysses_size must be .* got -2"),
    ({"seq_len": 16, "ring_size": 2.0}, ConfigError, r"ring_size must be an integer .* got 2\.0"),
    (
        {"seq_len": 16, "documents": Documents.single(12)},
        ShapeError,
        "documents describe 12 tokens, but the layout has 16",
    ),
]


@pytest.mark.parametrize(("arguments", "error", "match"), REFUSED)
def test_a_layout_refuses(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        SequenceLayout(**arguments)


def test_no_padding_names_the_next_valid_length() -> None:
    layout = SequenceLayout(4093, ring_size=2, ulysses_size=2)
    message = r"4093 tokens does not divide by 4 .*zigzag\)\. The next valid length is 4096"
    with pytest.raises(ShapeError, match=message):
        layout.check_unpadded()


def test_sharding_twice_is_named() -> None:
    layout = SequenceLayout(16, ring_size=2)
    local = layout.shard(torch.zeros(1, 16), 0)
    with pytest.raises(ShapeError, match=r"16 entries along dim 1, got .*sharded already\?"):
        layout.shard(local, 0)


def test_shard_refuses() -> None:
    layout = SequenceLayout(16, ring_size=2)
    with pytest.raises(ShapeError, match=r"whole sequence, 16 entries along dim 1, .*\(1, 15\)"):
        layout.shard(torch.zeros(1, 15), 0)
    with pytest.raises(ShapeError, match=r"cannot shard along dim 2: .* \(1, 16\)"):
        layout.shard(torch.zeros(1, 16), 0, dim=2)
    with pytest.raises(ShapeError, match="cannot shard along dim 0"):
        layout.shard(torch.tensor(1.0), 0, dim=0)
    for rank in (-1, 2):
        with pytest.raises(ConfigError, match=rf"cp_rank must be in 0\.\.1, got {rank}"):
            layout.shard(torch.zeros(1, 16), rank)


def test_unshard_refuses() -> None:
    layout = SequenceLayout(16, ring_size=2)
    with pytest.raises(ShapeError, match="unshard needs 2 shards, one per rank, got 1"):
        layout.unshard([torch.zeros(1, 8)])
    with pytest.raises(ShapeError, match=r"a local shard, 8 entries along dim 1, got .*\(1, 16\)"):
        layout.unshard([torch.zeros(1, 16)] * 2)
