"""Peak bytes of one rank's attention call in every mode, beside the closed form.

    python -m benchmarks.attention_memory

One rank after the other runs the real code, forward and backward, with CUDA's flash operator on tensors
without memory (PyTorch's fake tensors) and a process group that moves nothing; every storage that is made
and freed is counted. The call's inputs are not counted (q, k, v; in backward also dout and saved tensors), so
a figure is the memory that an attention call adds. Memory that an operator allocates and frees internally is
not seen. With ``--device cuda`` tensors are real, and the allocator's own peak is printed.

A row is the rank that needs most, at the longest sequence; the slope is the bytes of one more token of a
rank, fitted over all lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from benchmarks.markdown import markdown_head
from benchmarks.no_comm import one_rank
from benchmarks.step_memory import PeakBytes
from lightning_cp.bench.methods import (
    AttentionCase,
    ContextParallelMethod,
    context_parallel_methods,
)
from lightning_cp.kernels.aten import AtenCudaFlash
from lightning_cp.kernels.protocol import accumulate_dtype
from lightning_cp.kernels.varlen import PackRule
from lightning_cp.layout import attention_memory
from lightning_cp.layout.heads import HeadSplit
from lightning_cp.utils import console as table
from lightning_cp.utils.command_help import argument_parser

HEAD = (
    *("mode", "K/V heads at a time", "pass", "measured, MB", "closed form, MB", "measured / form"),
    *("bytes per local token", "the form's", "worst fit", "published list, MB"),
)
PASSES = ("forward", "backward")
KV_HEADS = (1, None)
"""K/V heads at a time in the modes that gather them; ``None`` is all."""
NO_PACKS = PackRule(fewest=1 << 62)


@dataclass(frozen=True)
class Peaks:
    """Peak bytes of one pass by length, on the rank that needs most."""

    local_tokens: list[int]
    measured: list[int]
    form: list[int]

    @property
    def slope(self) -> tuple[float, float]:
        """Bytes per local token, measured and in closed form."""
        measured, form = (
            np.polyfit(self.local_tokens, y, 1)[0] for y in (self.measured, self.form)
        )
        return float(measured), float(form)

    @property
    def misfit(self) -> float:
        """The largest relative distance of a length from the straight line through all lengths."""
        line = np.polyval(np.polyfit(self.local_tokens, self.measured, 1), self.local_tokens)
        return float(np.abs(line / self.measured - 1).max())


def published_backward(case: AttentionCase) -> dict[str, float]:
    """Return the sizes of the published lists of buffers, in 10^6 bytes, by execution.

    They are for zigzag_llama3 with all heads at once: gathered K and V, dq, dk and dv; then, per chunk, dq
    and slices of dk and dv (``two_kernel``); or repeated K and V, their gradients, and q and dq of both
    chunks again (``fused``). All in bfloat16.
    """

    def megabytes(tokens: int, heads: int) -> float:
        return tokens * heads * case.head_dim * 2 / 1e6

    local = case.tokens // case.ranks
    keys, dq = 2 * megabytes(case.tokens, case.kv_heads), megabytes(local, case.heads)
    repeated = keys * 1.5  # half of the keys for the early chunk, all of them for the late one
    return {
        "two_kernel": keys + dq + keys + megabytes(local // 2, case.heads) + keys,
        "fused": keys + repeated + dq + dq + keys + dq + repeated,
    }


def measure_peaks(way: ContextParallelMethod, case: AttentionCase, rank: int) -> tuple[int, int]:
    """Return peak bytes of (forward, backward) of one rank: fake tensors on CPU, real ones on CUDA."""
    real = case.device_type == "cuda"
    # Packs cache tensors between calls; a tensor without memory must not get into that cache.
    kernel = AtenCudaFlash() if real else AtenCudaFlash(NO_PACKS)
    with one_rank(way, case, rank, kernel, memory=real) as alone:
        return _peak(alone.forward, real), _peak(alone.backward, real)


def closed_form(way: ContextParallelMethod, case: AttentionCase, rank: int) -> tuple[int, int]:
    """Return the closed form of :func:`measure_peaks`."""
    return attention_memory(
        way.schedule(case),
        HeadSplit(case.heads, case.kv_heads, way.ulysses),
        rank,
        batch=case.batch,
        head_dim=case.head_dim,
        itemsize=case.dtype.itemsize,
        accumulate_itemsize=accumulate_dtype(case.dtype).itemsize,
        exchange=way.exchange,
        kv_heads_per_gather=way.kv_heads_per_gather,
        forward_execution=way.forward_execution,
        backward_execution=way.backward_execution,
    )


def peaks_of(
    way: ContextParallelMethod, case: AttentionCase, lengths: Sequence[int]
) -> tuple[Peaks, Peaks]:
    """Return the peaks of (forward, backward) at each length."""
    rows: list[tuple[int, tuple[int, int], tuple[int, int]]] = []
    for tokens in lengths:
        this = replace(case, tokens=tokens)
        measured = _most([measure_peaks(way, this, rank) for rank in range(case.ranks)])
        form = _most([closed_form(way, this, rank) for rank in range(case.ranks)])
        rows.append((way.sequence_layout(this).local_len, measured, form))
    forward, backward = (
        Peaks([row[0] for row in rows], [row[1][at] for row in rows], [row[2][at] for row in rows])
        for at in range(2)
    )
    return forward, backward


def _most(of_ranks: Sequence[tuple[int, int]]) -> tuple[int, int]:
    forward, backward = zip(*of_ranks, strict=True)
    return max(forward), max(backward)


def _peak(run: Callable[[], Any], real: bool) -> int:
    if not real:
        with PeakBytes() as found:
            run()
        return found.peak
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before


def rows_of(
    way: ContextParallelMethod, case: AttentionCase, lengths: Sequence[int]
) -> Iterator[list[str]]:
    """Yield a row for each pass."""
    longest = replace(case, tokens=lengths[-1])
    gathers = way.exchange == "all_gather"
    heads = str(way.kv_heads_per_gather or "all") if gathers else "all"
    listed = published_backward(longest)[way.backward_execution] if gathers else None
    for name, peaks in zip(PASSES, peaks_of(way, case, lengths), strict=True):
        measured, form = peaks.measured[-1], peaks.form[-1]
        yield [
            *(way.name, heads, name, f"{measured / 1e6:.1f}", f"{form / 1e6:.1f}"),
            f"{measured / form:.3f}",
            *(f"{slope:,.0f}" for slope in peaks.slope),
            f"{peaks.misfit:.1%}",
            f"{listed:.0f}" if listed and name == "backward" else "",
        ]


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argument_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=8, help="ranks that share a sequence")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[8192, 16384, 32768, 65536], help="of a sequence"
    )
    parser.add_argument("--heads", type=int, default=32, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=8, help="heads of keys and values")
    parser.add_argument("--head-dim", type=int, default=128, help="features of a head")
    parser.add_argument("--packed", type=int, default=0, help="documents of log-normal lengths")
    parser.add_argument(
        "--device",
        choices=["fake", "cuda"],
        default="fake",
        help="fake: bytes are counted, nothing is computed",
    )
    given = parser.parse_args()
    case = AttentionCase(
        *(max(given.tokens), given.ranks, given.heads, given.kv_heads, given.head_dim),
        dtype=torch.bfloat16,
        device_type="cuda" if given.device == "cuda" else "cpu",
        packed=given.packed,
    )
    print(markdown_head(HEAD))
    for way in context_parallel_methods(given.ranks, KV_HEADS):
        if way.obstacle(case) is None:
            for cells in rows_of(way, case, sorted(given.tokens)):
                print(table.markdown_row(cells), flush=True)


if __name__ == "__main__":
    main()
