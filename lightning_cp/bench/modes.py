"""Every selected way to share one attention call, with compute and communication timed separately.

The call of a plan that the ranks agreed on is timed, as in a strategy's step. Times are of the slowest rank
of each repeat, the minimum of the repeats.

A call has four runs of the same plan and code: both, compute alone, communication alone, and neither. Without
compute the kernel returns at once, so every message is posted and waited for as in the real call. Without
communication the groups of the ring and Ulysses axes are PyTorch's ``fake`` ones, which complete at once and
move nothing: the kernel gets tensors of the same shapes whose content was not received (an all-gather copies
this rank's part). They report the backend name of the groups they replace, so everything but the collectives
stays the same, operation by operation. The rest (tensors made and copied, Python's time) is in all four runs
and subtracted once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec

import torch
import torch.distributed as dist

from lightning_cp.attention.function import attend
from lightning_cp.attention.plan import AttentionPlan, make_plan
from lightning_cp.bench.kernels import KernelPasses, check_heads, kernel_passes, request_of
from lightning_cp.bench.methods import (
    BACKWARD_FLOPS,
    AttentionCase,
    AttentionMethod,
    ContextParallelMethod,
    Step,
    context_parallel_methods,
)
from lightning_cp.bench.settings import BenchSettings
from lightning_cp.bench.timers import (
    Figure,
    RunSamples,
    cpu_of_all,
    excess,
    failure_of_any,
    measure_on_ranks,
    obstacle_of_any,
    overlap_figures,
    wall_of_slowest,
)
from lightning_cp.comm.consensus import World
from lightning_cp.errors import ConfigError
from lightning_cp.kernels.auto import tiles_of
from lightning_cp.kernels.merge import Accumulator, GradientSums
from lightning_cp.kernels.protocol import QKV, Capabilities, Kernel, Output, Scores
from lightning_cp.kernels.select import select_kernel
from lightning_cp.layout import SequenceLayout, Tile
from lightning_cp.layout.axes import Axis, Flat
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.utils.patching import do_nothing


def check_devices(settings: BenchSettings) -> None:
    """Check that there is more than one device.

    Raises:
        ConfigError: there is one.
    """
    if settings.devices == 1:
        raise ConfigError(
            "links and modes are about devices that work together, and there is one. Take "
            "suites=[kernels,compute,overheads], or more devices."
        )


def check(settings: BenchSettings) -> None:
    """Check that a selected way can share each case, before any process starts.

    Raises:
        ConfigError: lengths that do not divide, unknown names, or no way that can share a case.
    """
    cases = settings.cases(settings.devices)
    for case in cases:
        check_case(case)
    case, *_ = cases
    obstacles = {way.name: way.obstacle(case) for way in chosen_methods(settings, case)}
    if all(obstacles.values()):
        told = "; ".join(f"{name}: {why}" for name, why in obstacles.items())
        raise ConfigError(f"none of the modes can share the sequence. {told}.")


def check_case(case: AttentionCase) -> None:
    """Check that a case can be shared evenly, whatever the way.

    Raises:
        ConfigError: heads that do not fit, or a length that does not divide; the message says what works.
    """
    check_heads(case.heads, case.kv_heads)
    chunks = 2 * case.ranks
    below = case.tokens // chunks * chunks
    if below < case.tokens:
        near = f"{below} or {below + chunks}" if below else str(chunks)
        raise ConfigError(
            f"tokens={case.tokens} does not divide into 2 chunks for each of {case.ranks} ranks, and padding "
            f"would be measured along. {near} works."
        )


def chosen_methods(settings: BenchSettings, case: AttentionCase) -> list[AttentionMethod]:
    """Return the ways that ``settings.modes`` names; by default ours and those of installed packages.

    Ours have the layout of the case, and include it in their names for packed documents.

    Raises:
        ConfigError: an unknown name.
    """
    ours = [
        replace(way, kernel=settings.kernel) for way in context_parallel_methods(settings.devices)
    ]
    every: list[AttentionMethod] = [*ours, *_peers(case)]
    for name in settings.modes:
        if not any(name in _names_of(way) for way in every):
            raise ConfigError(_unknown(name, settings.devices, every))
    chosen = [way for way in every if not settings.modes or _names_of(way) & set(settings.modes)]
    return [
        way.with_layout_of(case) if isinstance(way, ContextParallelMethod) else way
        for way in chosen
    ]


def _peers(case: AttentionCase) -> list[AttentionMethod]:
    """Return the installed other implementations; only a checkout can measure them, not the wheel."""
    if not _has_peers():
        return []
    return import_module("benchmarks.peers.registry").peer_ways(case)


def _has_peers() -> bool:
    return find_spec("benchmarks") is not None and find_spec("benchmarks.peers") is not None


_ELSEWHERE = " Other implementations are measured in a checkout of this project."


def _unknown(name: str, ranks: int, every: Sequence[AttentionMethod]) -> str:
    families = ", ".join(sorted({"ours", *map(_family, every)}))
    whole = "; ".join(way.name for way in every)
    more = " hybrid needs 4 devices." if name == "hybrid" and ranks < 4 else ""
    return (
        f"modes names {name}, but on {ranks} ranks there are {families}, or by their whole names {whole}."
        f"{more}{'' if _has_peers() else _ELSEWHERE}"
    )


def _family(way: AttentionMethod) -> str:
    words = way.name.split()
    return words[-1] if isinstance(way, ContextParallelMethod) and words[-1] == "ring" else words[0]


def _names_of(way: AttentionMethod) -> set[str]:
    """Return the names that select a way: its full name; for ours each word of it, for others the package."""
    words = way.name.split()
    if not isinstance(way, ContextParallelMethod):
        return {way.name, *words[:1]}
    return {way.name, replace(way, layout="balanced").name, "ours", *words}


@dataclass(frozen=True)
class CallRuns:
    """The four runs of one rank."""

    both: Step
    compute: Step
    comm: Step
    neither: Step


def plan_of(
    way: ContextParallelMethod,
    case: AttentionCase,
    inputs: Sequence[torch.Tensor],
    mesh: ContextParallelMesh,
) -> AttentionPlan:
    """Return this rank's plan of a way for its q, k and v, already agreed on by the ranks."""
    q, k, v = inputs
    layout = way.sequence_layout(case)
    return make_plan(q, k, v, mesh, layout, case.spec, way.kernel, exchange=way.exchange_options)


