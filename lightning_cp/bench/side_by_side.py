"""Every mode beside other implementations: the same kernel, the same processes, one run.

    python -m lightning_cp.bench.side_by_side --tokens 1024 4096 16384 --ranks 2 4
    python -m lightning_cp.bench.side_by_side --tokens 16384 --ranks 4 --packed 16

Attention, forward and backward, float32 on CPU, one thread per rank. All ways of a case run in one set of
processes, in rounds (:mod:`lightning_cp.bench.rounds`). The columns, of all ranks together if not said
otherwise:

* CPU-seconds over those of one process, the least of the repeats, and their spread;
* the slowest rank's CPU-seconds times the ranks, over the same;
* bytes of tensors sent, of the rank that sends most;
* calls of the attention operator, forward and backward;
* tokens of padding;
* the peak of what a step allocates beyond its inputs, results included, of the rank with most;
* the largest error of out, dq, dk and dv against one process, relative to the largest entry of each.

Bytes, calls and memory are counted in passes that are not timed. With ``--device cuda`` tensors are bfloat16,
other packages call the real flash-attn, and both ratios are of the slowest rank's seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch.multiprocessing.spawn import ProcessException

from lightning_cp.bench import table
from lightning_cp.bench.case import Case
from lightning_cp.bench.clock import Figure, Samples, cpu_of_slowest, cpu_together, wall_of_slowest
from lightning_cp.bench.peers import all_peers
from lightning_cp.bench.processes import on_ranks
from lightning_cp.bench.rounds import Found, failed_way, measure_rank
from lightning_cp.bench.ways import Ours, Sharded, our_ways
from lightning_cp.bench.which import check_case
from lightning_cp.command_help import argument_parser
from lightning_cp.errors import ConfigError

HEAD = (
    "tokens",
    "documents",
    "ranks",
    "way",
    "CPU-s / one process",
    "spread",
    "slowest x ranks / one",
    "MB sent by a rank",
    "kernel calls",
    "padding",
    "peak MB",
    "error",
)
WRONG = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Relative errors beyond which a way is wrong."""
NOTHING = Figure(0, 0)


@dataclass(frozen=True)
class Line:
    """One way, over all ranks."""

    case: Case
    way: Sharded
    obstacle: str | None = None
    ratio: Figure = NOTHING
    slowest: float = 0
    sent: int = 0
    control: int = 0
    kernels: int = 0
    padding: int = 0
    peak: int = 0
    error: float = 0

    @property
    def cells(self) -> tuple[object, ...]:
        """As in the table."""
        case = self.case
        head = (case.tokens, len(case.lengths), case.ranks, self.way.name)
        if self.obstacle is not None:
            return (*head, self.obstacle, *[""] * (len(HEAD) - 5))
        wrong = "" if self.error <= WRONG[case.dtype] else " wrong"
        return (
            *head,
            f"{self.ratio.best:.3f}",
            table.percent(self.ratio.spread),
            f"{self.slowest:.3f}",
            f"{self.sent / 1e6:.2f}",
            self.kernels,
            self.padding,
            f"{self.peak / 1e6:.2f}",
            f"{self.error:.0e}{wrong}",
        )


def main() -> None:
    """Measure and print Markdown tables."""
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[1024, 4096, 16384], help="of a sequence"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="ranks that share it")
    parser.add_argument("--packed", type=int, default=0, help="documents, of log-normal lengths")
    parser.add_argument("--kv-heads", type=int, default=8, help="heads of keys and values")
    parser.add_argument("--repeats", type=int, default=3, help="of each way; the fastest counts")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="it runs on")
    parser.add_argument(
        "--only", nargs="*", default=[], help="ways whose names contain one of these"
    )
    options = parser.parse_args()
    try:
        asked = _asked(_cases(options), options.only)
    except ConfigError as error:
        parser.error(str(error))
    print(table.head(HEAD))
    lines: list[Line] = []
    for case, ways in asked.items():
        for line in compare(case, ways, options.repeats):
            lines.append(line)
            print(table.row(line.cells), flush=True)
    print(f"\nRanks agree on a call by {max(line.control for line in lines)} more bytes at most.\n")
    for told in behind(lines):
        print(told)


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    for tokens, ranks in product(options.tokens, options.ranks):
        case = Case(tokens, ranks, kv_heads=options.kv_heads, packed=options.packed)
        check_case(case)
        on_cuda = options.device == "cuda"
        yield replace(case, device_type="cuda", dtype=torch.bfloat16) if on_cuda else case


