"""Transfers between nodes, card by card."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_cp.layout import CostModel, Mask, SequenceLayout, schedule
from lightning_cp.layout.nodes import Nodes

NEAR, FAR = 3, 10


def by_hand(nodes: Nodes, sent: np.ndarray, dest: np.ndarray) -> np.ndarray:
    """Every device's own transfer, and what the cards at both of its ends carry at that hop."""
    ranks, hops = sent.shape

    def place(rank: int, copy: int) -> tuple[int, int]:
        node, at = divmod(nodes.first + rank * nodes.stride + copy, nodes.devices)
        return node, at * nodes.cards // nodes.devices

    times = np.zeros_like(sent)
    for hop in range(hops):
        out: Counter[tuple[int, int]] = Counter()
        into: Counter[tuple[int, int]] = Counter()
        flows = [(r, copy) for r in range(ranks) for copy in range(nodes.stride)]
        ends = {flow: (place(*flow), place(int(dest[flow[0], hop]), flow[1])) for flow in flows}
        for (rank, _), (here, there) in ends.items():
            if here[0] != there[0]:
                out[here] += int(sent[rank, hop])
                into[there] += int(sent[rank, hop])
        for (rank, _), (here, there) in ends.items():
            took = NEAR * int(sent[rank, hop])
            if here[0] != there[0]:
                took = FAR * max(out[here], into[there])
            times[rank, hop] = max(times[rank, hop], took)
    return times


@given(st.integers(1, 9), st.integers(1, 8), st.integers(1, 3), st.integers(0, 5), st.data())
def test_cards_carry_what_their_devices_send_to_other_nodes(
    ranks: int, devices: int, stride: int, first: int, data: st.DataObject
) -> None:
    nodes = Nodes(devices, data.draw(st.integers(1, devices)), stride, first)
    rank, hop = np.ogrid[:ranks, :ranks]
    for dest in ((rank + hop) % ranks, (rank - hop) % ranks, (rank + 1) % ranks + 0 * hop):
        numbers = data.draw(st.lists(st.integers(0, 99), min_size=ranks**2, max_size=ranks**2))
        sent = np.array(numbers).reshape(ranks, ranks)
        found = nodes.times(sent, dest, near=NEAR, far=FAR)
        assert found.tolist() == by_hand(nodes, sent, dest).tolist()


def hop_times(cards: int, *, rotates: bool) -> int:
    """Of the middle hop of a ring of 16 on two nodes of 8 devices, of 10 keys of each rank."""
    rank, hop = np.ogrid[:16, :16]
    dest = (rank + 1) % 16 + 0 * hop if rotates else (rank + hop) % 16
    times = Nodes(8, cards).times(np.full((16, 16), 10), dest, near=1, far=9)
    return int(times[:, 8].max())


def test_one_card_for_eight_devices_carries_eight_times_as_much() -> None:
    """At hop 8 all of a node's ranks send to the other node; in a rotation only its last one does."""
    assert hop_times(8, rotates=False) == 90
    assert hop_times(1, rotates=False) == 8 * 90
    assert hop_times(2, rotates=False) == 4 * 90
    assert hop_times(1, rotates=True) == hop_times(8, rotates=True) == 90


def test_the_cost_of_a_ring_on_nodes() -> None:
    """Zigzag: needed keys where each device has a card, all keys around where they share one."""
    plan = schedule(SequenceLayout(1 << 14, 16), None, Mask())

    def cost(cards: int, *, rotates: bool) -> int:
        return CostModel(3000, 0, near=9.0, nodes=Nodes(8, cards), rotates=rotates).cost(plan)

    assert cost(8, rotates=False) <= cost(8, rotates=True)
    assert 3 < cost(1, rotates=False) / cost(1, rotates=True) < 8
    assert cost(8, rotates=False) <= CostModel(3000, 0).cost(plan)
    assert CostModel(3000, 0, near=1.0, nodes=Nodes(16, 1)).cost(plan) == CostModel(3000, 0).cost(
        plan
    )
