"""Bytes of the tensors of an attention call, by how many tokens or keys they have."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_cp.layout.heads import HeadBlock


@dataclass(frozen=True)
class Sizes:
    """Bytes of some tokens, or keys, of all rows of a batch and of some heads."""

    batch: int
    head_dim: int
    """Of q and k."""
    value_dim: int
    itemsize: int
    wide: int
    """Bytes per entry of what is accumulated."""
    heads: int
    kv_heads: int
    one_width: bool = False
    """The kernel pads what is narrower of K and V (``Capabilities.one_width``)."""
    expanded: bool = False
    """K/V heads are repeated for the kernel, since query heads straddle them."""

    @property
    def rounds(self) -> bool:
        """The inputs' dtype is not the one of accumulation."""
        return self.wide != self.itemsize

    def of_block(self, block: HeadBlock) -> Sizes:
        """The same for a block of heads."""
        heads, kv_heads = block.q[1] - block.q[0], block.kv[1] - block.kv[0]
        straddles = block.kv_of_q is not None
        return replace(self, heads=heads, kv_heads=kv_heads, expanded=straddles)

    def q(self, tokens: int, *, wide: bool = False) -> int:
        """Something shaped like q."""
        return tokens * self.batch * self.heads * self.head_dim * self._item(wide)

    def out(self, tokens: int, *, wide: bool = False) -> int:
        """Something shaped like out."""
        return tokens * self.batch * self.heads * self.value_dim * self._item(wide)

    def kv(self, keys: int, *, wide: bool = False) -> int:
        """A pair of something shaped like k and like v."""
        return keys * self.batch * self.kv_heads * self._pair * self._item(wide)

    def v(self, keys: int) -> int:
        """Something shaped like v."""
        return keys * self.batch * self.kv_heads * self.value_dim * self.itemsize

    def lse(self, tokens: int) -> int:
        """A wide number for each query and head."""
        return tokens * self.batch * self.heads * self.wide

    def result(self, tokens: int) -> int:
        """``out`` and ``lse`` of one kernel call."""
        return self.out(tokens) + self.lse(tokens)

    def accumulator(self, tokens: int) -> int:
        """Wide ``out`` and ``lse``."""
        return self.out(tokens, wide=True) + self.lse(tokens)

    def for_kernel(self, queries: int, keys: int, *, backward: bool = False) -> int:
        """The memory of a call beside q, the pair and out: repeated heads, padding; in backward dk and dv."""
        padded = self._padded(queries, keys, backward=backward)
        return padded + self._of_keys(keys, backward=backward)

    def _of_keys(self, keys: int, *, backward: bool) -> int:
        repeated = keys * self.batch * self.heads * self._pair
        expanded = repeated * self.itemsize if self.expanded else 0
        if not backward:
            return expanded
        own = repeated * self.itemsize if self.expanded else self.kv(keys)
        return own + expanded + (repeated * self.wide if self.expanded else 0)

    def _padded(self, queries: int, keys: int, *, backward: bool) -> int:
        """Copies of what is narrower, as wide as the rest; results before they are cut."""
        if not self.one_width or self.head_dim == self.value_dim:
            return 0
        heads = self.heads if self.expanded else self.kv_heads
        of_queries, of_keys = queries * self.heads, keys * heads
        # A narrow V: v and out, in backward dout and dv too; a wide one: q and k, in backward dq and dk too.
        copies = (2 if backward else 1) * (of_queries + of_keys)
        return copies * self.batch * max(self.head_dim, self.value_dim) * self.itemsize

    @property
    def _pair(self) -> int:
        """Entries per head of K and V."""
        return self.head_dim + self.value_dim

    def _item(self, wide: bool) -> int:
        return self.wide if wide else self.itemsize