@contextmanager
def separate_runs(
    plan: AttentionPlan, inputs: Sequence[torch.Tensor], *, backward: bool
) -> Iterator[CallRuns]:
    """Return the four runs of a plan that the ranks agree on; the fake groups end with the block.

    Args:
        plan: this rank's plan.
        inputs: q, k and v, which require gradients.
        backward: a run is forward and backward; else forward alone.
    """
    silent = replace(plan, kernel=SilentKernel(plan.kernel))
    with silent_mesh(plan.mesh) as still:
        yield CallRuns(
            both=_step(plan, inputs, backward),
            compute=_harmless(_step(replace(plan, mesh=still), inputs, backward)),
            comm=_step(silent, inputs, backward),
            neither=_harmless(_step(replace(silent, mesh=still), inputs, backward)),
        )


def _step(plan: AttentionPlan, inputs: Sequence[torch.Tensor], backward: bool) -> Step:
    q, k, v = inputs
    gradient = torch.randn_like(q)

    def step() -> object:
        out = attend(q, k, v, plan)
        assert isinstance(out, torch.Tensor)
        return torch.autograd.grad(out, [q, k, v], gradient) if backward else out

    return step


def _harmless(step: Step) -> Step:
    """Return the step with denormals flushed: unfilled memory may hold them, and they slow a CPU down."""

    def harmless() -> object:
        torch.set_flush_denormal(True)
        try:
            return step()
        finally:
            torch.set_flush_denormal(False)

    return harmless


@dataclass(frozen=True)
class SilentKernel:
    """A kernel that computes nothing, in place of another."""

    instead_of: Kernel

    @property
    def name(self) -> str:
        """The replaced kernel's."""
        return self.instead_of.name

    @property
    def capabilities(self) -> Capabilities:
        """The replaced kernel's."""
        return self.instead_of.capabilities

    def forward(
        self, inputs: QKV, tiles: Sequence[Tile], scores: Scores, state: Accumulator
    ) -> None:
        """Do nothing."""

    def backward(
        self,
        merged: Output,
        inputs: QKV,
        tiles: Sequence[Tile],
        scores: Scores,
        gradients: GradientSums,
    ) -> None:
        """Do nothing."""


class _SilentMesh(ContextParallelMesh):
    """A mesh whose ring and Ulysses groups move nothing; all else is another mesh's."""

    def __init__(self, mesh: ContextParallelMesh) -> None:
        self.__dict__.update(mesh.__dict__)
        self.still = {axis: _fake_twin(mesh.group(axis)) for axis in (Axis.RING, Axis.ULYSSES)}

    def group(self, axis: Axis | Flat | str) -> dist.ProcessGroup:
        """Return the group that moves nothing."""
        return self.still[Axis(axis)]


