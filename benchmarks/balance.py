"""Balance of a layout's work on packed rows, and its cost in hops and bytes.

    python -m benchmarks.balance

Rows are filled with documents of log-normal lengths, causal. Imbalance is the busiest rank's visible pairs
over the mean. Hops count those at which a rank exchanges anything, averaged over ranks; bytes are the keys
that all ranks send, over those of zigzag. Times are milliseconds of one CPU core, the minimum of the repeats:
to assign the chunks, and to make one rank's tiles and ranges, once per batch; both are cached. The last
column is the choice of ``layout="auto"`` for rings across nodes and in one node, with the time of the former.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

from lightning_cp.bench.methods import log_normal
from lightning_cp.layout import CostModel, Documents, Mask, Schedule, SequenceLayout, explain_layout
from lightning_cp.layout.auto import LayoutChoice, layout_name
from lightning_cp.layout.balance import assign_chunks, best_assignment
from lightning_cp.utils.command_help import argument_parser

T = TypeVar("T")
SIZES = ((1 << 16, 4, 60), (1 << 16, 8, 60), (1 << 18, 16, 250), (1 << 20, 64, 1000))
"""Tokens, ring size, documents."""
HEAD = (
    "tokens",
    "cp",
    "documents",
    "layout",
    "chunks a rank",
    "imbalance",
    "active hops",
    "bytes / zigzag's",
    "added tokens",
    "deal, ms",
    "schedule of a rank, ms",
    "auto between nodes / in one",
)
MASK = Mask()


def main() -> None:
    """Print a Markdown table."""
    parser = argument_parser(__doc__)
    parser.add_argument("--sigma", type=float, default=1.5, help="of the logarithm of lengths")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths")
    parser.add_argument("--repeats", type=int, default=5, help="of each timing; the fastest counts")
    options = parser.parse_args()
    print(f"| {' | '.join(HEAD)} |")
    print("|" + "---|" * len(HEAD))
    for tokens, ring, count in SIZES:
        packed = log_normal(tokens, count, options.seed, options.sigma)
        for cells in rows_of(tokens, ring, packed, options.repeats):
            print(f"| {' | '.join(cells)} |", flush=True)


def rows_of(tokens: int, ring: int, packed: Documents, repeats: int) -> Iterator[list[str]]:
    """Yield the cells of zigzag, of balanced by default, and of twice and four times as many chunks."""
    zigzag = SequenceLayout(tokens, ring, 1, "zigzag", packed)
    fewest = SequenceLayout(tokens, ring, 1, "balanced", packed).chunks_per_rank
    dealt = [
        SequenceLayout(tokens, ring, 1, "balanced", packed, MASK, chunks)
        for chunks in sorted({8, fewest, 2 * fewest, 4 * fewest})
    ]
    sent = int(_others(Schedule(zigzag, packed, MASK).keys).sum())
    for layout in (zigzag, *dealt):
        plan = Schedule(layout, packed, MASK)
        others = _others(plan.keys)
        hops = ((others > 0) | (others.T > 0)).sum() / ring
        yield [
            f"{tokens:,}",
            str(ring),
            str(packed.rows[0].shape[0]),
            layout.kind + " (default)" * (layout.chunks == fewest),
            str(layout.chunks_per_rank),
            f"{plan.imbalance:.4f}",
            f"{hops:.1f}",
            f"{others.sum() / max(sent, 1):.2f}",
            str(layout.padded_len - tokens),
            "" if layout.kind == "zigzag" else f"{_deal_ms(layout, packed, fewest, repeats):.2f}",
            f"{_schedule_ms(layout, packed, repeats):.2f}",
            _chosen(tokens, ring, packed, repeats) if layout.kind == "zigzag" else "",
        ]


def _others(
    keys: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Return the keys of other ranks, with a rank's own keys set to 0."""
    return keys * (1 - np.eye(keys.shape[0], dtype=np.int64))


def _deal_ms(layout: SequenceLayout, packed: Documents, fewest: int, repeats: int) -> float:
    sizes = (layout.seq_len, layout.ring_size, layout.ulysses_size, packed, layout.mask)
    chunks = layout.chunks or fewest

    def one() -> object:
        assign_chunks.cache_clear()
        best_assignment.cache_clear()
        return best_assignment(*sizes) if chunks == fewest else assign_chunks(*sizes, chunks)

    return _least_ms(one, repeats)[0]


def _schedule_ms(layout: SequenceLayout, packed: Documents, repeats: int) -> float:
    rank = layout.ring_size // 3
    return _least_ms(lambda: Schedule(layout, packed, MASK).rank(rank), repeats)[0]


def _chosen(tokens: int, ring: int, packed: Documents, repeats: int) -> str:
    def choose(cost: CostModel) -> Callable[[], LayoutChoice]:
        def one() -> LayoutChoice:
            explain_layout.cache_clear()
            assign_chunks.cache_clear()
            best_assignment.cache_clear()
            return explain_layout(tokens, ring, documents=packed, cost=cost)

        return one

    took, between = _least_ms(choose(CostModel()), repeats)
    inside = choose(CostModel.in_node())()
    return f"{_short(between)} / {_short(inside)}, {took:.1f} ms"


def _short(choice: LayoutChoice) -> str:
    return layout_name(choice.layout).replace(" with", "").replace(" chunks a rank", "")


def _least_ms(call: Callable[[], T], repeats: int) -> tuple[float, T]:
    """Return the CPU time of the fastest call, and its result."""
    times: list[float] = []
    result = call()
    for _ in range(repeats):
        start = time.process_time()
        result = call()
        times.append(time.process_time() - start)
    return 1e3 * min(times), result


if __name__ == "__main__":
    main()
