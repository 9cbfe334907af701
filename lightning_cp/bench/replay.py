"""What tiling, merging and re-arranging cost: every rank of a ring in turn on one device, kernels only.

    python -m lightning_cp.bench.replay                 # on a GPU
    python -m lightning_cp.bench.replay --device cpu --tokens-per-rank 512

A rank runs the real code, forward and backward, but nothing is sent: what would arrive is random numbers
that lie there already, each hop's in memory of its own. *Efficiency* is the time of one call over the whole
sequence on the same kernel, divided by (ranks x the slowest rank's time): what is lost without any
communication. Beside it the calls of ring-flash-attention's zigzag ring on the same kernel
(:mod:`lightning_cp.bench.ring_flash_attn_calls`).

Packed documents: the rate of a rank, if all were as slow as the slowest, over the rate of the same kernel on
one causal document of 32,768 tokens. Not every rank is replayed, but the two with the most work and the one
with the most tiles; *ranks timed* says how many that were. One of the others may be slower.

FLOPs are those of visible pairs, 4 x head dim x heads each, and 2.5 times as many in backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from lightning_cp.bench import table
from lightning_cp.bench.case import BACKWARD_FLOPS, Case
from lightning_cp.bench.replay_rank import Seconds, replay, replay_theirs
from lightning_cp.bench.ways import Ours
from lightning_cp.command_help import argument_parser
from lightning_cp.kernels.api import kernels
from lightning_cp.kernels.call_per_tile import CallPerTile
from lightning_cp.layout import Schedule

KERNELS = {"cuda": ("triton", "aten_cuda_flash"), "cpu": ("aten_cpu_flash",)}
"""By device type: what is replayed if nothing else is asked for."""
DENSE_TOKENS = 32768
"""Of the one document whose rate packed ones are compared with, on a GPU."""


@dataclass(frozen=True)
class DenseRow:
    """One causal document around a zigzag ring."""

    kernel: str
    calls: str
    """Whose sequence of calls."""
    ranks: int
    tokens: int
    whole: Seconds
    """One call over all tokens."""
    slowest: Seconds

    def efficiency(self, of_pass: str) -> float:
        """Of ``forward``, ``backward`` or ``both``."""
        return float(getattr(self.whole, of_pass) / (self.ranks * getattr(self.slowest, of_pass)))


@dataclass(frozen=True)
class PackedRow:
    """Packed documents around a ring; rates in 10^12 operations a second."""

    kernel: str
    ranks: int
    timed: int
    """Ranks that were replayed: those that may be the slowest."""
    tokens: int
    documents: int
    tiles: int
    """Most of a rank, in forward."""
    rate: Seconds
    dense_rate: Seconds

    def share(self, of_pass: str) -> float:
        """Of the dense rate, in ``forward`` or ``backward``."""
        return float(getattr(self.rate, of_pass) / getattr(self.dense_rate, of_pass))


def dense_rows(case: Case, kernel: str, repeats: int) -> Iterator[DenseRow]:
    """Ours, and ring-flash-attention's where the kernel takes one tile a call."""
    alone = replace(case, ranks=1)
    whole = replay(Ours(1, 1, kernel=kernel), alone, 0, repeats)
    way = Ours(1, case.ranks, kernel=kernel)
    ours = [replay(way, case, rank, repeats) for rank in range(case.ranks)]
    common = (case.ranks, case.tokens, whole)
    yield DenseRow(kernel, "ours", *common, Seconds.slowest(ours))
    made = kernels()[kernel]
    if isinstance(made, CallPerTile):
        theirs = [replay_theirs(made, case, rank, repeats) for rank in range(case.ranks)]
        yield DenseRow(kernel, "ring-flash-attention", *common, Seconds.slowest(theirs))


def packed_row(case: Case, kernel: str, dense_rate: Seconds, repeats: int) -> PackedRow:
    """The rate that the slowest of the ranks that are replayed leaves all with."""
    way = Ours(1, case.ranks, kernel=kernel)
    plan = way.schedule(case)
    ranks = heaviest(plan)
    found = Seconds.slowest([replay(way, case, rank, repeats) for rank in ranks])
    documents = case.documents
    assert documents is not None
    sizes = (case.ranks, len(ranks), case.tokens, len(documents.rows[0]))
    tiles = max(plan.rank(rank).num_tiles for rank in ranks)
    return PackedRow(kernel, *sizes, tiles, _rate(case, found), dense_rate)


def heaviest(plan: Schedule) -> list[int]:
    """The ring ranks that may be the slowest: most visible pairs (two of them), most tiles."""
    ranks = range(plan.layout.ring_size)
    by_work = sorted(ranks, key=lambda rank: plan.work[rank])
    most_tiles = max(ranks, key=lambda rank: plan.rank(rank).num_tiles)
    return sorted({*by_work[-2:], most_tiles})


def rate_of_one(case: Case, kernel: str, repeats: int) -> Seconds:
    """10^12 operations a second of one causal document on one rank."""
    alone = replace(case, ranks=1, packed=0)
    return _rate(alone, replay(Ours(1, 1, kernel=kernel), alone, 0, repeats))


