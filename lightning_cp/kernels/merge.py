"""Accumulation over tiles: merging of partial results ``(out, lse)``, and sums of gradients.

With ``lse = logaddexp(lse_a, lse_b)`` the merged output is
``out_a exp(lse_a - lse) + out_b exp(lse_b - lse)`` (Dao 2023, arXiv 2307.08691, section 3.1;
Milakov and Gimelshein 2018, arXiv 1805.02867). A side without keys has ``lse = -inf`` and is the
identity. Memory is allocated or filled only where no single part covers the whole result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from lightning_cp.layout.tiles import ALL_ROWS
from lightning_cp.utils.tracing import profile_range


def merge(
    out_BLHD: torch.Tensor,
    lse_BHL: torch.Tensor,
    new_out_BLHD: torch.Tensor,
    new_lse_BHL: torch.Tensor,
) -> None:
    """Merge ``new`` into ``out, lse`` in place; both sides may be -inf.

    ``new_out`` may have a lower precision than ``out``; on CUDA it is widened entry by entry, and one kernel
    does it all if Triton is installed.
    """
    if _merge_by_triton(out_BLHD, lse_BHL, new_out_BLHD, new_lse_BHL):
        return
    torch.logaddexp(lse_BHL, new_lse_BHL, out=lse_BHL)
    # Where both sides are -inf, -inf - -inf would be NaN: these rows get weight 0, and out stays 0.
    merged = lse_BHL.clamp(min=torch.finfo(lse_BHL.dtype).min)
    weight = torch.exp(new_lse_BHL - merged).transpose(1, 2).unsqueeze(-1)
    if new_out_BLHD.dtype == out_BLHD.dtype:
        out_BLHD.lerp_(new_out_BLHD, weight)
    else:  # lerp takes one dtype only, and on CUDA a wide copy of ``new`` would be as large as ``out``
        out_BLHD.mul_(1 - weight).addcmul_(new_out_BLHD, weight)


def _merge_by_triton(
    out_BLHD: torch.Tensor,
    *others: torch.Tensor,
    at: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> bool:
    """Merge by one Triton kernel; return False where that is not possible, as on CPU."""
    if not out_BLHD.is_cuda:
        return False
    from lightning_cp.kernels.triton.merge import merge_on_gpu

    return merge_on_gpu(out_BLHD, *others, at=at)


def batch_rows(row: int) -> slice:
    """Return the batch rows that a ``Tile.row`` stands for."""
    return slice(None) if row == ALL_ROWS else slice(row, row + 1)


def fill_beside(x: torch.Tensor, row: int, start: int, end: int, value: float) -> None:
    """Fill [B, L, ...] but for the tokens ``start .. end`` of one batch row (or of ``ALL_ROWS``)."""
    if row != ALL_ROWS:
        x[:row].fill_(value)
        x[row + 1 :].fill_(value)
    own = x[batch_rows(row)]
    own[:, :start].fill_(value)
    own[:, end:].fill_(value)


class Accumulator:
    """Running ``(out, lse)`` of one rank's queries over the tiles seen so far.

    A first result that covers every query becomes the accumulator itself, in its dtype until another result
    arrives: a single call per rank (Ulysses, or one hop) costs neither a merge nor a wide copy.

    Args:
        q_BLHD: the queries.
        dtype: of the merge.
        value_dim: entries per head of the values, and so of ``out``; by default those of a query.
        single: one kernel call gives the whole result, so that it may be rounded at once.
    """

    def __init__(
        self,
        q_BLHD: torch.Tensor,
        dtype: torch.dtype,
        value_dim: int | None = None,
        *,
        single: bool = False,
    ) -> None:
        self._q = q_BLHD
        self._shape = (*q_BLHD.shape[:3], q_BLHD.shape[3] if value_dim is None else value_dim)
        self.dtype = dtype
        self._single = single
        self._out: torch.Tensor | None = None
        self._lse: torch.Tensor | None = None
        self._max: torch.Tensor | None = None

    def add(
        self,
        row: int,
        q_start: int,
        out_BLHD: torch.Tensor,
        lse_BHL: torch.Tensor,
        max_BHL: torch.Tensor | None = None,
    ) -> None:
        """Merge the result of queries ``q_start ..`` of one batch row (or of ``ALL_ROWS``).

        Args:
            row: the batch row.
            q_start: the first query.
            out_BLHD: partial output.
            lse_BHL: its log-sum-exp, -inf for a query without keys.
            max_BHL: the largest score of each query, -inf without keys; if ``Scores.max_logits``.
        """
        queries = slice(q_start, q_start + out_BLHD.shape[1])
        if max_BHL is not None:
            peak = self.max_logits[batch_rows(row), :, queries]
            torch.maximum(peak, max_BHL.to(peak.dtype), out=peak)
        if self._out is None and out_BLHD.shape == self._shape:
            self._out, self._lse = out_BLHD, lse_BHL.to(self.dtype)
            return
        rows = batch_rows(row)
        if self._out is None:
            out, lse = self._begin(row, queries)
            out[rows, queries], lse[rows, :, queries] = out_BLHD, lse_BHL
            return
        out, lse = self._buffers()
        with profile_range("merge"):
            merge(out[rows, queries], lse[rows, :, queries], out_BLHD, lse_BHL)

    def part_dtype(self, queries: int) -> torch.dtype:
        """Return the dtype for a result of so many queries: the queries' if nothing will be merged."""
        is_whole = self._single and self._out is None and queries == self._shape[1]
        return self._q.dtype if is_whole else self.dtype

    def add_at(
        self,
        rows: torch.Tensor,
        positions: torch.Tensor,
        out_THD: torch.Tensor,
        lse_HT: torch.Tensor,
    ) -> None:
        """Merge the results of scattered queries: int64 [T] rows and positions, each query once."""
        out, lse = self._buffers()
        with profile_range("merge"):
            new_out, new_lse = out_THD.unsqueeze(0), lse_HT.unsqueeze(0)
            if _merge_by_triton(out, lse, new_out, new_lse, at=(rows, positions)):
                return
            own_out, own_lse = out[rows, positions], lse[rows, :, positions].T
            merge(own_out.unsqueeze(0), own_lse.unsqueeze(0), new_out, new_lse)
            out[rows, positions], lse[rows, :, positions] = own_out, own_lse.T

    def widen(self) -> None:
        """Widen a first result now, before memory is allocated for another one."""
        if self._out is not None:
            self._buffers()

    def result(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``out`` [B, L, H, D] in ``dtype`` and ``lse`` [B, H, L] in the accumulation dtype."""
        if self._out is None or self._lse is None:
            self._buffers()
        assert self._out is not None
        assert self._lse is not None
        return self._out.to(dtype), self._lse

    @property
    def max_logits(self) -> torch.Tensor:
        """Largest score of each query, float32 [B, H, L]; -inf where none was added."""
        if self._max is None:
            batch, queries, heads, _ = self._shape
            shape = (batch, heads, queries)
            self._max = self._q.new_full(shape, -torch.inf, dtype=torch.float32)
        return self._max

    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._out is None or self._lse is None:
            return self._begin(ALL_ROWS, slice(0, 0))
        self._out = self._out.to(self.dtype)
        return self._out, self._lse

    def _begin(self, row: int, queries: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocate ``out`` and ``lse``, as without keys but for some queries, which the caller writes.

        ``out`` has the memory order of the queries' tokens and batch rows.
        """
        batch, length, heads, _ = self._shape
        order = sorted(range(3), key=lambda dim: -self._q.stride(dim))
        how = {"dtype": self.dtype, "device": self._q.device}
        self._out = torch.empty_permuted(self._shape, (*order, 3), **how)
        self._lse = torch.empty(batch, heads, length, **how)
        fill_beside(self._out, row, queries.start, queries.stop, 0.0)
        fill_beside(self._lse.transpose(1, 2), row, queries.start, queries.stop, -torch.inf)
        return self._out, self._lse


class GradientSum:
    """A gradient [B, L, H, D] that tiles add to, in the accumulation dtype.

    A first part that covers everything becomes the sum: in its own dtype until another part arrives, or as
    a copy if ``into`` is given. Of another first part only the tokens beside it are filled with zeros.

    Args:
        like: a tensor of the gradient's shape and device; released once there is a part.
        dtype: of the sum.
        into: memory for the sum, of that shape and dtype.
        empty: ``into`` holds no sum yet; otherwise parts are added to it.
        later: allocates the memory for :meth:`place`; zeros that are needed earlier are put there too.
    """

    def __init__(
        self,
        like: torch.Tensor,
        dtype: torch.dtype,
        *,
        into: torch.Tensor | None = None,
        empty: bool = True,
        later: Callable[[], torch.Tensor] | None = None,
    ) -> None:
        self._like = like
        self.dtype = dtype
        self._into = into
        self._later = later
        self._sum = None if empty else into

    @property
    def total(self) -> torch.Tensor:
        """The sum in its dtype, for additions in place."""
        self._sum = self._like = self.result.to(self.dtype)
        return self._sum

    @property
    def result(self) -> torch.Tensor:
        """The sum; in the part's dtype if there was only one part, zeros if there was none."""
        if self._sum is None:
            self._sum = self._like = self._memory().zero_()
        return self._sum

    def widen(self) -> None:
        """Widen a first part now, before memory is allocated for another one."""
        if self._sum is not None:
            self._sum = self._like = self._sum.to(self.dtype)

    def place(self) -> None:
        """Move the sum to the memory that ``later`` allocates, unless it is there already."""
        assert self._later is not None
        memory = self._later()
        if self._sum is None:
            memory.zero_()
        elif self._into is None:
            memory.copy_(self._sum)
        self._sum = self._like = self._into = memory

    @property
    def is_empty(self) -> bool:
        """True until there is a part."""
        return self._sum is None

    def begin(self, row: int, start: int, end: int) -> torch.Tensor:
        """Begin an empty sum with the tokens ``start .. end`` of one batch row (or of ``ALL_ROWS``).

        Returns:
            Memory of the whole sum, in which the caller writes these tokens; all others are 0.
        """
        assert self._sum is None
        self._sum = self._like = memory = self._memory()
        fill_beside(memory, row, start, end, 0.0)
        return memory

    def _memory(self) -> torch.Tensor:
        """Return the memory for a sum that is not its first part."""
        if self._into is None and self._later is not None:
            self._into = self._later()
        if self._into is None:
            return torch.empty_like(self._like, dtype=self.dtype)
        return self._into

    def add(self, row: int, start: int, part: torch.Tensor) -> None:
        """Add ``part`` [rows, l, H, D] to the tokens ``start ..`` of one batch row (or of ``ALL_ROWS``).

        The accumulator takes ownership of the part, which may become the sum.
        """
        if self._sum is None and part.shape == self._like.shape:
            self._sum = self._like = part if self._into is None else self._into.copy_(part)
            return
        end = start + part.shape[1]
        if self._sum is None:
            self.begin(row, start, end)[batch_rows(row), start:end] = part
            return
        self._sum = self._like = total = self._sum.to(self.dtype)
        total[batch_rows(row), start:end] += part


class GradientSums(NamedTuple):
    """Gradient sums of q, k and v."""

    q: GradientSum
    k: GradientSum
    v: GradientSum

    @classmethod
    def of(cls, *buffers: torch.Tensor) -> GradientSums:
        """Make sums that add to buffers, which are initialised."""
        q, k, v = (GradientSum(x, x.dtype, into=x, empty=False) for x in buffers)
        return cls(q, k, v)

    @classmethod
    def like(cls, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> GradientSums:
        """Make sums for q, k and v, with memory allocated on demand."""
        q, k, v = (GradientSum(x, dtype) for x in tensors)
        return cls(q, k, v)

    @property
    def totals(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The three sums, for additions in place."""
        return self.q.total, self.k.total, self.v.total
