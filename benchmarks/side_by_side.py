"""Every mode beside other implementations: the same kernel, the same processes, one run.

    python -m benchmarks.side_by_side --tokens 1024 4096 16384 --ranks 2 4
    python -m benchmarks.side_by_side --tokens 16384 --ranks 4 --packed 16

Attention, forward and backward, float32 on CPU, one thread per rank. All ways of a case run in one set of
processes, and repeats alternate between the ways, so that noise hits all alike; rank 0 computes the case
alone in the same rounds. The columns, summed over ranks unless stated otherwise:

* CPU-seconds over those of one process, the minimum of the repeats, and their spread;
* the slowest rank's CPU-seconds times the ranks, over the same;
* bytes of tensors that the busiest sender sends;
* calls of the attention operator, forward and backward;
* tokens of padding;
* peak bytes that a step allocates beyond its inputs, results included, on the rank with the most;
* the largest error of out, dq, dk and dv against one process, relative to the largest entry of each.

Bytes, calls and memory are counted in passes that are not timed. A peer that raises may leave messages behind
and others waiting for it: its rank records its name and ends, and the ranks start again without that peer.
With ``--device cuda`` tensors are bfloat16, other packages call the real flash-attn, and both ratios are of
the slowest rank's seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException

from benchmarks.markdown import markdown_head
from benchmarks.one_process import OneProcess
from benchmarks.op_counts import Counts
from benchmarks.peers.registry import all_peers
from lightning_cp.bench.methods import (
    AttentionCase,
    ContextParallelMethod,
    ShardedMethod,
    Step,
    context_parallel_methods,
)
from lightning_cp.bench.modes import check_case
from lightning_cp.bench.processes import on_ranks
from lightning_cp.bench.timers import (
    Figure,
    Samples,
    cpu_of_all,
    measure,
    obstacle_of_any,
    wall_of_slowest,
)
from lightning_cp.errors import ConfigError
from lightning_cp.utils import console as table
from lightning_cp.utils.command_help import argument_parser
from lightning_cp.utils.patching import do_nothing

COUNTED = 2
"""Passes that are counted and not timed; they also warm up."""
Results = tuple[torch.Tensor, ...]
"""out, dq, dk and dv [B, L, heads, D]."""


@dataclass(frozen=True)
class WayResult:
    """One rank's measurements of one way."""

    samples: Samples
    counts: dict[str, int]
    """Bytes sent, bytes of agreements, kernel calls, peak bytes, tokens of padding."""
    error: float


def measure_rank(
    case: AttentionCase, ways: Sequence[ShardedMethod], repeats: int, notes: Path
) -> tuple[Samples, list[WayResult | str]]:
    """Measure on this rank: one process's time (rank 0 only), and each way's measurements or obstacle.

    Args:
        case: the attention call.
        ways: the same on every rank.
        repeats: timed rounds.
        notes: an empty folder, where :func:`failed_way` finds the peer that raised.
    """
    whole = [x.detach() for x in case.inputs(case.tokens)]
    whole.append(torch.randn_like(whole[0]))
    alone = OneProcess().step(case)
    wanted = _reference(whole, alone)
    obstacles = [_obstacle(way, case, notes) for way in ways]
    runs = [
        _WayRun(way, case, whole, notes)
        for way, obstacle in zip(ways, obstacles, strict=True)
        if obstacle is None
    ]
    for _ in range(COUNTED):
        for run in runs:
            run.count(wanted)
    del whole, wanted
    steps = [alone if dist.get_rank() == 0 else do_nothing, *(run.step for run in runs)]
    samples = _time(steps, repeats, case.device_type)
    found = iter([run.found(of_run) for run, of_run in zip(runs, samples[1:], strict=True)])
    return samples[0], [next(found) if text is None else text for text in obstacles]


def failed_way(notes: Path) -> tuple[str, str] | None:
    """Return the name of the first peer that raised, and its error; ``None`` if none did."""
    note = notes / _NOTE
    if not note.exists():
        return None
    name, _, told = note.read_text().partition("\n")
    return name, told


_NOTE = "failed"


@contextmanager
def _recording_failure(way: ShardedMethod, notes: Path) -> Iterator[None]:
    """Record that a peer raised, unless another rank did first and caused this. Ours must not raise."""
    try:
        yield
    except Exception as error:
        if not isinstance(way, ContextParallelMethod) and not (notes / _NOTE).exists():
            told = f"rank {dist.get_rank()} fails: {type(error).__name__}: {error}"
            (notes / _NOTE).write_text(f"{way.name}\n{told.splitlines()[0]}")
        raise


