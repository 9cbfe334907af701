"""The closed form of peak memory against sums written out by hand, of small calls."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_cp.errors import ConfigError
from lightning_cp.layout import HeadSplit, Mask, SequenceLayout, attention_memory, schedule

TOKENS, HEADS, KV_HEADS, DIM = 32, 4, 2, 8
Q = TOKENS * HEADS * DIM
KV = TOKENS * 2 * KV_HEADS * DIM
LSE = TOKENS * HEADS
"""Numbers of one rank's tokens."""


def peaks(
    ranks: int,
    ulysses: int = 1,
    causal: bool = False,
    heads: tuple[int, int] = (HEADS, KV_HEADS),
    **how: Any,
) -> tuple[int, int]:
    """Of the last rank; bfloat16 unless said otherwise."""
    layout = SequenceLayout(TOKENS * ranks * ulysses, ranks, ulysses)
    sizes = {"batch": 1, "head_dim": DIM, "itemsize": 2, "accumulate_itemsize": 4, **how}
    plan = schedule(layout, None, Mask(causal))
    return attention_memory(plan, HeadSplit(*heads, ulysses), layout.cp_size - 1, **sizes)


def test_one_rank() -> None:
    """What the operator returns, and in backward a copy of the lse."""
    forward, backward = peaks(1)
    assert forward == 2 * Q + 4 * LSE
    assert backward == 4 * LSE + 2 * (Q + KV)


def test_a_ring_in_which_all_see_all() -> None:
    """In the middle of it: keys computed with, arriving and sent; gradients that leave and that come."""
    forward, backward = peaks(4)
    assert forward == 3 * 2 * KV + 4 * (Q + LSE) + 2 * Q + 4 * LSE
    assert backward == 4 * (Q + KV + LSE) + 3 * 2 * KV + 2 * 4 * KV + 2 * (Q + KV)


def test_a_causal_zigzag_ring_sends_half_shards_to_its_last_rank() -> None:
    forward, backward = peaks(4, causal=True)
    keys = 2 * (KV // 2 + KV // 2 + KV)  # two halves that come, and a whole shard that is sent
    assert forward == keys + 4 * (Q + LSE) + 2 * Q + 4 * LSE
    # In flight: what the hop before computed for half a shard, and a whole one coming home.
    home = 4 * (KV // 2 + KV)
    assert backward == 4 * (Q + KV + LSE) + keys + home + 2 * (Q + KV // 2)


def test_float32_is_accumulated_where_it_was_made() -> None:
    forward, _ = peaks(1, itemsize=4)
    assert forward == 4 * (Q + LSE)


def test_gathering_one_head_at_a_time() -> None:
    """All keys of a head three times over: arriving, in rank order, in sequence order."""
    block = 2 * 4 * KV // KV_HEADS
    forward, _ = peaks(4, exchange="all_gather")
    assert forward == 2 * Q + 4 * LSE + 3 * block


def test_gradients_of_many_heads_one_at_a_time() -> None:
    """The most is needed for the last head but one; each head that is done counts once."""
    heads, head = 20, TOKENS * DIM
    _, backward = peaks(4, heads=(heads, heads), exchange="all_gather")
    done = 2 * head * (heads - 2) + 2 * 2 * head * (heads - 3)  # the head before is on its way
    keys, gradients = 2 * 2 * 4 * head, 4 * 2 * 4 * head  # of all ranks: K and V, dk and dv
    on_their_way = gradients + 4 * 2 * head
    computed = (4 + 2) * head + gradients + keys  # wide sums, and what the operator returns
    assert backward == done + 2 * keys + on_their_way + computed


def test_ulysses_holds_what_it_exchanged() -> None:
    """Forward: q, the pair and lse by heads, while out is sent, received and put in order.

    Backward: dq, dk and dv while they are packed, sent or put in order.
    """
    assert peaks(1, ulysses=2) == (2 * (Q + KV) + 4 * LSE + 3 * 2 * Q, 2 * 2 * (Q + KV))


def test_what_another_library_allocates_is_not_known() -> None:
    with pytest.raises(ConfigError, match="another library"):
        peaks(2, exchange="ring_flash_attn")