@contextmanager
def silent_mesh(mesh: ContextParallelMesh) -> Iterator[ContextParallelMesh]:
    """Return the same ranks in groups that move nothing; all ranks of the mesh must call this together."""
    made = _SilentMesh(mesh)
    try:
        yield made
    finally:
        for group in made.still.values():
            dist.destroy_process_group(group)


def _fake_twin(group: dist.ProcessGroup) -> dist.ProcessGroup:
    # The import registers the backend in versions of PyTorch that do not register it.
    from torch.testing._internal.distributed import fake_pg  # noqa: F401

    ranks = dist.get_process_group_ranks(group)
    twin = dist.new_group(ranks, backend="fake", use_local_synchronization=True)
    assert isinstance(twin, dist.ProcessGroup)
    # Code that asks for the backend takes the path of the replaced group: its copies are compute.
    known = dist.distributed_c10d._world.pg_map
    known[twin] = (known[group][0], known[twin][1])
    return twin


@dataclass(frozen=True)
class ModeRow:
    """One way for one sequence, or the obstacle. Seconds are wall time unless stated otherwise."""

    way: str
    ranks: int
    tokens: int
    documents: int
    """Packed documents that are not empty; 0 is one dense document."""
    dtype: str
    head_dim: int
    heads: int
    kv_heads: int
    backward: bool
    """True: forward and backward; False: forward alone."""
    obstacle: str | None = None
    both: float | None = None
    """Seconds of the whole call."""
    compute: float | None = None
    """Seconds without communication. ``None`` for ways of other libraries, like all that follows from it."""
    comm: float | None = None
    """Seconds of communication without compute."""
    exposed: float | None = None
    """``both - compute``. ``None`` where the repeats of a run differ by more than ``comm``, or where ``both``
    is faster than ``compute`` by more than the repeats differ."""
    overlap: float | None = None
    """``(compute + comm - both) / min(compute, comm)``: 1 is fully hidden; below 0 they slow each other down.
    ``None`` as ``exposed``, and where repeats differ by more than the divisor."""
    one: float | None = None
    """Seconds of one process with the same kernel and the whole sequence."""
    efficiency: float | None = None
    """``one / (ranks * both)``."""
    tflops: float | None = None
    """10^12 operations per second of each device; visible pairs only."""
    cpu: float | None = None
    """CPU-seconds of the whole call, summed over ranks; on CPU only, like the next four."""
    cpu_compute: float | None = None
    cpu_comm: float | None = None
    cpu_one: float | None = None
    cpu_ratio: float | None = None
    """``cpu / cpu_one``."""
    spread: float | None = None
    """(maximum - minimum) / minimum of the repeats of ``both``; ``None`` for one repeat."""
    cpu_spread: float | None = None


@dataclass(frozen=True)
class OneProcessTimes:
    """Seconds of one process with the whole sequence."""

    wall: float
    cpu: float


def measure_modes(settings: BenchSettings, tell: Callable[[str], None]) -> list[ModeRow]:
    """Measure every way with every sequence, forward and then with backward; all ranks return the same rows.

    Args:
        settings: the measurements asked for.
        tell: shows progress.
    """
    with Meshes() as meshes:
        return [row for case in _cases(settings) for row in _of_case(case, settings, meshes, tell)]


def _cases(settings: BenchSettings) -> Iterator[AttentionCase]:
    for dense in settings.cases(settings.devices):
        yield dense
        if settings.documents:
            yield settings.masked(dense, "packed")


def _of_case(
    case: AttentionCase, settings: BenchSettings, meshes: Meshes, tell: Callable[[str], None]
) -> Iterator[ModeRow]:
    what = f"{'packed' if case.packed else 'dense'}, {case.tokens:,} tokens"
    tell(f"one process, {what}")
    tiles = tiles_of(SequenceLayout(case.tokens, documents=case.documents))
    kernel = select_kernel(settings.kernel, request_of(case), tiles)
    one = one_process(kernel, case, settings)
    for backward in (False, True):
        for way in chosen_methods(settings, case):
            tell(f"{way.name}, {what}, {'forward+backward' if backward else 'forward'}")
            row = replace(row_of(way, case, backward=backward), obstacle=obstacle_of_any(way, case))
            if row.obstacle is None:
                runs = _runs(way, case, backward, settings, meshes)
                if isinstance(runs, str):
                    row = replace(row, obstacle=runs)
                else:
                    row = _with_figures(row, case, runs, one[backward])
            yield row


