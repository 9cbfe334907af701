"""The cost of tiling, merging and re-arranging: each rank of a ring in turn on one device, kernels only.

    python -m benchmarks.replay                 # on a GPU
    python -m benchmarks.replay --device cpu --tokens-per-rank 512

A rank runs the real code, forward and backward, but nothing is sent: each hop's messages are random numbers
that already lie in separate memory. *Efficiency* is the time of one call over the whole sequence on the same
kernel, divided by (ranks x the slowest rank's time): the loss without any communication. The tables also have
the calls of ring-flash-attention's zigzag rings on the same kernel.

Packed documents: the rate of a rank, if all were as slow as the slowest, over the rate of the same kernel on
one causal document of 32,768 tokens. Only the two ranks with the most work and the one with the most tiles
are replayed (*ranks timed* counts them). Another rank may be slower.

FLOPs are those of visible pairs, 4 x head dim x heads each, and 2.5 times as many in backward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.markdown import markdown_head
from benchmarks.no_comm import one_rank
from lightning_cp.bench.kernels import request_of
from lightning_cp.bench.methods import BACKWARD_FLOPS, AttentionCase, ContextParallelMethod, Step
from lightning_cp.bench.timers import Figure, largest_spread, measure
from lightning_cp.kernels.per_tile import Gradients, PerTileKernel
from lightning_cp.kernels.protocol import QKV, Output, Scores
from lightning_cp.kernels.select import kernels
from lightning_cp.kernels.varlen import FlashCall, FlashMask, Pack, Spans, VarlenKernel
from lightning_cp.layout import ALL_ROWS, Schedule, Tile
from lightning_cp.utils import console as table
from lightning_cp.utils.command_help import argument_parser

Keys = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""Step -> K and V [B, 2c, K, D] that have arrived; or their gradients."""


