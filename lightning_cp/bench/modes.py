"""Every way to share one attention call among the ranks, taken apart into compute and communication.

What is timed is the call of a plan that the ranks have agreed on, as in a strategy's step. Times are of the
slowest rank of each repeat, the least of the repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from lightning_cp.bench.apart import plan_of, take_apart
from lightning_cp.bench.case import BACKWARD_FLOPS, Case
from lightning_cp.bench.certainty import Runs, apart_figures, beyond
from lightning_cp.bench.clock import Figure, cpu_together, wall_of_slowest
from lightning_cp.bench.kernels import Passes, passes, request_of
from lightning_cp.bench.settings import Settings
from lightning_cp.bench.together import failure_of_any, from_all, obstacle_of_any, together
from lightning_cp.bench.ways import Ours, Step, Way
from lightning_cp.bench.which import chosen_ways
from lightning_cp.kernels.api import Kernel, select_kernel
from lightning_cp.mesh import ContextParallelMesh


@dataclass(frozen=True)
class ModeRow:
    """One way for one sequence, or why there is no figure. Seconds are wall time unless said otherwise."""

    way: str
    ranks: int
    tokens: int
    documents: int
    """Packed ones, as many as there are: empty ones are none. 0 is one document, dense."""
    dtype: str
    head_dim: int
    heads: int
    kv_heads: int
    backward: bool
    """Whether the run is forward and backward, or forward alone."""
    obstacle: str | None = None
    both: float | None = None
    """Seconds of the whole call."""
    compute: float | None = None
    """Without communication. ``None`` for ways of other libraries, as all that follows from it."""
    comm: float | None = None
    """What communication takes without compute."""
    exposed: float | None = None
    """``both - compute``. ``None`` where the repeats of a run differ by more than ``comm``, or by less than
    ``both`` is quicker than ``compute``."""
    overlap: float | None = None
    """``(compute + comm - both) / min(compute, comm)``: 1 is all of it hidden; below 0 they hinder each
    other. ``None`` as ``exposed``, and where repeats differ by more than it divides by."""
    one: float | None = None
    """Of one process with the same kernel and the whole sequence."""
    efficiency: float | None = None
    """``one / (ranks * both)``."""
    tflops: float | None = None
    """10^12 operations a second of each device; visible pairs only."""
    cpu: float | None = None
    """CPU-seconds of the whole call, all ranks together; on CPU only, as the next four."""
    cpu_compute: float | None = None
    cpu_comm: float | None = None
    cpu_one: float | None = None
    cpu_ratio: float | None = None
    """``cpu / cpu_one``."""
    spread: float | None = None
    """Of ``both``: (most - least) / least of the repeats; ``None`` of one."""
    cpu_spread: float | None = None


@dataclass(frozen=True)
class Alone:
    """One process with the whole sequence."""

    wall: float
    cpu: float


def measure_modes(settings: Settings, tell: Callable[[str], None]) -> list[ModeRow]:
    """Every way with every sequence, forward and then with backward; on all ranks, which find the same.

    Args:
        settings: what to measure.
        tell: told what is measured now.
    """
    with Meshes() as meshes:
        return [row for case in _cases(settings) for row in _of_case(case, settings, meshes, tell)]


def _cases(settings: Settings) -> Iterator[Case]:
    for dense in settings.cases(settings.devices):
        yield dense
        if settings.documents:
            yield settings.masked(dense, "packed")


def _of_case(
    case: Case, settings: Settings, meshes: Meshes, tell: Callable[[str], None]
) -> Iterator[ModeRow]:
    what = f"{'packed' if case.packed else 'dense'}, {case.tokens:,} tokens"
    tell(f"one process, {what}")
    one = one_process(select_kernel(settings.kernel, request_of(case)), case, settings)
    for backward in (False, True):
        for way in chosen_ways(settings, case):
            tell(f"{way.name}, {what}, {'forward+backward' if backward else 'forward'}")
            row = replace(row_of(way, case, backward=backward), obstacle=obstacle_of_any(way, case))
            if row.obstacle is None:
                runs = _runs(way, case, backward, settings, meshes)
                if isinstance(runs, str):
                    row = replace(row, obstacle=runs)
                else:
                    row = _with_figures(row, case, runs, one[backward])
            yield row


def one_process(kernel: Kernel, case: Case, settings: Settings) -> list[Alone | None]:
    """The first rank's figures with the whole sequence, forward and then with backward; on all ranks.

    ``None`` where it does not fit into one device.
    """
    steps = _whole(kernel, case) if dist.get_rank() == 0 else None
    if not from_all(steps is not None)[0]:
        return [None, None]
    runs = [together(step, settings)[0] for step in steps or Passes(_nothing, _nothing)]
    forward, backward = (Alone(Figure.of(x.wall).best, Figure.of(x.cpu).best) for x in runs)
    return [forward, Alone(forward.wall + backward.wall, forward.cpu + backward.cpu)]


def _whole(kernel: Kernel, case: Case) -> Passes | None:
    try:
        steps = passes(kernel, case)
        steps.backward()
    except torch.cuda.OutOfMemoryError:
        return None
    return steps


def _nothing() -> None:
    pass


def row_of(way: Way, case: Case, *, backward: bool) -> ModeRow:
    """A row without figures."""
    dtype = str(case.dtype).removeprefix("torch.")
    heads = (case.head_dim, case.heads, case.kv_heads)
    sizes = (case.ranks, case.tokens, len(case.lengths) if case.packed else 0)
    return ModeRow(way.name, *sizes, dtype, *heads, backward)


def _runs(way: Way, case: Case, backward: bool, settings: Settings, meshes: Meshes) -> Runs | str:
    """Samples, or why there are none."""
    if not isinstance(way, Ours):
        return _foreign_runs(way, case, backward, settings)
    layout = way.sequence_layout(case)
    inputs = case.inputs(layout.local_len)
    plan = plan_of(way, case, inputs, meshes.of(way, case.device_type))
    with take_apart(plan, inputs, backward=backward) as apart:
        steps = (apart.both, apart.compute, apart.comm, apart.neither)
        return Runs(*(together(step, settings) for step in steps))


def _foreign_runs(way: Way, case: Case, backward: bool, settings: Settings) -> Runs | str:
    """Of another library's call, or how it fails: that is no reason to measure nothing else."""
    steps: list[Step] = []

    def attempt() -> None:
        steps.append(way.step(case, backward=backward))
        steps[0]()

    return failure_of_any(attempt) or Runs(together(steps[0], settings))


