"""Axes of the mesh, and the split of context-parallel ranks over two of them. Plain integers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class Axis(StrEnum):
    """Axes of the mesh, outer to inner."""

    DP_REPLICATE = "dp_replicate"
    DP_SHARD = "dp_shard"
    RING = "ring"
    ULYSSES = "ulysses"
    TP = "tp"


class Flat(StrEnum):
    """Groups that span several axes."""

    CP = "cp"
    FSDP = "fsdp"
    DATA = "data"
    LOSS = "loss"


FLATTENED: dict[Flat, tuple[Axis, ...]] = {
    Flat.CP: (Axis.RING, Axis.ULYSSES),
    Flat.FSDP: (Axis.DP_SHARD, Axis.RING, Axis.ULYSSES),
    Flat.DATA: (Axis.DP_REPLICATE, Axis.DP_SHARD),
    Flat.LOSS: (Axis.DP_REPLICATE, Axis.DP_SHARD, Axis.RING, Axis.ULYSSES),
}


@dataclass(frozen=True)
class Factors:
    """A split of the context-parallel ranks, and the reason for it."""

    ulysses_size: int
    ring_size: int
    why: str


def factorise(cp_size: int, num_heads: int, ranks_per_node: int | None = None) -> Factors:
    """Split ``cp_size`` into Ulysses, as much as the heads allow, and ring for the rest.

    Ulysses sends less than a ring as soon as there are more than ``heads / kv_heads`` ranks, but is
    limited by the number of heads and wants the fast links inside a node.

    Args:
        cp_size: ranks that share a sequence.
        num_heads: query heads on each tensor-parallel rank.
        ranks_per_node: the largest useful Ulysses size, if known.
    """
    common = math.gcd(num_heads, cp_size)
    limit = ranks_per_node or common
    ulysses = max(d for d in range(1, common + 1) if common % d == 0 and d <= limit)
    why = f"gcd({num_heads} heads, {cp_size} ranks) = {common}"
    if ulysses != common:
        why += f", at most {limit} ranks of one node"
    return Factors(ulysses, cp_size // ulysses, why)


def divisors(number: int) -> list[int]:
    """Return all divisors, in order."""
    return [n for n in range(1, number + 1) if number % n == 0]


def join_with_or(numbers: list[int]) -> str:
    """Return numbers as text: ``1, 2 or 4``."""
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last
