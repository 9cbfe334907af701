"""The model of streams is what the attention code does: its order, its time, and no circle of waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from graphlib import CycleError
from operator import mul
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cp.layout import (
    CostModel,
    Documents,
    HeadSplit,
    Mask,
    Schedule,
    SequenceLayout,
    schedule,
)
from lightning_cp.layout.axes import Axis, divisors
from lightning_cp.layout.exchange import Exchange, ring_hops
from lightning_cp.layout.sequence import LayoutKind
from lightning_cp.layout.streams import Messages, elapsed, ring_order
from tests.helpers.attention.streams import (
    NARROW,
    WIDE,
    Event,
    Graph,
    Node,
    Place,
    expected,
    places,
    record,
)
from tests.helpers.layout.cases import Case, cases, seen_in

RING, GATHER = Exchange(), Exchange("all_gather", "two_kernel", "fused", 1)
ROTATION = Exchange("rotation")
EXCHANGES = {"ring": RING, "rotation": ROTATION, "all_gather": GATHER}
KINDS = ("contiguous", "zigzag", "balanced", "window")
MESHES = [(ring, size // ring) for size in range(1, 65) for ring in divisors(size)]
"""(ring, Ulysses) of at most 64 ranks."""


def plan_of(ring: int, ulysses: int, kind: str) -> Schedule:
    """A schedule of a few tokens a rank: one document, or packed ones that leave many hops idle."""
    chunks, length = 4, 8 * ring * ulysses
    if kind in ("contiguous", "zigzag"):
        return schedule(SequenceLayout(length, ring, ulysses, cast(LayoutKind, kind)), None, Mask())
    mask = Mask(window=(length // 3, 0)) if kind == "window" else Mask()
    cuts = sorted({0, length // 7, length // 2, length - 3, length})
    documents = Documents.from_cu_seqlens(cuts)
    layout = SequenceLayout(length, ring, ulysses, "balanced", documents, mask, chunks)
    return schedule(layout, None, mask)


def heads_of(ulysses: int) -> HeadSplit:
    """Two K/V heads, of which ranks share one where there are more than two; two query heads a rank."""
    return HeadSplit(2 * ulysses, 2, ulysses)


def ring_ranks(ring: int) -> list[int]:
    """Some of many ring ranks."""
    return sorted({0, 1, ring // 2, ring - 1} & set(range(ring)))


def check_order(
    plan: Schedule, exchange: Exchange, ranks: Sequence[int] | None = None
) -> list[tuple[list[Event], list[Event]]]:
    """Compare what ranks do with the package's order; return it."""
    layout = plan.layout
    split, every = heads_of(layout.ulysses_size), places(plan)
    ranks = range(layout.cp_size) if ranks is None else ranks
    found = record(plan, (split.num_heads, split.num_kv_heads), exchange, ranks)
    for rank, passes in zip(ranks, found, strict=True):
        for backward, program in enumerate(passes):
            wanted = expected(plan, every[rank], split, exchange, backward=bool(backward))
            assert [event.without_sizes() for event in program] == wanted
    return found


def latest(graph: Graph, value: Callable[[Node], int]) -> dict[Node, int]:
    """The largest value of an event and of all that it comes after, on any rank."""
    found: dict[Node, int] = {}
    for node in graph.order():
        found[node] = max([value(node), *(found[one] for one, _ in graph.before[node])])
    return found


@pytest.mark.quick("*-1-1", "*-5-1", "*-3-2", "*-2-3", "ring-zigzag-1-4")
@pytest.mark.parametrize(("ring", "ulysses"), [m for m in MESHES if m[0] * m[1] <= 12])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_ranks_follow_the_order_and_none_waits_for_ever(
    exchange: str, kind: str, ring: int, ulysses: int
) -> None:
    """Of a whole step: forward, forward again (recomputed), and backward, of two layers."""
    plan = plan_of(ring, ulysses, kind)
    found = check_order(plan, EXCHANGES[exchange])
    steps = [[*forward, *forward, *forward, *back, *forward, *back] for forward, back in found]
    assert Graph([renumbered(step) for step in steps], places(plan)).order()


def renumbered(program: Sequence[Event]) -> list[Event]:
    """Several passes in one program: no number of a post twice."""
    found: list[Event] = []
    posts = computes = 0
    last: dict[int, int] = {}
    for event in program:
        if event.what == "post":
            last[event.number] = number = posts
            posts += 1
        elif event.what == "wait":
            number = last.pop(event.number)
        else:
            number = computes
            computes += 1
        found.append(event._replace(number=number))
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_every_mesh_of_up_to_64_ranks(exchange: str, kind: str) -> None:
    """Some ranks of each mesh follow the order, which is one for all; matching messages have one place in it.

    So what any event comes after has an earlier place, on whichever rank: there is no cycle.
    """
    for ring, ulysses in MESHES:
        plan = plan_of(ring, ulysses, kind)
        check_order(
            plan, EXCHANGES[exchange], [r * ulysses + r % ulysses for r in ring_ranks(ring)]
        )
        hops = [ring_hops(plan, rank, exchange) for rank in range(ring)]
        sent = {
            (r, h.dest, h.index): h.num_sent for r in range(ring) for h in hops[r][1:] if h.send
        }
        received = {
            (h.source, r, h.index): h.num_received
            for r in range(ring)
            for h in hops[r][1:]
            if h.recv
        }
        assert sent == received


