"""Bytes and messages against counting who sends which head of which token to whom."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lightning_cp.layout import (
    HeadSplit,
    Mask,
    SequenceLayout,
    Traffic,
    attention_traffic,
    schedule,
)
from tests.helpers.layout.cases import Case, cases

BATCH, HEAD_DIM, ITEMSIZE, WIDE = 2, 4, 2, 4
PER_HEAD = BATCH * HEAD_DIM


@st.composite
def splits(draw: st.DrawFn, ulysses_size: int) -> HeadSplit:
    """One to three query heads a rank, and any number of K/V heads that divides them."""
    heads = ulysses_size * draw(st.integers(1, 4))
    return HeadSplit(
        heads,
        draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0])),
        ulysses_size,
    )


def traffic(case: Case, heads: HeadSplit) -> list[tuple[Traffic, Traffic]]:
    """(forward, backward) of every cp rank."""
    sizes: dict[str, Any] = {"batch": BATCH, "head_dim": HEAD_DIM, "itemsize": ITEMSIZE}
    plan = case.plan
    return [
        attention_traffic(plan, heads, rank, **sizes, accumulate_itemsize=WIDE)
        for rank in range(case.layout.cp_size)
    ]


def heads_of(heads: HeadSplit, ulysses_rank: int) -> tuple[int, int]:
    """How many query heads and how many K/V heads a rank computes with."""
    group = heads.num_heads // heads.num_kv_heads
    mine = range(heads.num_heads)[ulysses_rank * heads.local_heads :][: heads.local_heads]
    return len(mine), len({head // group for head in mine})


def others(rank: int, size: int) -> Iterator[int]:
    return (other for other in range(size) if other != rank)


@given(cases(), st.data())
def test_ring_bytes_are_the_keys_that_travel(case: Case, data: st.DataObject) -> None:
    """K and V to whoever receives them; in backward again, and their gradients the way back.

    Never more than the field's rings, which pass whole shards on: K and V R - 1 times, gradients R times.
    """
    layout, plan = case.layout, case.plan
    heads = data.draw(splits(layout.ulysses_size))
    sent = traffic(case, heads)
    received = 0
    for cp_rank, (forward, backward) in enumerate(sent):
        ring_rank, ulysses_rank = divmod(cp_rank, layout.ulysses_size)
        hops = plan.rank(ring_rank).hops[1:]
        per_key = 2 * heads_of(heads, ulysses_rank)[1] * PER_HEAD
        out = sum(end - start for hop in hops for start, end in hop.send) * per_key
        home = sum(end - start for hop in hops for start, end in hop.recv) * per_key
        receivers, sources = (
            sum(bool(hop.send) for hop in hops),
            sum(bool(hop.recv) for hop in hops),
        )
        assert (forward.p2p_messages, forward.p2p_bytes) == (receivers, out * ITEMSIZE)
        assert backward.p2p_messages == receivers + sources
        assert backward.p2p_bytes == out * ITEMSIZE + home * WIDE
        received += home
        shard = layout.ring_len * per_key
        others = layout.ring_size - 1
        assert forward.p2p_bytes <= others * shard * ITEMSIZE
        assert backward.p2p_bytes <= others * shard * (ITEMSIZE + WIDE)
    assert sum(forward.p2p_bytes for forward, _ in sent) == received * ITEMSIZE
    assert sum(backward.p2p_bytes for _, backward in sent) == received * (ITEMSIZE + WIDE)


@given(cases(), st.data())
def test_ulysses_bytes_are_the_heads_that_others_compute(case: Case, data: st.DataObject) -> None:
    layout = case.layout
    heads = data.draw(splits(layout.ulysses_size))
    shared = sum(heads_of(heads, rank)[1] for rank in range(layout.ulysses_size))
    wire = WIDE if shared > heads.num_kv_heads else ITEMSIZE  # summed gradients travel wide
    for cp_rank, (forward, backward) in enumerate(traffic(case, heads)):
        rank = cp_rank % layout.ulysses_size
        queries, kv = heads_of(heads, rank)
        inputs = outputs = gradients = 0
        for other in others(rank, layout.ulysses_size):
            its_queries, its_kv = heads_of(heads, other)
            inputs += its_queries + 2 * its_kv
            outputs += queries  # and in backward as much of dout (its heads) and of dq (ours)
            gradients += 2 * kv
        tokens = layout.local_len * PER_HEAD
        assert forward.all_to_all_bytes == tokens * (inputs + outputs) * ITEMSIZE
        assert backward.all_to_all_bytes == tokens * (2 * outputs * ITEMSIZE + gradients * wire)
        any_at_all = layout.ulysses_size > 1
        apart = layout.ring_size > 1  # q; k and v, which the ring sends as they lie; out
        assert forward.all_to_all_calls == (2 + apart) * any_at_all
        assert backward.all_to_all_calls == (2 + (wire == WIDE)) * any_at_all


@given(cases(), st.data())
def test_gather_bytes_are_all_keys_to_all_others(case: Case, data: st.DataObject) -> None:
    """Whoever needs them: K and V in both passes, in backward their gradients; a call for each stride."""
    layout, plan = case.layout, case.plan
    heads = data.draw(splits(layout.ulysses_size))
    stride = data.draw(st.one_of(st.none(), st.integers(1, 5)))
    sizes: dict[str, Any] = {"batch": BATCH, "head_dim": HEAD_DIM, "itemsize": ITEMSIZE}
    for cp_rank in range(layout.cp_size):
        kv = heads_of(heads, cp_rank % layout.ulysses_size)[1]
        ring = attention_traffic(plan, heads, cp_rank, **sizes, accumulate_itemsize=WIDE)
        gather = attention_traffic(
            *(plan, heads, cp_rank),
            **sizes,
            accumulate_itemsize=WIDE,
            exchange="all_gather",
            kv_heads_per_gather=stride,
        )
        sent = sum(layout.ring_len * 2 * kv * PER_HEAD for _ in range(layout.ring_size - 1))
        calls = 0 if layout.ring_size == 1 else len(range(0, kv, stride or kv))
        for half, (over_ring, gathered) in enumerate(zip(ring, gather, strict=True)):
            wanted = replace(over_ring, p2p_messages=0, p2p_bytes=0)
            wanted += Traffic(all_gather_calls=calls, all_gather_bytes=sent * ITEMSIZE)
            if half:
                wanted += Traffic(reduce_scatter_calls=calls, reduce_scatter_bytes=sent * WIDE)
            assert gathered == wanted


def test_one_rank_sends_nothing() -> None:
    case = Case(SequenceLayout(64), schedule(SequenceLayout(64), None, Mask()).documents, Mask())
    assert traffic(case, HeadSplit(4, 2, 1)) == [(Traffic(), Traffic())]


def test_the_formulas_of_the_papers() -> None:
    """Full attention: a ring rank sends 2K(N-1), a Ulysses rank (U-1)/U (2A + 2K) of MHA."""
    ring, ulysses = SequenceLayout(64, 4), SequenceLayout(64, 1, 4)
    full = Mask(causal=False)
    keys = 16 * 8 * PER_HEAD * ITEMSIZE
    (forward, _), *_ = traffic(
        Case(ring, schedule(ring, None, full).documents, full), HeadSplit(8, 8, 1)
    )
    assert forward == Traffic(p2p_messages=3, p2p_bytes=2 * keys * 3)
    (forward, _), *_ = traffic(
        Case(ulysses, schedule(ulysses, None, full).documents, full), HeadSplit(8, 8, 4)
    )
    assert forward == Traffic(all_to_all_calls=2, all_to_all_bytes=3 * 4 * keys // 4)


def test_traffic_adds_up() -> None:
    total = Traffic(1, 2, 3, 4) + Traffic(10, 20, 30, 40)
    assert total == Traffic(11, 22, 33, 44)
    assert total.total_bytes == 66
