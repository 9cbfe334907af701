"""Attention FLOPs of each rank's forward, from the schedule's tiles, in both conventions of the field.

    python -m benchmarks.rank_flops

*Exact* counts visible pairs of tokens; *whole* counts a chunk on the diagonal (of 2 x ranks chunks) as if
all its pairs were visible. A pair costs 4 x head dim x heads: two products of a multiplication and an
addition.
"""

from __future__ import annotations

from functools import partial

from lightning_cp.layout import Documents, Mask, RankSchedule, SequenceLayout, Tile, schedule
from lightning_cp.utils.command_help import argument_parser


def main() -> None:
    """Print a Markdown table."""
    parser = argument_parser(__doc__)
    add = partial(parser.add_argument, type=int)
    add("--ranks", default=8, help="ranks that share a sequence")
    add("--tokens", default=65536, help="of a sequence")
    add("--heads", default=32, help="query heads")
    add("--head-dim", default=128, help="features of a head")
    given = parser.parse_args()
    chunk = given.tokens // (2 * given.ranks)
    gflop = 4 * given.head_dim * given.heads / 1e9
    columns: dict[str, list[float]] = {}
    for kind in ("contiguous", "zigzag"):
        layout = SequenceLayout(given.tokens, given.ranks, kind=kind)
        plan = schedule(layout, Documents.single(given.tokens), Mask())
        ranks = [plan.rank(rank) for rank in range(given.ranks)]
        columns[f"{kind}, whole"] = [_whole(rank, chunk) * gflop for rank in ranks]
        columns[f"{kind}, exact"] = [work * gflop for work in plan.work]
    print(f"| rank | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for rank in range(given.ranks):
        print(f"| {rank} | {' | '.join(f'{column[rank]:,.1f}' for column in columns.values())} |")
    spread = (max(column) / min(column) for column in columns.values())
    print(f"| most / least | {' | '.join(f'{ratio:.2f}x' for ratio in spread)} |")


def _whole(rank: RankSchedule, chunk: int) -> int:
    return sum(_pairs(tile, chunk) for hop in rank.hops for tile in hop.tiles)


def _pairs(tile: Tile, chunk: int) -> int:
    if tile.mask == "full":
        return tile.q_len * tile.k_len
    chunks = tile.q_len // chunk  # a causal tile is square
    return chunks * (chunks + 1) // 2 * chunk**2


if __name__ == "__main__":
    main()