def one_process(
    kernel: Kernel, case: AttentionCase, settings: BenchSettings
) -> list[OneProcessTimes | None]:
    """Return the first rank's times with the whole sequence, forward and then with backward, on all ranks.

    ``None`` where the sequence does not fit into one device.
    """
    steps = _one_process_passes(kernel, case) if dist.get_rank() == 0 else None
    if not World().gather(steps is not None)[0]:
        return [None, None]
    runs = [
        measure_on_ranks(step, settings)[0]
        for step in steps or KernelPasses(do_nothing, do_nothing)
    ]
    forward, backward = (
        OneProcessTimes(Figure.of(x.wall).best, Figure.of(x.cpu).best) for x in runs
    )
    return [forward, OneProcessTimes(forward.wall + backward.wall, forward.cpu + backward.cpu)]


def _one_process_passes(kernel: Kernel, case: AttentionCase) -> KernelPasses | None:
    try:
        steps = kernel_passes(kernel, case)
        steps.backward()
    except torch.cuda.OutOfMemoryError:
        return None
    return steps


def row_of(way: AttentionMethod, case: AttentionCase, *, backward: bool) -> ModeRow:
    """Return a row without figures."""
    dtype = str(case.dtype).removeprefix("torch.")
    heads = (case.head_dim, case.heads, case.kv_heads)
    sizes = (case.ranks, case.tokens, len(case.lengths) if case.packed else 0)
    return ModeRow(way.name, *sizes, dtype, *heads, backward)


def _runs(
    way: AttentionMethod,
    case: AttentionCase,
    backward: bool,
    settings: BenchSettings,
    meshes: Meshes,
) -> RunSamples | str:
    """Return the samples, or the failure in words."""
    if not isinstance(way, ContextParallelMethod):
        return _foreign_runs(way, case, backward, settings)
    layout = way.sequence_layout(case)
    inputs = case.inputs(layout.local_len)
    plan = plan_of(way, case, inputs, meshes.of(way, case.device_type))
    with separate_runs(plan, inputs, backward=backward) as apart:
        steps = (apart.both, apart.compute, apart.comm, apart.neither)
        return RunSamples(*(measure_on_ranks(step, settings) for step in steps))


def _foreign_runs(
    way: AttentionMethod, case: AttentionCase, backward: bool, settings: BenchSettings
) -> RunSamples | str:
    """Return samples of another library's call, or its failure in words; other ways are still measured."""
    steps: list[Step] = []

    def attempt() -> None:
        steps.append(way.step(case, backward=backward))
        steps[0]()

    return failure_of_any(attempt) or RunSamples(measure_on_ranks(steps[0], settings))


def _with_figures(
    row: ModeRow, case: AttentionCase, runs: RunSamples, one: OneProcessTimes | None
) -> ModeRow:
    both = wall_of_slowest(runs.both)
    operations = case.flops * (1 + BACKWARD_FLOPS * row.backward) / 1e12
    figures: dict[str, float | None] = {
        "both": both.best,
        "spread": both.spread,
        "tflops": operations / row.ranks / both.best,
    }
    if one is not None:
        figures |= {"one": one.wall, "efficiency": one.wall / (row.ranks * both.best)}
    figures |= overlap_figures(both, runs)
    if case.device_type == "cpu":
        figures |= _cpu_figures(runs, one)
    return replace(row, **figures)


def _cpu_figures(runs: RunSamples, one: OneProcessTimes | None) -> dict[str, float | None]:
    cpu = cpu_of_all(runs.both)
    figures: dict[str, float | None] = {"cpu": cpu.best, "cpu_spread": cpu.spread}
    if one is not None:
        figures |= {"cpu_one": one.cpu, "cpu_ratio": cpu.best / one.cpu}
    if runs.compute is not None and runs.comm is not None and runs.neither is not None:
        comm = excess(cpu_of_all(runs.comm), cpu_of_all(runs.neither))
        figures |= {"cpu_compute": cpu_of_all(runs.compute).best, "cpu_comm": comm}
    return figures


class Meshes:
    """A cache of one mesh for each split of the ranks; the meshes are destroyed at the end of the block."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], ContextParallelMesh] = {}

    def __enter__(self) -> Meshes:
        return self

    def __exit__(self, *_: object) -> None:
        for mesh in self._made.values():
            mesh.destroy()

    def of(self, way: ContextParallelMethod, device_type: str) -> ContextParallelMesh:
        """Return the mesh of a way; all ranks must ask for the same ones in the same order."""
        sizes = (way.ring, way.ulysses)
        if sizes not in self._made:
            self._made[sizes] = ContextParallelMesh(*sizes, device_type)
        return self._made[sizes]
