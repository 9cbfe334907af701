"""The split of heads over Ulysses ranks: query heads of each rank, and the K/V heads that it receives.

Query heads split evenly. A rank receives exactly the K/V heads that its query heads use, so any
number of K/V heads works: a K/V head used by several ranks is sent to each of them, and where the
local query heads straddle groups unevenly the keys are expanded locally (``HeadBlock.kv_of_q``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from lightning_cp.errors import ConfigError, ShapeError


class HeadBlock(NamedTuple):
    """Consecutive local K/V heads of a rank, and its local query heads that use them."""

    kv: tuple[int, int]
    q: tuple[int, int]
    kv_of_q: tuple[int, ...] | None
    """K/V head, counted within the block, of each query head; ``None`` for plain grouping."""


@dataclass(frozen=True)
class HeadSplit:
    """Heads of an attention call over ``ulysses_size`` ranks.

    Raises:
        ConfigError: a size below 1, or query heads do not divide by ``ulysses_size``.
        ShapeError: query heads do not divide by K/V heads.
    """

    num_heads: int
    num_kv_heads: int
    ulysses_size: int

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.ulysses_size < 1:
            raise ConfigError(
                f"the number of attention heads and ulysses_size must be at least 1, got "
                f"{self.num_heads} heads and ulysses_size={self.ulysses_size}. "
                "Set num_heads to the number of query heads of the model."
            )
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ShapeError(
                f"the number of query heads must be a multiple of the number of K/V heads, got "
                f"{self.num_heads} query heads and {self.num_kv_heads} K/V heads. "
                "Correct the sizes of the model."
            )
        if self.num_heads % self.ulysses_size:
            works = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise ConfigError(
                f"ulysses_size={self.ulysses_size} does not divide the {self.num_heads} attention heads. "
                f"Sizes that work: {', '.join(map(str, works))}; give the rest of the ranks to the ring."
            )

    @property
    def local_heads(self) -> int:
        """Query heads per rank."""
        return self.num_heads // self.ulysses_size

    @property
    def group(self) -> int:
        """Query heads per K/V head."""
        return self.num_heads // self.num_kv_heads

    def q_range(self, rank: int) -> tuple[int, int]:
        """First and past-last query head of a rank."""
        size = self.local_heads
        return rank * size, (rank + 1) * size

    def kv_range(self, rank: int) -> tuple[int, int]:
        """First and past-last K/V head that a rank receives."""
        first, last = self.q_range(rank)
        return first // self.group, (last - 1) // self.group + 1

    def num_local_kv(self, rank: int) -> int:
        """K/V heads that a rank receives."""
        first, last = self.kv_range(rank)
        return last - first

    def blocks(self, rank: int, kv_heads: int | None = None) -> tuple[HeadBlock, ...]:
        """Return a rank's heads in blocks of at most ``kv_heads`` K/V heads; one block for ``None``."""
        return _blocks(self, rank, kv_heads)

    @property
    def shares_kv(self) -> bool:
        """True if some K/V head is sent to more than one rank, so that its gradients are summed."""
        return sum(self.num_local_kv(rank) for rank in range(self.ulysses_size)) > self.num_kv_heads


@lru_cache(maxsize=256)
def _blocks(split: HeadSplit, rank: int, kv_heads: int | None) -> tuple[HeadBlock, ...]:
    first_q, last_q = split.q_range(rank)
    first_kv, last_kv = split.kv_range(rank)
    used = [head // split.group for head in range(first_q, last_q)]
    blocks: list[HeadBlock] = []
    for first in range(first_kv, last_kv, kv_heads or last_kv - first_kv):
        last = min(first + kv_heads, last_kv) if kv_heads else last_kv
        index = tuple(kv - first for kv in used if first <= kv < last)
        start = sum(kv < first for kv in used)
        per_kv, rest = divmod(len(index), last - first)
        plain = not rest and index == tuple(i // per_kv for i in range(len(index)))
        queries = (start, start + len(index))
        blocks.append(
            HeadBlock((first - first_kv, last - first_kv), queries, None if plain else index)
        )
    return tuple(blocks)
