"""CPU-seconds of context-parallel attention, summed over ranks, over those of one process.

    python -m benchmarks.cpu_ratio --tokens 1024 4096 16384 --ranks 2 4

Causal attention, forward and backward, float32, one thread per rank, PyTorch's CPU flash operator on
both sides; the one process calls ``scaled_dot_product_attention``. It runs first and alone, not alternating
with the ranks: the spread of its repeats is shown beside theirs, and a ratio is not more certain than both.
:mod:`lightning_cp.bench.timers` defines the times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from benchmarks.markdown import markdown_head
from benchmarks.one_process import OneProcess
from lightning_cp.bench.methods import AttentionCase, AttentionMethod, context_parallel_methods
from lightning_cp.bench.modes import check_case
from lightning_cp.bench.processes import on_ranks
from lightning_cp.bench.timers import Figure, Samples, cpu_of_all, measure
from lightning_cp.errors import ConfigError
from lightning_cp.utils import console as table
from lightning_cp.utils.command_help import argument_parser

HEAD = (
    *("tokens", "ranks", "mode", "one process, s", "its spread", "ranks together, s", "spread"),
    "ratio",
)


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[1024, 4096, 16384], help="of a sequence"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="ranks that share it")
    parser.add_argument("--repeats", type=int, default=3, help="of each; the fastest counts")
    parser.add_argument("--kv-heads", type=int, default=8, help="heads of keys and values")
    options = parser.parse_args()
    every = {
        tokens: [AttentionCase(tokens, ranks, kv_heads=options.kv_heads) for ranks in options.ranks]
        for tokens in options.tokens
    }
    try:
        for case in chain(*every.values()):
            check_case(case)
    except ConfigError as error:
        parser.error(str(error))
    print(markdown_head(HEAD))
    for tokens, cases in every.items():
        whole = AttentionCase(tokens, 1, kv_heads=options.kv_heads)
        alone = cpu_seconds(whole, [OneProcess()], options.repeats)[0]
        for case in cases:
            for line in lines(case, alone, options.repeats):
                print(table.markdown_row(line), flush=True)


def lines(case: AttentionCase, alone: Figure, repeats: int) -> Iterator[tuple[object, ...]]:
    """Yield the cells of each way, or its obstacle."""
    ways = context_parallel_methods(case.ranks)
    found = iter(cpu_seconds(case, [way for way in ways if not way.obstacle(case)], repeats))
    for way in ways:
        why = way.obstacle(case)
        shown = [why, *[""] * (len(HEAD) - 4)] if why else cells(alone, next(found))
        yield (case.tokens, case.ranks, way.name, *shown)


def cells(alone: Figure, together: Figure) -> list[str]:
    """Return seconds and spread of the one process and of all ranks, and the ratio of the minima."""
    both = [(f"{figure.best:.3f}", table.percent(figure.spread)) for figure in (alone, together)]
    return [*both[0], *both[1], f"{together.best / alone.best:.3f}"]


def cpu_seconds(case: AttentionCase, ways: Sequence[AttentionMethod], repeats: int) -> list[Figure]:
    """Return each way's CPU-seconds, summed over ranks."""
    of_ranks = on_ranks(case.ranks, _samples, case, ways, repeats)
    return [cpu_of_all(samples) for samples in zip(*of_ranks, strict=True)]


def _samples(case: AttentionCase, ways: Sequence[AttentionMethod], repeats: int) -> list[Samples]:
    return [measure(way.step(case), repeats=repeats) for way in ways]


if __name__ == "__main__":
    main()