def _asked(cases: Iterable[Case], parts: Sequence[str]) -> dict[Case, list[Sharded]]:
    """Of each case the ways whose names have one of the parts; cases without are left out."""
    every = {case: every_way(case) for case in cases}
    names = dict.fromkeys(way.name for ways in every.values() for way in ways)
    for part in parts:
        if not any(part in name for name in names):
            there = "; ".join(names)
            raise ConfigError(f"--only {part} is part of no way's name. There are: {there}.")
    chosen = {
        case: [way for way in ways if not parts or any(part in way.name for part in parts)]
        for case, ways in every.items()
    }
    return {case: ways for case, ways in chosen.items() if ways}


def every_way(case: Case) -> list[Sharded]:
    """Ours first; an all-gather of all heads at once is there as a peer has it.

    Packed documents are dealt evenly (``balanced``), and to a ring in zigzag chunks too.
    """
    ours = [*our_ways(case.ranks), Ours(1, case.ranks, "all_gather", kv_heads_per_gather=None)]
    if case.packed:
        dealt = [way.dealt(case) for way in ours]
        ours = [*dealt, Ours(1, case.ranks, layout="zigzag")]
    return [*ours, *all_peers(case)]


def compare(case: Case, ways: Sequence[Sharded], repeats: int) -> Iterator[Line]:
    """A line for each way; a peer that raises has its error in its line, and the others are measured."""
    failures: dict[str, str] = {}
    of_ranks: list[tuple[Samples, list[Found | str]]] | None = None
    while of_ranks is None:
        left = [way for way in ways if way.name not in failures]
        of_ranks = _measured(case, left, repeats, failures)
    of_one = of_ranks[0][0]
    alone = min(of_one.cpu if case.device_type == "cpu" else of_one.wall)
    found = zip(*(of_rank[1] for of_rank in of_ranks), strict=True)
    for way in ways:
        failure = failures.get(way.name)
        yield (
            line_of(case, way, next(found), alone) if failure is None else Line(case, way, failure)
        )


def _measured(
    case: Case, ways: Sequence[Sharded], repeats: int, failures: dict[str, str]
) -> list[tuple[Samples, list[Found | str]]] | None:
    """What each rank found; or ``None``, and one failure more."""
    with TemporaryDirectory() as folder:
        notes = Path(folder)
        arguments = (case, ways, repeats, notes)
        try:
            return on_ranks(case.ranks, measure_rank, *arguments, device_type=case.device_type)
        except ProcessException:
            failed = failed_way(notes)
            if failed is None:
                raise
            name, told = failed
            failures[name] = told
            return None


def line_of(case: Case, way: Sharded, ranks: Sequence[Found | str], alone: float) -> Line:
    """What the ranks found of one way, over the CPU-seconds of one process."""
    found = [rank for rank in ranks if isinstance(rank, Found)]
    if len(found) < len(ranks):
        return Line(case, way, next(rank for rank in ranks if isinstance(rank, str)))
    together, slowest = _seconds(case, [rank.samples for rank in found])
    counts = {name: [rank.counts[name] for rank in found] for name in found[0].counts}
    return Line(
        case,
        way,
        None,
        Figure(together.best / alone, together.spread),
        slowest / alone,
        max(counts["sent"]),
        max(counts["control"]),
        sum(counts["kernels"]),
        sum(counts["padding"]),
        max(counts["peak"]),
        float(np.max([rank.error for rank in found])),  # NaN stays
    )


def _seconds(case: Case, ranks: Sequence[Samples]) -> tuple[Figure, float]:
    """Of all ranks together, and as if all took as long as the slowest; on CUDA only the latter is known."""
    if case.device_type == "cpu":
        return cpu_together(ranks), cpu_of_slowest(ranks).best * case.ranks
    wall = wall_of_slowest(ranks)
    return Figure(wall.best * case.ranks, wall.spread), wall.best * case.ranks


COLUMNS: dict[str, Callable[[Line], float]] = {
    "CPU-seconds": lambda line: line.ratio.best,
    "slowest rank": lambda line: line.slowest,
    "MB sent": lambda line: line.sent / 1e6,
    "kernel calls": lambda line: line.kernels,
    "padding": lambda line: line.padding,
    "peak MB": lambda line: line.peak / 1e6,
}


def behind(lines: Sequence[Line]) -> Iterator[str]:
    """Where the best right peer of a case has less of something than our best mode."""
    for case in dict.fromkeys(line.case for line in lines):
        right = [x for x in lines if x.case == case and x.obstacle is None]
        right = [x for x in right if x.error <= WRONG[case.dtype]]
        ours = [line for line in right if isinstance(line.way, Ours)]
        peers = [line for line in right if not isinstance(line.way, Ours)]
        for name, of in COLUMNS.items() if ours and peers else ():
            own, other = min(ours, key=of), min(peers, key=of)
            if of(other) < of(own):
                yield (
                    f"- {case.tokens} tokens, {len(case.lengths)} documents, {case.ranks} ranks: {name}: "
                    f"{other.way.name} {of(other):.3f}, ours {own.way.name} {of(own):.3f}"
                )


if __name__ == "__main__":
    main()