def _rate(case: Case, seconds: Seconds) -> Seconds:
    each = case.flops / case.ranks / 1e12
    return Seconds(each / seconds.forward, BACKWARD_FLOPS * each / seconds.backward)


DENSE_HEAD = (
    *("kernel", "calls", "ranks", "tokens", "whole fwd, ms", "slowest rank fwd, ms"),
    *("whole bwd, ms", "slowest rank bwd, ms", "efficiency fwd", "bwd", "fwd+bwd"),
)
PACKED_HEAD = (
    *("kernel", "ranks", "ranks timed", "tokens", "documents", "tiles of a rank"),
    *("fwd, TFLOP/s", "bwd, TFLOP/s", "of dense, fwd", "of dense, bwd"),
)


def dense_cells(row: DenseRow) -> list[object]:
    """Of a line of the table."""
    passes = ("forward", "backward", "both")
    times = (row.whole.forward, row.slowest.forward, row.whole.backward, row.slowest.backward)
    return [
        *(row.kernel, row.calls, row.ranks, row.tokens),
        *(f"{1e3 * seconds:.3f}" for seconds in times),
        *(f"{row.efficiency(of_pass):.3f}" for of_pass in passes),
    ]


def packed_cells(row: PackedRow) -> list[object]:
    """Of a line of the table."""
    return [
        *(row.kernel, row.ranks, row.timed, row.tokens, row.documents, row.tiles),
        *(f"{rate:.1f}" for rate in (row.rate.forward, row.rate.backward)),
        *(f"{row.share(of_pass):.3f}" for of_pass in ("forward", "backward")),
    ]


@dataclass(frozen=True)
class Size:
    """What is replayed on a device."""

    tokens_per_rank: int
    dense_ranks: Sequence[int]
    packed_ranks: Sequence[int]
    repeats: int
    dense_tokens: int = DENSE_TOKENS
    dtype: torch.dtype = torch.bfloat16
    device_type: str = "cuda"

    def dense(self, ranks: int) -> Case:
        """Heads of an 8-billion-parameter Llama."""
        return self._case(self.tokens_per_rank * ranks, ranks, 32)

    def packed(self, ranks: int) -> Case:
        """64 query and 8 K/V heads; documents of 4,096 tokens on average, if ranks have 8,192."""
        tokens = self.tokens_per_rank * ranks
        return replace(self._case(tokens, ranks, 64), packed=2 * ranks)

    def one_document(self) -> Case:
        """The same heads, one causal document."""
        return self._case(self.dense_tokens, 1, 64)

    def _case(self, tokens: int, ranks: int, heads: int) -> Case:
        return Case(*(tokens, ranks, heads, 8, 128), dtype=self.dtype, device_type=self.device_type)


def all_dense(size: Size, kernel: str) -> list[DenseRow]:
    """Every number of ranks."""
    return [
        row
        for ranks in size.dense_ranks
        for row in dense_rows(size.dense(ranks), kernel, size.repeats)
    ]


def all_packed(size: Size, kernel: str) -> list[PackedRow]:
    """Every number of ranks."""
    dense_rate = rate_of_one(size.one_document(), kernel, size.repeats)
    return [
        packed_row(size.packed(ranks), kernel, dense_rate, size.repeats)
        for ranks in size.packed_ranks
    ]


def main() -> None:
    """Measure and print two Markdown tables."""
    parser = argument_parser(__doc__)
    parser.add_argument("--device", choices=list(KERNELS), default="cuda", help="it runs on")
    parser.add_argument("--kernels", nargs="+", help="by name; all that the device has if left out")
    parser.add_argument("--tokens-per-rank", type=int, default=8192, help="of one row")
    parser.add_argument(
        "--dense-ranks", type=int, nargs="*", default=[8], help="sizes of rings, one document"
    )
    parser.add_argument(
        "--packed-ranks",
        type=int,
        nargs="*",
        default=[8, 16, 32, 64],
        help="sizes of rings, packed documents",
    )
    parser.add_argument(
        "--repeats", type=int, default=10, help="of each measurement; the fastest counts"
    )
    given = parser.parse_args()
    on_cpu = given.device == "cpu"
    size = Size(
        *(given.tokens_per_rank, given.dense_ranks, given.packed_ranks, given.repeats),
        dense_tokens=given.tokens_per_rank if on_cpu else DENSE_TOKENS,
        dtype=torch.float32 if on_cpu else torch.bfloat16,
        device_type=given.device,
    )
    names = given.kernels or KERNELS[given.device]
    print(table.head(DENSE_HEAD))
    for name in names:
        for row in all_dense(size, name):
            print(table.row(dense_cells(row)), flush=True)
    print(f"\n{table.head(PACKED_HEAD)}")
    for name in names:
        for row in all_packed(size, name):
            print(table.row(packed_cells(row)), flush=True)


if __name__ == "__main__":
    main()