@pytest.mark.parametrize("exchange", [RING, ROTATION], ids=lambda exchange: exchange.name)
@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
@pytest.mark.parametrize("backward", [False, True])
def test_the_next_hop_travels_while_this_one_is_computed(
    kind: LayoutKind, backward: bool, exchange: Exchange
) -> None:
    """Keys of hop h+1 come after no compute of hop h, on any rank, and no compute of hop h comes after them.

    In backward the same holds for the gradients of hop h and the compute of hop h+1. Every rank has work at
    every hop here: the mask is full.
    """
    plan = schedule(SequenceLayout(48, 6, 1, kind), None, Mask(causal=False))
    programs = [passes[backward] for passes in record(plan, (2, 2), exchange)]
    graph = Graph(programs, places(plan))
    posts = [step for step in ring_order(6, backward=backward) if step.what == "post"]

    def of(node: Node, what: str, end: str, load: str = "") -> int:
        event = programs[node[0]][node[1]]
        if event.what != what or node[2] != end:
            return -1
        if what == "compute":
            return event.number
        return posts[event.number].number if posts[event.number].load == load else -1

    computed = latest(graph, lambda node: of(node, "compute", "end"))
    arrived = latest(graph, lambda node: of(node, "post", "end", "keys"))
    returned = latest(graph, lambda node: of(node, "post", "end", "gradients"))
    for node in graph.order():
        if (hop := of(node, "post", "end", "keys")) > 0:
            assert computed[node] == hop - 2
        if (hop := of(node, "post", "end", "gradients")) > 0:
            assert computed[node] == hop
        if (hop := of(node, "compute", "begin")) >= 0:
            assert arrived[node] == (hop or -1)
            assert returned[node] == (hop - 2 if backward and hop > 2 else -1)


def with_overhead(program: Sequence[Event]) -> Iterator[Event]:
    """A compute of no tiles for every hop whose keys arrive: what a hop costs besides."""
    waits = False
    for event in program:
        if waits and (event.what, event.dtype) != ("post", NARROW):  # the next hop's keys
            waits = False
            yield Event("compute", -1)
        yield event
        waits = waits or (
            event.what == "wait" and event.dtype == NARROW and event.axis is Axis.RING
        )
    if waits:
        yield Event("compute", -1)


def finish(case: Case, model: CostModel, exchange: Exchange, *, backward: bool) -> int:
    """When the last rank ends a pass, by the longest path through what the code does."""
    plan, rows = case.plan, case.documents.num_rows
    split, every = heads_of(case.layout.ulysses_size), places(plan)
    found = record(plan, (split.num_heads, split.num_kv_heads), exchange)

    def seconds(rank: int, event: Event) -> int:
        weights = [1 if tile.row >= 0 else rows for tile in event.tiles]
        seen = [int(seen_in(tile, case.mask).sum()) for tile in event.tiles]
        return sum(map(mul, weights, seen)) if event.number >= 0 else model.hop

    def flow(source: int, dest: int, event: Event, entries: int) -> int:
        if event.axis is Axis.ULYSSES:
            return 0
        keys = entries // (2 * split.num_local_kv(every[source].ulysses_rank))
        return keys * (model.gradient if event.dtype == WIDE else model.key) + model.latency

    programs = [list(with_overhead(passes[backward])) for passes in found]
    return Graph(programs, every, seconds, flow).finish()


MODELS = st.builds(
    CostModel, *[st.integers(1, 20), st.integers(0, 50), st.integers(0, 50), st.integers(1, 40)]
)


@settings(max_examples=60)  # each runs the code of every rank
@given(cases(), MODELS, st.booleans(), st.sampled_from([RING, ROTATION]))
def test_cost_is_the_longest_path_through_what_the_code_does(
    case: Case, model: CostModel, backward: bool, exchange: Exchange
) -> None:
    cost = replace(model, rotates=exchange is ROTATION).cost(case.plan, backward=backward)
    assert cost == finish(case, model, exchange, backward=backward)


def test_a_deadlock_is_found() -> None:
    """Two ranks whose posts to each other are in another order on the one stream that both have."""
    here, there = ((1, 1),), ((0, 1),)
    first = [Event("post", 0, Axis.RING, here), Event("post", 1, Axis.RING, (), here)]
    second = [Event("post", 0, Axis.RING, there), Event("post", 1, Axis.RING, (), there)]
    waits = [Event("wait", 0, Axis.RING), Event("wait", 1, Axis.RING)]
    two = [Place(2, 1, rank) for rank in range(2)]
    with pytest.raises(CycleError):
        Graph([first + waits, second + waits], two).order()
    swapped = [Event("post", 0, Axis.RING, (), there), Event("post", 1, Axis.RING, there)]
    assert Graph([first + waits, swapped + waits], two).order()


def test_hidden_and_exposed_by_hand() -> None:
    """Four ranks that compute 100 at every hop. Shorter transfers are hidden, but the last gradients."""
    computes = np.full((4, 4), 100)
    rank, hop = np.ogrid[:4, :4]

    def took(transfer: int, *, backward: bool) -> list[int]:
        times = np.where(hop > 0, transfer, 0) + 0 * rank
        loads = {
            "keys": Messages(times, (rank + hop) % 4),
            "gradients": Messages(times, (rank - hop) % 4),
        }
        return elapsed(ring_order(4, backward=backward), computes, loads).tolist()

    assert took(99, backward=False) == [400] * 4
    assert took(150, backward=False) == [3 * 150 + 100] * 4
    assert took(40, backward=True) == [400 + 40] * 4
    assert took(300, backward=True) == [6 * 300] * 4


def test_one_slow_rank_holds_up_those_that_it_sends_to() -> None:
    """The first rank computes 50 more at its first hop, and sends hop 2's keys that much later."""
    computes = np.full((3, 3), 10)
    computes[0, 0] += 50
    rank, hop = np.ogrid[:3, :3]
    keys = Messages(np.where(hop > 0, 1, 0) + 0 * rank, (rank + hop) % 3)
    assert elapsed(ring_order(3, backward=False), computes, {"keys": keys}).tolist() == [80, 71, 71]
