"""CPU-seconds of context-parallel attention, summed over ranks, over those of one process.

    python -m lightning_cp.bench.cpu_ratio --tokens 1024 4096 16384 --ranks 2 4

Causal attention, forward and backward, float32, one thread per rank, PyTorch's CPU flash operator on
both sides; the one process calls ``scaled_dot_product_attention``. It runs first and alone, not in turn with
the ranks: its repeats' spread is shown beside theirs, and a ratio is no surer than both. What is counted: see
:mod:`lightning_cp.bench.clock`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from lightning_cp.bench import table
from lightning_cp.bench.case import Case
from lightning_cp.bench.clock import Figure, Samples, cpu_together, measure
from lightning_cp.bench.processes import on_ranks
from lightning_cp.bench.ways import OneProcess, Way, our_ways
from lightning_cp.bench.which import check_case
from lightning_cp.command_help import argument_parser
from lightning_cp.errors import ConfigError

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
        tokens: [Case(tokens, ranks, kv_heads=options.kv_heads) for ranks in options.ranks]
        for tokens in options.tokens
    }
    try:
        for case in chain(*every.values()):
            check_case(case)
    except ConfigError as error:
        parser.error(str(error))
    print(table.head(HEAD))
    for tokens, cases in every.items():
        whole = Case(tokens, 1, kv_heads=options.kv_heads)
        alone = cpu_seconds(whole, [OneProcess()], options.repeats)[0]
        for case in cases:
            for line in lines(case, alone, options.repeats):
                print(table.row(line), flush=True)


def lines(case: Case, alone: Figure, repeats: int) -> Iterator[tuple[object, ...]]:
    """The cells of each way; of one that cannot share the case, why not."""
    ways = our_ways(case.ranks)
    found = iter(cpu_seconds(case, [way for way in ways if not way.obstacle(case)], repeats))
    for way in ways:
        why = way.obstacle(case)
        shown = [why, *[""] * (len(HEAD) - 4)] if why else cells(alone, next(found))
        yield (case.tokens, case.ranks, way.name, *shown)


def cells(alone: Figure, together: Figure) -> list[str]:
    """Seconds and spread of the one process and of the ranks together, and the ratio of the least ones."""
    both = [(f"{figure.best:.3f}", table.percent(figure.spread)) for figure in (alone, together)]
    return [*both[0], *both[1], f"{together.best / alone.best:.3f}"]


def cpu_seconds(case: Case, ways: Sequence[Way], repeats: int) -> list[Figure]:
    """CPU-seconds over all ranks, of each way."""
    of_ranks = on_ranks(case.ranks, _samples, case, ways, repeats)
    return [cpu_together(samples) for samples in zip(*of_ranks, strict=True)]


def _samples(case: Case, ways: Sequence[Way], repeats: int) -> list[Samples]:
    return [measure(way.step(case), repeats=repeats) for way in ways]


if __name__ == "__main__":
    main()