@dataclass(frozen=True)
class ZigzagCalls:
    """The kernel calls of ring-flash-attention on one rank of its zigzag ring, without the package.

    The slices, their order and the use of the results follow version 0.1.8 (``zigzag_ring_flash_attn.py`` and
    ``update_out_and_lse``), with a kernel of ours in the place of flash-attn. A rank holds two chunks of c
    tokens each; the keys of rank r - s arrive at step s:

    ==========  ================  =================
    step        queries           keys
    ==========  ================  =================
    0           both chunks       its own, causal
    1 .. r      both chunks       the first chunk
    r+1 .. N-1  the second chunk  both chunks
    ==========  ================  =================

    Args:
        kernel: its operator is called once per step.
        scores: the scale; causal.
        rank: rank in the ring.
        ranks: size of the ring.
    """

    kernel: PerTileKernel
    scores: Scores
    rank: int
    ranks: int

    def tiles(self, tokens: int) -> list[Tile]:
        """Return each step's tile, in indices of the local queries and of the arrived keys."""
        chunk = tokens // 2
        own = Tile(ALL_ROWS, 0, tokens, 0, tokens, 0, "causal")
        early = Tile(ALL_ROWS, 0, tokens, 0, chunk, 0, "full")
        late = Tile(ALL_ROWS, chunk, chunk, 0, tokens, 0, "full")
        return [own, *(early if step <= self.rank else late for step in range(1, self.ranks))]

    def forward(self, q_BLHD: torch.Tensor, keys: Keys) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``out`` [B, L, H, D] in q's dtype and ``lse`` [B, H, L] in float32."""
        out: torch.Tensor | None = None
        lse: torch.Tensor | None = None  # [B, L, H, 1] while it is merged
        for step, tile in enumerate(self.tiles(q_BLHD.shape[1])):
            found, found_lse = self.kernel.attend(
                _slices(tile, q_BLHD, *keys(step)), _at(tile), self.scores
            )
            new, new_lse = found.to(torch.float32), found_lse.transpose(1, 2).unsqueeze(-1)
            if out is None or lse is None:
                out, lse = new, new_lse
            elif tile.q_start == 0:
                out, lse = _merge(out, lse, new, new_lse)
            else:
                part = slice(tile.q_start, None)
                out[:, part], lse[:, part] = _merge(out[:, part], lse[:, part], new, new_lse)
        assert out is not None
        assert lse is not None
        return out.to(q_BLHD.dtype), lse.squeeze(-1).transpose(1, 2)

    def backward(
        self, merged: Output, q_BLHD: torch.Tensor, keys: Keys, came: Keys
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return ``dq``, and in float32 ``dk, dv`` of the rank's own keys, which then travel around the ring.

        Args:
            merged: out, lse and dout of all steps.
            q_BLHD: the rank's queries.
            keys: the arrived keys by step.
            came: step -> the travelling float32 gradients of those keys, to which this rank adds.
        """
        # Version 0.1.8 does not copy tensors that are float32 already, which gives wrong gradients.
        dq, dk, dv = (x.to(torch.float32, copy=True) for x in self._parts(merged, q_BLHD, keys, 0))
        for step, tile in enumerate(self.tiles(q_BLHD.shape[1])[1:], start=1):
            dq_part, *parts = self._parts(merged, q_BLHD, keys, step)
            dq[:, tile.q_start : tile.q_start + tile.q_len] += dq_part
            for total, part in zip(came(step), parts, strict=True):
                total[:, tile.k_start : tile.k_start + tile.k_len] += part
        return dq.to(q_BLHD.dtype), dk, dv

    def _parts(self, merged: Output, q_BLHD: torch.Tensor, keys: Keys, step: int) -> Gradients:
        """Return the gradients of one step's slices."""
        tile = self.tiles(q_BLHD.shape[1])[step]
        queries = slice(tile.q_start, tile.q_start + tile.q_len)
        lse = merged.lse[:, :, queries].contiguous()
        known = Output(merged.dout[:, queries], merged.out[:, queries], lse)
        return self.kernel.differentiate(
            known, _slices(tile, q_BLHD, *keys(step)), _at(tile), self.scores
        )


@dataclass(frozen=True)
class PackedZigzagCalls:
    """The varlen calls of ring-flash-attention on one rank of its zigzag ring, one for each step.

    Each document is padded to ``2 * ranks`` chunks, so that every rank holds two of it. The slices follow
    version 0.1.8 (``zigzag_ring_flash_attn_varlen.py``): as in :class:`ZigzagCalls`, for each document.

    Args:
        kernel: an operator of FlashAttention.
        scores: the scale; causal.
        rank: rank in the ring.
        ranks: size of the ring.
        lengths: this rank's tokens of each document, all even.
    """

    kernel: VarlenKernel
    scores: Scores
    rank: int
    ranks: int
    lengths: tuple[int, ...]

    @cached_property
    def packs(self) -> list[Pack]:
        """Each step's call."""
        causal, full = FlashMask(True, -1, -1), FlashMask(False, -1, -1)
        ends = list(accumulate(self.lengths))
        places = [(end - length, length) for end, length in zip(ends, self.lengths, strict=True)]
        whole = Spans([(0, start, length) for start, length in places])
        first = Spans([(0, start, length // 2) for start, length in places])
        last = Spans([(0, start + length // 2, length // 2) for start, length in places])
        own, early, late = (
            Pack(causal, whole, whole),
            Pack(full, whole, first),
            Pack(full, last, whole),
        )
        return [own, *(early if step <= self.rank else late for step in range(1, self.ranks))]

    def forward(self, q_BLHD: torch.Tensor, keys: Keys) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``out`` [1, L, H, D] in q's dtype and ``lse`` [1, H, L] in float32."""
        out: torch.Tensor | None = None
        lse: torch.Tensor | None = None  # [L, H, 1] while it is merged
        for step, pack in enumerate(self.packs):
            inputs = self._inputs(pack, q_BLHD, keys(step))
            found, found_lse = self.kernel.run_forward(
                inputs, self._call(pack, q_BLHD), self.scores
            )
            new, new_lse = found.to(torch.float32), found_lse.T.unsqueeze(-1)
            if out is None or lse is None:
                out, lse = new, new_lse
            elif pack.q.run is not None:
                out, lse = _merge(out, lse, new, new_lse)
            else:
                at = pack.q.index(q_BLHD.device)[1]
                out[at], lse[at] = _merge(out[at], lse[at], new, new_lse)
        assert out is not None
        assert lse is not None
        return out.to(q_BLHD.dtype).unsqueeze(0), lse.squeeze(-1).T.unsqueeze(0)

    def backward(
        self, merged: Output, q_BLHD: torch.Tensor, keys: Keys, came: Keys
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As :meth:`ZigzagCalls.backward`."""
        dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q_BLHD, *keys(0)))
        for step, pack in enumerate(self.packs):
            dout, out = (pack.q.take(x) for x in (merged.dout, merged.out))
            lse = pack.q.take(merged.lse.transpose(1, 2)).T.contiguous()
            inputs = self._inputs(pack, q_BLHD, keys(step))
            parts = self.kernel.run_backward(
                Output(dout, out, lse), inputs, self._call(pack, q_BLHD), self.scores
            )
            totals = (dk, dv) if step == 0 else came(step)
            spans = (pack.q, pack.k, pack.k)
            for place, total, part in zip(spans, (dq, *totals), parts, strict=True):
                place.add(total, part)
        return dq.to(q_BLHD.dtype), dk, dv

    def _inputs(self, pack: Pack, q: torch.Tensor, keys: tuple[torch.Tensor, torch.Tensor]) -> QKV:
        return QKV(pack.q.take(q), *(pack.k.take(x) for x in keys))

    def _call(self, pack: Pack, q: torch.Tensor) -> FlashCall:
        boundaries = pack.q.cu_seqlens(q.device), pack.k.cu_seqlens(q.device)
        return FlashCall(pack.mask, pack.q.longest, pack.k.longest, boundaries)


def _merge(
    out: torch.Tensor, lse: torch.Tensor, new: torch.Tensor, new_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    merged = out - F.sigmoid(new_lse - lse) * (out - new)
    return merged, lse - F.logsigmoid(lse - new_lse)


def _slices(tile: Tile, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> QKV:
    keys = slice(tile.k_start, tile.k_start + tile.k_len)
    return QKV(q[:, tile.q_start : tile.q_start + tile.q_len], k[:, keys], v[:, keys])


def _at(tile: Tile) -> Tile:
    """Return the tile in indices of its own slices."""
    return tile._replace(q_start=0, k_start=0)


@dataclass(frozen=True)
class Seconds:
    """The minimum times of a rank's passes."""

    forward: float
    backward: float
    spread: float | None = 0.0
    """(maximum - minimum) / minimum of the repeats, the larger of both passes."""

    @property
    def both(self) -> float:
        """Forward and backward in sequence."""
        return self.forward + self.backward

    @classmethod
    def slowest(cls, ranks: Sequence[Seconds]) -> Seconds:
        """Return the slowest rank's time of each pass."""
        forward, backward, spread = zip(
            *((x.forward, x.backward, x.spread) for x in ranks), strict=True
        )
        return cls(max(forward), max(backward), largest_spread(spread))


def replay(way: ContextParallelMethod, case: AttentionCase, rank: int, repeats: int) -> Seconds:
    """Time one rank's passes."""
    with one_rank(way, case, rank, arrived=True) as alone:
        alone.forward()
        alone.backward()  # now the arriving tensors exist
        return _seconds((alone.forward, alone.backward), case, repeats)


def replay_ring_flash_attention(
    kernel: PerTileKernel, case: AttentionCase, rank: int, repeats: int
) -> Seconds:
    """Time one rank in ring-flash-attention's sequence of calls; each step has separate keys here too."""
    calls: Any
    if case.packed:
        assert isinstance(kernel, VarlenKernel)
        parts = 2 * case.ranks
        lengths = tuple(2 * -(-length // parts) for length in case.lengths)
        scores = Scores(case.spec.scale(case.head_dim), case.spec.mask)
        calls = PackedZigzagCalls(kernel, scores, rank, case.ranks, lengths)
        q, k, v = (x.detach() for x in case.inputs(sum(lengths)))
        dout = torch.randn_like(q)
    else:
        way = ContextParallelMethod(1, case.ranks, kernel=kernel.name)
        with one_rank(way, case, rank) as alone:
            calls = ZigzagCalls(kernel, alone.plan.scores, rank, case.ranks)
            (q, k, v), dout = alone.inputs, alone.dout
    arrived = [(k, v), *((torch.randn_like(k), torch.randn_like(v)) for _ in range(1, case.ranks))]
    came = [
        (torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32))
        for k, v in arrived
    ]
    keys = arrived.__getitem__
    out, lse = calls.forward(q, keys)
    merged = Output(dout, out, lse)
    backward = partial(calls.backward, merged, q, keys, came.__getitem__)
    return _seconds((partial(calls.forward, q, keys), backward), case, repeats)


def _seconds(passes: Sequence[Step], case: AttentionCase, repeats: int) -> Seconds:
    """Time the passes: CPU-seconds on CPU, else wall time of finished device work."""
    found: list[Figure] = []
    for step in passes:
        samples = measure(step, repeats=repeats, device_type=case.device_type)
        found.append(Figure.of(samples.cpu if case.device_type == "cpu" else samples.wall))
    forward, backward = found
    return Seconds(forward.best, backward.best, largest_spread((forward.spread, backward.spread)))


KERNELS = {
    "cuda": ("triton", "aten_cuda_flash", "aten_cuda_cudnn", "flash_attn_3"),
    "cpu": ("aten_cpu_flash",),
}
"""Kernels that are replayed by default where they can run, by device type: those that ``auto`` chooses."""
DENSE_TOKENS = 32768
"""Tokens of the single document that packed ones are compared with, on a GPU."""


@dataclass(frozen=True)
class DenseRow:
    """One causal document around a zigzag ring."""

    kernel: str
    calls: str
    """The library whose sequence of calls is replayed."""
    ranks: int
    tokens: int
    whole: Seconds
    """One call over all tokens."""
    slowest: Seconds

    def efficiency(self, of_pass: str) -> float:
        """Return the efficiency of ``forward``, ``backward`` or ``both``."""
        return float(getattr(self.whole, of_pass) / (self.ranks * getattr(self.slowest, of_pass)))


@dataclass(frozen=True)
class PackedRow:
    """Packed documents around a ring; rates in 10^12 operations per second."""

    kernel: str
    calls: str
    """The library whose sequence of calls is replayed."""
    ranks: int
    timed: int
    """Ranks that were replayed: those that may be the slowest."""
    tokens: int
    documents: int
    tiles: int
    """The largest number of tiles of a rank, in forward."""
    rate: Seconds
    dense_rate: Seconds

    def share(self, of_pass: str) -> float:
        """Return the share of the dense rate, in ``forward`` or ``backward``."""
        return float(getattr(self.rate, of_pass) / getattr(self.dense_rate, of_pass))


def dense_rows(case: AttentionCase, kernel: str, repeats: int) -> Iterator[DenseRow]:
    """Yield our row, and ring-flash-attention's where the kernel takes one tile per call."""
    alone = replace(case, ranks=1)
    whole = replay(ContextParallelMethod(1, 1, kernel=kernel), alone, 0, repeats)
    way = ContextParallelMethod(1, case.ranks, kernel=kernel)
    ours = [replay(way, case, rank, repeats) for rank in range(case.ranks)]
    common = (case.ranks, case.tokens, whole)
    yield DenseRow(kernel, "ours", *common, Seconds.slowest(ours))
    made = kernels()[kernel]
    if isinstance(made, PerTileKernel):
        theirs = [
            replay_ring_flash_attention(made, case, rank, repeats) for rank in range(case.ranks)
        ]
        yield DenseRow(kernel, "ring-flash-attention", *common, Seconds.slowest(theirs))


def packed_rows(
    case: AttentionCase, kernel: str, dense_rate: Seconds, repeats: int
) -> Iterator[PackedRow]:
    """Yield our row, and ring-flash-attention's where the kernel has packed calls.

    Its ranks all compute about the same: the first and the last are replayed.
    """
    ours = packed_row(case, kernel, dense_rate, repeats)
    yield ours
    made = kernels()[kernel]
    if isinstance(made, VarlenKernel):
        ranks = (0, case.ranks - 1)
        found = Seconds.slowest(
            [replay_ring_flash_attention(made, case, rank, repeats) for rank in ranks]
        )
        rate = _rate(case, found)
        theirs = {"calls": "ring-flash-attention", "timed": len(ranks), "tiles": case.ranks}
        yield replace(ours, rate=rate, **theirs)  # type: ignore[arg-type]


def packed_row(case: AttentionCase, kernel: str, dense_rate: Seconds, repeats: int) -> PackedRow:
    """Return the row whose rate is that of the slowest replayed rank."""
    way = ContextParallelMethod(1, case.ranks, kernel=kernel)
    plan = way.schedule(case)
    ranks = heaviest(plan)
    found = Seconds.slowest([replay(way, case, rank, repeats) for rank in ranks])
    documents = case.documents
    assert documents is not None
    sizes = (case.ranks, len(ranks), case.tokens, len(documents.rows[0]))
    tiles = max(num_tiles(plan, rank) for rank in ranks)
    return PackedRow(kernel, "ours", *sizes, tiles, _rate(case, found), dense_rate)


def num_tiles(plan: Schedule, rank: int) -> int:
    """Return the number of a ring rank's tiles, of all hops."""
    return sum(len(hop.tiles) for hop in plan.rank(rank).hops)


def heaviest(plan: Schedule) -> list[int]:
    """Return the ring ranks that may be slowest: two with most visible pairs, one with most tiles."""
    ranks = range(plan.layout.ring_size)
    by_work = sorted(ranks, key=lambda rank: plan.work[rank])
    most_tiles = max(ranks, key=lambda rank: num_tiles(plan, rank))
    return sorted({*by_work[-2:], most_tiles})


def rate_of_one(case: AttentionCase, kernel: str, repeats: int) -> Seconds:
    """Return 10^12 operations per second of one causal document on one rank."""
    alone = replace(case, ranks=1, packed=0)
    return _rate(alone, replay(ContextParallelMethod(1, 1, kernel=kernel), alone, 0, repeats))


def _rate(case: AttentionCase, seconds: Seconds) -> Seconds:
    each = case.flops / case.ranks / 1e12
    return Seconds(each / seconds.forward, BACKWARD_FLOPS * each / seconds.backward)


DENSE_HEAD = (
    *("kernel", "calls", "ranks", "tokens", "whole fwd, ms", "slowest rank fwd, ms"),
    *("whole bwd, ms", "slowest rank bwd, ms", "efficiency fwd", "bwd", "fwd+bwd"),
)
PACKED_HEAD = (
    *("kernel", "calls", "ranks", "ranks timed", "tokens", "documents", "tiles of a rank"),
    *("fwd, TFLOP/s", "bwd, TFLOP/s", "of dense, fwd", "of dense, bwd"),
)


def dense_cells(row: DenseRow) -> list[object]:
    """Return a line's cells."""
    passes = ("forward", "backward", "both")
    times = (row.whole.forward, row.slowest.forward, row.whole.backward, row.slowest.backward)
    return [
        *(row.kernel, row.calls, row.ranks, row.tokens),
        *(f"{1e3 * seconds:.3f}" for seconds in times),
        *(f"{row.efficiency(of_pass):.3f}" for of_pass in passes),
    ]


def packed_cells(row: PackedRow) -> list[object]:
    """Return a line's cells."""
    return [
        *(row.kernel, row.calls, row.ranks, row.timed, row.tokens, row.documents, row.tiles),
        *(f"{rate:.1f}" for rate in (row.rate.forward, row.rate.backward)),
        *(f"{row.share(of_pass):.3f}" for of_pass in ("forward", "backward")),
    ]


@dataclass(frozen=True)
class ReplaySizes:
    """The sizes of a replay on a device."""

    tokens_per_rank: int
    dense_ranks: Sequence[int]
    packed_ranks: Sequence[int]
    repeats: int
    dense_tokens: int = DENSE_TOKENS
    dtype: torch.dtype = torch.bfloat16
    device_type: str = "cuda"

    def dense(self, ranks: int) -> AttentionCase:
        """Heads of an 8-billion-parameter Llama."""
        return self._case(self.tokens_per_rank * ranks, ranks, 32)

    def packed(self, ranks: int) -> AttentionCase:
        """64 query and 8 K/V heads; documents of 4,096 tokens on average, if ranks have 8,192."""
        tokens = self.tokens_per_rank * ranks
        return replace(self._case(tokens, ranks, 64), packed=2 * ranks)

    def one_document(self) -> AttentionCase:
        """One causal document with the heads of :meth:`packed`."""
        return self._case(self.dense_tokens, 1, 64)

    def _case(self, tokens: int, ranks: int, heads: int) -> AttentionCase:
        return AttentionCase(
            *(tokens, ranks, heads, 8, 128), dtype=self.dtype, device_type=self.device_type
        )


def refusals(names: Sequence[str], case: AttentionCase) -> dict[str, str]:
    """Return the reasons of the kernels that cannot compute a case here, by their names."""
    every, request = kernels(), request_of(case)
    found = {name: every[name].capabilities.refusal(request) for name in names}
    return {name: reason for name, reason in found.items() if reason is not None}


def all_dense(size: ReplaySizes, kernel: str) -> list[DenseRow]:
    """Replay one document with every number of ranks."""
    return [
        row
        for ranks in size.dense_ranks
        for row in dense_rows(size.dense(ranks), kernel, size.repeats)
    ]


def all_packed(size: ReplaySizes, kernel: str) -> list[PackedRow]:
    """Replay packed documents with every number of ranks."""
    dense_rate = rate_of_one(size.one_document(), kernel, size.repeats)
    return [
        row
        for ranks in size.packed_ranks
        for row in packed_rows(size.packed(ranks), kernel, dense_rate, size.repeats)
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
    size = ReplaySizes(
        *(given.tokens_per_rank, given.dense_ranks, given.packed_ranks, given.repeats),
        dense_tokens=given.tokens_per_rank if on_cpu else DENSE_TOKENS,
        dtype=torch.float32 if on_cpu else torch.bfloat16,
        device_type=given.device,
    )
    names = given.kernels or KERNELS[given.device]
    dense, packed = (_able(names, case) for case in (size.dense(1), size.packed(1)))
    print(markdown_head(DENSE_HEAD))
    for name in dense:
        for row in all_dense(size, name):
            print(table.markdown_row(dense_cells(row)), flush=True)
    print(f"\n{markdown_head(PACKED_HEAD)}")
    for name in packed:
        for row in all_packed(size, name):
            print(table.markdown_row(packed_cells(row)), flush=True)


def _able(names: Sequence[str], case: AttentionCase) -> list[str]:
    """Return the kernels that can compute a case; print the reasons of the others."""
    missing = refusals(names, case)
    for name, reason in missing.items():
        print(f"{name} {reason}", file=sys.stderr)
    return [name for name in names if name not in missing]


if __name__ == "__main__":
    main()
