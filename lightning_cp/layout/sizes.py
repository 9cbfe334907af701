"""Bytes of the tensors of an attention call, by how many tokens or keys they have."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_cp.layout.heads import HeadBlock


@dataclass(frozen=True)
class Sizes:
    """Bytes of some tokens, or keys, of all rows of a batch and of some heads."""

    batch: int
    head_dim: int
    itemsize: int
    wide: int
    """Bytes per entry of what is accumulated."""
    heads: int
    kv_heads: int
    expanded: bool = False
    """K/V heads are repeated for the kernel, since query heads straddle them."""

    @property
    def rounds(self) -> bool:
        """The inputs' dtype is not the one of accumulation."""
        return self.wide != self.itemsize

    def of_block(self, block: HeadBlock) -> Sizes:
        """The same for a block of heads."""
        heads, kv_heads = block.q[1] - block.q[0], block.kv[1] - block.kv[0]
        sizes = (self.batch, self.head_dim, self.itemsize, self.wide)
        return Sizes(*sizes, heads, kv_heads, block.kv_of_q is not None)

    def q(self, tokens: int, *, wide: bool = False) -> int:
        """Something shaped like q."""
        return tokens * self.batch * self.heads * self.head_dim * self._item(wide)

    def kv(self, keys: int, *, wide: bool = False) -> int:
        """A pair of something shaped like k."""
        return keys * self.batch * 2 * self.kv_heads * self.head_dim * self._item(wide)

    def lse(self, tokens: int) -> int:
        """A wide number for each query and head."""
        return tokens * self.batch * self.heads * self.wide

    def result(self, tokens: int) -> int:
        """``out`` and ``lse`` of one kernel call."""
        return self.q(tokens) + self.lse(tokens)

    def accumulator(self, tokens: int) -> int:
        """Wide ``out`` and ``lse``."""
        return self.q(tokens, wide=True) + self.lse(tokens)

    def for_kernel(self, keys: int, *, backward: bool = False) -> int:
        """What a call needs of keys beside the pair: repeated heads; in backward its dk and dv."""
        repeated = keys * self.batch * 2 * self.heads * self.head_dim
        expanded = repeated * self.itemsize if self.expanded else 0
        if not backward:
            return expanded
        own = repeated * self.itemsize if self.expanded else self.kv(keys)
        return own + expanded + (repeated * self.wide if self.expanded else 0)

    def _item(self, wide: bool) -> int:
        return self.wide if wide else self.itemsize