def _obstacle(way: ShardedMethod, case: AttentionCase, notes: Path) -> str | None:
    """Return the first rank's obstacle, if any: when one rank cannot compute the case, none may begin."""
    with _recording_failure(way, notes):
        return obstacle_of_any(way, case)


def _time(steps: Sequence[Step], repeats: int, device_type: str) -> list[Samples]:
    """Time the repeats of each step; each round runs all steps once."""
    samples = [Samples([], []) for _ in steps]
    for _ in range(repeats):
        for step, of_step in zip(steps, samples, strict=True):
            once = measure(step, repeats=1, warm_up=0, device_type=device_type)
            of_step.cpu.extend(once.cpu)
            of_step.wall.extend(once.wall)
    return samples


class _WayRun:
    """One way on this rank, with its shards of the whole inputs."""

    def __init__(
        self, way: ShardedMethod, case: AttentionCase, whole: Sequence[torch.Tensor], notes: Path
    ) -> None:
        self._way, self._notes = way, notes
        with _recording_failure(way, notes):
            self._attend = way.attention(case)
            positions = way.positions(case, dist.get_rank())
        tokens = whole[0].shape[1]
        *self._inputs, self._dout = (_shard(x, positions) for x in whole)
        for x in self._inputs:
            x.requires_grad_()
        self._real = (positions < tokens).to(whole[0].device)
        self._positions = positions.to(whole[0].device)[self._real]
        self._passes: list[Counts] = []
        self._error = 0.0

    def step(self) -> Results:
        """Run forward and backward."""
        with _recording_failure(self._way, self._notes):
            out = self._attend(*self._inputs)
            return (out, *torch.autograd.grad(out, self._inputs, self._dout))

    def count(self, wanted: Results) -> None:
        """Count a step's operations, and compare its results with one process."""
        with Counts() as counts:
            results = tuple(x.detach() for x in self.step())
        self._passes.append(counts)
        for got, want in zip(results, wanted, strict=True):
            distance = (got[:, self._real] - want[:, self._positions]).abs().max()
            self._error = float(np.maximum(self._error, float(distance / want.abs().max())))

    def found(self, samples: Samples) -> WayResult:
        """Combine the counted passes and the timed ones."""
        last = self._passes[-1]
        numbers = {
            "sent": last.data,
            "control": last.control,
            "kernels": last.kernels,
            # A transfer may hold its buffer a moment longer than necessary in one of the passes.
            "peak": min(counts.peak for counts in self._passes),
            "padding": int((~self._real).sum()),
        }
        return WayResult(samples, numbers, self._error)