def _with_figures(row: ModeRow, case: Case, runs: Runs, one: Alone | None) -> ModeRow:
    both = wall_of_slowest(runs.both)
    operations = case.flops * (1 + BACKWARD_FLOPS * row.backward) / 1e12
    figures: dict[str, float | None] = {
        "both": both.best,
        "spread": both.spread,
        "tflops": operations / row.ranks / both.best,
    }
    if one is not None:
        figures |= {"one": one.wall, "efficiency": one.wall / (row.ranks * both.best)}
    figures |= apart_figures(both, runs)
    if case.device_type == "cpu":
        figures |= _cpu_figures(runs, one)
    return replace(row, **figures)


def _cpu_figures(runs: Runs, one: Alone | None) -> dict[str, float | None]:
    cpu = cpu_together(runs.both)
    figures: dict[str, float | None] = {"cpu": cpu.best, "cpu_spread": cpu.spread}
    if one is not None:
        figures |= {"cpu_one": one.cpu, "cpu_ratio": cpu.best / one.cpu}
    if runs.compute is not None and runs.comm is not None and runs.neither is not None:
        comm = beyond(cpu_together(runs.comm), cpu_together(runs.neither))
        figures |= {"cpu_compute": cpu_together(runs.compute).best, "cpu_comm": comm}
    return figures


class Meshes:
    """A mesh for each split of the ranks, made when it is first asked for and kept to the end."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], ContextParallelMesh] = {}

    def __enter__(self) -> Meshes:
        return self

    def __exit__(self, *_: object) -> None:
        for mesh in self._made.values():
            mesh.destroy()

    def of(self, way: Ours, device_type: str) -> ContextParallelMesh:
        """The mesh of a way; all ranks ask for the same ones in the same order."""
        sizes = (way.ring, way.ulysses)
        if sizes not in self._made:
            self._made[sizes] = ContextParallelMesh(*sizes, device_type)
        return self._made[sizes]