def _shard(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the local tokens; padding is 0, and so is the gradient of its output."""
    tokens = x.shape[1]
    local = x[:, positions.clamp(max=tokens - 1).to(x.device)]
    local[:, (positions >= tokens).to(x.device)] = 0
    return local


def _reference(whole: Sequence[torch.Tensor], alone: Callable[[], list[torch.Tensor]]) -> Results:
    """Return out, dq, dk and dv of the whole sequence, computed by rank 0."""
    results = tuple(torch.empty_like(x) for x in (whole[0], *whole[:3]))
    if dist.get_rank() == 0:
        found = [x.detach() for x in alone()]
        documents = len(found) // len(results)
        parts = [found[:documents], *(found[documents + at :: 3] for at in range(3))]
        for result, pieces in zip(results, parts, strict=True):
            torch.cat(pieces, dim=1, out=result)
    for result in results:
        dist.broadcast(result, 0)
    return results


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
"""Relative errors above which a way is wrong."""
NOTHING = Figure(0, 0)


@dataclass(frozen=True)
class Line:
    """One way, over all ranks."""

    case: AttentionCase
    way: ShardedMethod
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
        """The cells of the table."""
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
        asked = _select_ways(_cases(options), options.only)
    except ConfigError as error:
        parser.error(str(error))
    print(markdown_head(HEAD))
    lines: list[Line] = []
    for case, ways in asked.items():
        for line in compare(case, ways, options.repeats):
            lines.append(line)
            print(table.markdown_row(line.cells), flush=True)
    print(f"\nRanks agree on a call by {max(line.control for line in lines)} more bytes at most.\n")
    for told in peer_advantages(lines):
        print(told)


def _cases(options: argparse.Namespace) -> Iterator[AttentionCase]:
    for tokens, ranks in product(options.tokens, options.ranks):
        case = AttentionCase(tokens, ranks, kv_heads=options.kv_heads, packed=options.packed)
        check_case(case)
        on_cuda = options.device == "cuda"
        yield replace(case, device_type="cuda", dtype=torch.bfloat16) if on_cuda else case


def _select_ways(
    cases: Iterable[AttentionCase], parts: Sequence[str]
) -> dict[AttentionCase, list[ShardedMethod]]:
    """Return each case's ways whose names contain one of the parts; cases without any are left out."""
    every = {case: all_ways(case) for case in cases}
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


def all_ways(case: AttentionCase) -> list[ShardedMethod]:
    """Return all ways, ours first, with an all-gather of all heads at once because a peer has it.

    Packed documents use the ``balanced`` layout, and a ring also the zigzag layout.
    """
    ours = [
        *context_parallel_methods(case.ranks),
        ContextParallelMethod(1, case.ranks, "all_gather", kv_heads_per_gather=None),
    ]
    if case.packed:
        dealt = [way.with_layout_of(case) for way in ours]
        ours = [*dealt, ContextParallelMethod(1, case.ranks, layout="zigzag")]
    return [*ours, *all_peers(case)]


def compare(case: AttentionCase, ways: Sequence[ShardedMethod], repeats: int) -> Iterator[Line]:
    """Yield a line for each way; a peer that raises has its error in its line, the others are measured."""
    failures: dict[str, str] = {}
    of_ranks: list[tuple[Samples, list[WayResult | str]]] | None = None
    while of_ranks is None:
        left = [way for way in ways if way.name not in failures]
        of_ranks = _measured(case, left, repeats, failures)
    of_one = of_ranks[0][0]
    alone = min(of_one.cpu if case.device_type == "cpu" else of_one.wall)
    found = zip(*(of_rank[1] for of_rank in of_ranks), strict=True)
    for way in ways:
        failure = failures.get(way.name)
        yield (
            merge_ranks(case, way, next(found), alone)
            if failure is None
            else Line(case, way, failure)
        )


def _measured(
    case: AttentionCase, ways: Sequence[ShardedMethod], repeats: int, failures: dict[str, str]
) -> list[tuple[Samples, list[WayResult | str]]] | None:
    """Return each rank's measurements; ``None`` after adding a peer to ``failures``."""
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


def merge_ranks(
    case: AttentionCase, way: ShardedMethod, ranks: Sequence[WayResult | str], alone: float
) -> Line:
    """Combine the ranks' measurements of one way, relative to the CPU-seconds of one process."""
    found = [rank for rank in ranks if isinstance(rank, WayResult)]
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


def _seconds(case: AttentionCase, ranks: Sequence[Samples]) -> tuple[Figure, float]:
    """Return seconds summed over ranks, and the slowest rank's times the ranks; CUDA has only the latter."""
    if case.device_type == "cpu":
        return cpu_of_all(ranks), cpu_of_slowest(ranks).best * case.ranks
    wall = wall_of_slowest(ranks)
    return Figure(wall.best * case.ranks, wall.spread), wall.best * case.ranks


def cpu_of_slowest(ranks: Sequence[Samples]) -> Figure:
    """Return the CPU-seconds of the rank that needs most."""
    return Figure.of([max(repeat) for repeat in zip(*(rank.cpu for rank in ranks), strict=True)])


COLUMNS: dict[str, Callable[[Line], float]] = {
    "CPU-seconds": lambda line: line.ratio.best,
    "slowest rank": lambda line: line.slowest,
    "MB sent": lambda line: line.sent / 1e6,
    "kernel calls": lambda line: line.kernels,
    "padding": lambda line: line.padding,
    "peak MB": lambda line: line.peak / 1e6,
}


def peer_advantages(lines: Sequence[Line]) -> Iterator[str]:
    """Yield a line for each quantity where the best correct peer of a case is below our best mode."""
    for case in dict.fromkeys(line.case for line in lines):
        right = [x for x in lines if x.case == case and x.obstacle is None]
        right = [x for x in right if x.error <= WRONG[case.dtype]]
        ours = [line for line in right if isinstance(line.way, ContextParallelMethod)]
        peers = [line for line in right if not isinstance(line.way, ContextParallelMethod)]
        for name, of in COLUMNS.items() if ours and peers else ():
            own, other = min(ours, key=of), min(peers, key=of)
            if of(other) < of(own):
                yield (
                    f"- {case.tokens} tokens, {len(case.lengths)} documents, {case.ranks} ranks: {name}: "
                    f"{other.way.name} {of(other):.3f}, ours {own.way.name} {of(own):.3f}"
                )


if __name__ == "__main__":
    main()
