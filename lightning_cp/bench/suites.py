"""The suites of a run, one after the other on every rank; the first rank reports.

Its output is printed suite by suite: Markdown tables, pictures, ``bench.json`` and ``hardware.json``.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from lightning_cp.bench import kernels, modes
from lightning_cp.bench.compute import ComputeRow, measure_compute
from lightning_cp.bench.hardware_json import MachineInfo, hardware_of, this_machine
from lightning_cp.bench.kernels import KernelRow, measure_kernels
from lightning_cp.bench.links import LinkRow, measure_links
from lightning_cp.bench.model_step import OverheadRow, measure_overheads
from lightning_cp.bench.modes import ModeRow, measure_modes
from lightning_cp.bench.settings import BenchSettings
from lightning_cp.bench.timers import largest_spread
from lightning_cp.utils.colors import color_of
from lightning_cp.utils.console import markdown_table, percent

Tell = Callable[[str], None]
"""Shows a line of progress."""
MEASURE: dict[str, Callable[[BenchSettings, Tell], Sequence[Any]]] = {
    "kernels": measure_kernels,
    "links": measure_links,
    "modes": measure_modes,
    "compute": measure_compute,
    "overheads": measure_overheads,
}
"""The measurement of each suite."""

Row = TypeVar("Row")


def check(settings: BenchSettings) -> None:
    """Check that everything asked for can be measured, before any process starts.

    Raises:
        ConfigError: something cannot; the message says what works.
    """
    kernels.check(settings)
    if {"links", "modes"} & set(settings.suites):
        modes.check_devices(settings)
    if "modes" in settings.suites:
        modes.check(settings)


def run(settings: BenchSettings, folder: Path) -> None:
    """Measure on every rank of the world; the first rank prints tables and writes the results.

    Results are written suite by suite, so that a failure costs no more than its own suite.

    Args:
        settings: the checked settings.
        folder: receives ``bench.json``, ``hardware.json`` and a picture of each suite.
    """
    machine = this_machine(settings)
    report = BenchReport(machine, settings, folder) if dist.get_rank() == 0 else None
    for suite in settings.suites:
        rows = MEASURE[suite](settings, _teller(suite))
        if report is not None:
            report.take(suite, rows)
    if report is not None:
        report.finish()


def _teller(suite: str) -> Tell:
    """Return a function that shows progress in one overwritten line; without a terminal it does nothing."""
    if dist.get_rank() != 0 or not sys.stderr.isatty():
        return lambda text: None

    def tell(text: str) -> None:
        print(f"\r\033[K{suite}: {text}", end="", file=sys.stderr, flush=True)

    return tell


class Unit(NamedTuple):
    """The unit of rates: TFLOP/s for GPUs, GFLOP/s for CPU cores."""

    name: str
    tflops: float

    @classmethod
    def of(cls, tflops: Iterable[float | None]) -> Unit:
        """Return the unit in which the largest rate is at least 1."""
        large = max((rate for rate in tflops if rate is not None), default=0.0) >= 1
        return cls("TFLOP/s", 1.0) if large else cls("GFLOP/s", 1e-3)

    def of_tflops(self, rate: float | None) -> float | None:
        """Convert a rate to this unit."""
        return None if rate is None else rate / self.tflops


KERNELS = (
    "kernel",
    "tokens",
    "forward",
    "backward",
    "both",
    "forward, ms",
    "backward, ms",
    "spread",
)
LINKS = ("axis, collective", "mesh", "latency, us")
MODES = ("way", "compute", "comm", "both", "exposed", "overlap", "eff.")
CPU = ("CPU-seconds", "compute", "comm", "both", "one process", "both / one", "spread")
"""Columns of CPU-seconds, summed over ranks."""
COMPUTE = ("forward + backward", "tokens", "ms", "GFLOP/s", "GB/s", "spread")
OVERHEADS = ("mode", "ranks", "a layer, ms", "a step, ms", "calls of a layer", "spread")


def kernel_tables(rows: Sequence[KernelRow]) -> str:
    """Return a table for each mask, dtype and head dim; then the kernels that were not measured, and why."""
    measured = [row for row in rows if row.obstacle is None]
    unit = Unit.of([row.both_tflops for row in measured])
    tables: list[str] = []
    for (mask, *_), part in group_rows(measured, lambda r: (r.mask, r.dtype, r.head_dim)):
        title = f"### {mask}, {_shape(part[0])}: {unit.name} of a device"
        tables.append(f"{title}\n\n{markdown_table(KERNELS, [_kernel(row, unit) for row in part])}")
    return "\n\n".join([*tables, *_not_measured(rows)])


def _kernel(row: KernelRow, unit: Unit) -> list[str]:
    rates = map(unit.of_tflops, (row.forward_tflops, row.backward_tflops, row.both_tflops))
    times = (row.forward_seconds, row.backward_seconds)
    shown = [*map(_significant, rates), *map(_ms, times)]
    return [row.kernel, f"{row.tokens:,}", *shown, percent(row.spread)]


def _not_measured(rows: Sequence[KernelRow]) -> list[str]:
    """Return each kernel's obstacles, with the masks that they concern unless it is all masks."""
    masks = list(dict.fromkeys(row.mask for row in rows))
    lines: list[str] = []
    refused = [row for row in rows if row.obstacle is not None]
    for (kernel, why), part in group_rows(refused, lambda r: (r.kernel, r.obstacle)):
        of = list(dict.fromkeys(row.mask for row in part))
        lengths = sorted(
            {row.tokens for row in rows if row.kernel == kernel} - {r.tokens for r in part}
        )
        where = "" if of == masks else f", {' and '.join(of)}"
        where += f", {part[0].tokens:,} tokens" if lengths and len(part) == 1 else ""
        lines.append(f"- {kernel}{where}: {why}")
    return ["\n".join(["Not measured:", *lines])] if lines else []


def link_tables(rows: Sequence[LinkRow]) -> str:
    """Return one table: GB/s by the bytes that a rank was asked to send."""
    sizes = sorted({row.asked for row in rows if not row.latency})
    lines = []
    for (axis, collective, *mesh), part in group_rows(
        rows, lambda r: (r.axis, r.collective, r.ulysses_size, r.ring_size)
    ):
        latency = next(row.seconds for row in part if row.latency)
        rates = {row.asked: row.gigabytes_per_second for row in part}
        cells = [_significant(rates.get(size)) for size in sizes]
        spread = largest_spread(row.spread for row in part if not row.latency)
        mesh_shown = "x".join(map(str, mesh))
        lines.append(
            [f"{axis}, {collective}", mesh_shown, f"{latency * 1e6:.0f}", *cells, percent(spread)]
        )
    note = "GB/s that a rank sends while it receives as much; mesh is ulysses x ring."
    return f"{note}\n\n{markdown_table([*LINKS, *map(format_size, sizes), 'spread'], lines)}"


def compute_table(rows: Sequence[ComputeRow]) -> str:
    """Return, for each dtype, a table of the parts besides attention."""
    tables: list[str] = []
    for _, part in group_rows(rows, lambda r: r.dtype):
        title = (
            f"### {part[0].dtype}, {part[0].features} features: a layer, the loss, the optimizer"
        )
        tables.append(f"{title}\n\n{markdown_table(COMPUTE, map(_compute, part))}")
    return "\n\n".join(tables)


def _compute(row: ComputeRow) -> list[str]:
    rates = [done / row.seconds / 1e9 or None for done in (row.operations, row.bytes)]
    times = [f"{row.tokens:,}", _ms(row.seconds), *map(_significant, rates)]
    return [row.what, *times, percent(row.spread)]


def overhead_table(rows: Sequence[OverheadRow]) -> str:
    """Return the table of costs that do not depend on the length."""
    lines = [
        [
            *(row.mode, str(row.ranks), _ms(row.layer_seconds), _ms(row.step_seconds)),
            *(str(row.calls), percent(row.spread)),
        ]
        for row in rows
    ]
    return f"A training step of next to nothing.\n\n{markdown_table(OVERHEADS, lines)}"


def format_size(size: int) -> str:
    """Format bytes as 64 KiB, 1 MiB, ..."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size} {unit}"
        size //= 1024
    return f"{size} GiB"


def mode_tables(rows: Sequence[ModeRow]) -> str:
    """Return, for each sequence and pass, a table of milliseconds, and on CPU one of CPU-seconds."""
    unit = Unit.of([row.tflops for row in rows])
    tables: list[str] = []
    for _, part in group_rows(rows, mode_group):
        tables.append(_title(part[0]))
        measured = [row for row in part if row.obstacle is None]
        if measured:
            head = [*MODES, unit.name, "spread"]
            tables.append(markdown_table(head, [_mode(row, unit) for row in measured]))
        if on_cpu := [row for row in measured if row.cpu is not None]:
            tables.append(markdown_table(CPU, map(_cpu, on_cpu)))
        refused = [f"- {row.way}: {row.obstacle}" for row in part if row.obstacle]
        tables += ["\n".join(["Not measured:", *refused])] if refused else []
    return "\n\n".join(tables)


def mode_group(row: ModeRow) -> tuple[str, int, int, int, bool]:
    """Return the properties that the rows of one table share."""
    return row.dtype, row.head_dim, row.tokens, row.documents, row.backward


def _title(row: ModeRow) -> str:
    what = f"{row.documents} packed documents" if row.documents else "dense"
    passes = "forward + backward" if row.backward else "forward"
    one = "" if row.one is None else f"; one process: {_ms(row.one)} ms"
    return (
        f"### {row.tokens:,} tokens on {row.ranks} ranks, {what}, causal, {passes}\n\n"
        f"{_shape(row)}; milliseconds{one}"
    )


def _mode(row: ModeRow, unit: Unit) -> list[str]:
    times = map(_ms, (row.compute, row.comm, row.both, row.exposed))
    shares = map(percent, (row.overlap, row.efficiency))
    rate = _significant(unit.of_tflops(row.tflops))
    return [short_name(row), *times, *shares, rate, percent(row.spread)]


def _cpu(row: ModeRow) -> list[str]:
    seconds = (row.cpu_compute, row.cpu_comm, row.cpu, row.cpu_one)
    shown = ["-" if value is None else f"{value:.4f}" for value in seconds]
    ratio = "-" if row.cpu_ratio is None else f"{row.cpu_ratio:.3f}"
    return [short_name(row), *shown, ratio, percent(row.cpu_spread)]


def short_name(row: ModeRow) -> str:
    """Return the way's name for tables of 110 columns: with a layout, the family is enough."""
    name = row.way.replace("two_kernel", "two")
    return name.replace("zigzag_", "") if name.endswith(", balanced") else name


def _shape(row: KernelRow | ModeRow) -> str:
    return f"{row.dtype}, {row.heads} heads, {row.kv_heads} K/V heads, head dim {row.head_dim}"


def group_rows(
    rows: Iterable[Row], key: Callable[[Row], Hashable]
) -> list[tuple[tuple[object, ...], list[Row]]]:
    """Group rows by key, in the order in which keys first appear."""
    found: dict[Hashable, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return [(k if isinstance(k, tuple) else (k,), part) for k, part in found.items()]


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"


def _significant(value: float | None) -> str:
    """Format three significant digits, without an exponent."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}" if value >= 0.001 else f"{value:.4f}"


def draw_kernels(rows: Sequence[KernelRow], headline: str, picture: Path) -> None:
    """Draw TFLOP/s by tokens: a panel for each mask, a line for each kernel and pass."""
    measured = [row for row in rows if row.obstacle is None]
    if not measured:
        return
    panels = group_rows(measured, lambda r: (r.mask,))
    title = "Kernels: operations on visible pairs, one device"
    figure, axes = _figure(len(panels), f"{title}\n{headline}")
    unit = Unit.of([row.both_tflops for row in measured])
    lines = group_rows(measured, lambda r: (r.kernel, r.dtype, r.head_dim))
    colors = {key: color_of(number) for number, (key, _) in enumerate(lines)}
    shapes = len({(row.dtype, row.head_dim) for row in measured}) > 1
    for ((mask,), part), axis in zip(panels, axes, strict=True):
        for key, line in group_rows(part, lambda r: (r.kernel, r.dtype, r.head_dim)):
            name = ", ".join(map(str, key)) if shapes else str(key[0])
            tokens, style = [row.tokens for row in line], {"color": colors[key], "marker": "o"}
            forward = [unit.of_tflops(row.forward_tflops) for row in line]
            axis.plot(tokens, forward, label=f"{name}, forward", **style)
            backward = [unit.of_tflops(row.backward_tflops) for row in line]
            axis.plot(tokens, backward, label=f"{name}, backward", ls="--", mfc="white", **style)
        axis.set(xlabel="tokens", ylabel=unit.name)
        axis.set_title(mask, fontsize=10)
        tokens = sorted({row.tokens for row in measured})
        _at(axis, tokens, [f"{n:,}" for n in tokens])
        axis.set_ylim(bottom=0)
    _finish(figure, axes, picture)


def draw_links(rows: Sequence[LinkRow], headline: str, picture: Path) -> None:
    """Draw GB/s by the bytes that a rank sends: a panel for each mesh, a line for each collective."""
    if not rows:
        return
    panels = group_rows(rows, lambda r: (r.ulysses_size, r.ring_size))
    title = "Links: what a rank sends while it receives as much"
    figure, axes = _figure(len(panels), f"{title}\n{headline}", share=True)
    names = group_rows(rows, lambda r: (r.axis, r.collective))
    colors = {key: color_of(number) for number, (key, _) in enumerate(names)}
    for ((ulysses, ring), part), axis in zip(panels, axes, strict=True):
        for key, line in group_rows(part, lambda r: (r.axis, r.collective)):
            style = {"color": colors[key], "marker": "o", "label": ", ".join(map(str, key))}
            axis.plot([r.bytes for r in line], [r.gigabytes_per_second for r in line], **style)
        axis.set(xscale="log", yscale="log", xlabel="bytes that a rank sends", ylabel="GB/s")
        axis.set_title(f"ulysses {ulysses} x ring {ring}", fontsize=10)
        tiny = min(row.bytes for row in rows)
        sizes = [tiny, *sorted({row.asked for row in rows if not row.latency})]
        _at(axis, sizes, [format_size(size) for size in sizes])
        axis.tick_params(labelbottom=True, labelleft=True)  # inner panels hide them otherwise
    _finish(figure, axes, picture)


def draw_modes(rows: Sequence[ModeRow], headline: str, picture: Path) -> None:
    """Draw compute, exposed communication and efficiency of each way: one panel for each table."""
    measured = [row for row in rows if row.both is not None]
    if not measured:
        return
    panels = group_rows(measured, mode_group)
    title = "Modes: time of one attention call; per cent: efficiency against one process"
    height = 1.1 + 0.27 * max(len(part) for _, part in panels)
    figure, axes = _figure(len(panels), f"{title}\n{headline}", height=height)
    for (_, part), axis in zip(panels, axes, strict=True):
        _bars(axis, part)
    _finish(figure, axes, picture)


def _bars(axis: Any, rows: Sequence[ModeRow]) -> None:
    """Draw one bar for each way, the first on top; gray where the exposed part is unknown."""
    for at, row in enumerate(rows):
        both = (row.both or 0.0) * 1e3
        if row.compute is None or row.exposed is None:
            axis.barh(at, both, color="lightgray", label="both, not taken apart for certain")
        else:
            compute = min(row.compute * 1e3, both)
            axis.barh(at, compute, color=color_of(0), label="compute")
            left = {"left": compute, "label": "exposed communication"}
            axis.barh(at, both - compute, color=color_of(1), **left)
        share = "" if row.efficiency is None else f" {row.efficiency:.0%}"
        axis.text(both, at, share, va="center", fontsize=8)
    first = rows[0]
    what = f"{first.documents} documents" if first.documents else "dense"
    passes = "forward + backward" if first.backward else "forward"
    axis.set_title(f"{first.tokens:,} tokens, {what}, {passes}", fontsize=9)
    axis.set_xlabel("milliseconds", fontsize=8)
    axis.set_yticks(range(len(rows)), [short_name(row) for row in rows], fontsize=8)
    axis.invert_yaxis()
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=8)
    axis.set_xlim(0, max(row.both or 0.0 for row in rows) * 1e3 * 1.15)


def draw_compute(rows: Sequence[ComputeRow], headline: str, picture: Path) -> None:
    """Draw rates by tokens: operations on the left, bytes on the right."""
    names = (("operations", "GFLOP/s"), ("bytes", "GB/s"))
    figure, axes = _figure(2, f"Beside attention: one device\n{headline}")
    for (name, unit), axis in zip(names, axes, strict=True):
        measured = [row for row in rows if getattr(row, name)]
        for key, line in group_rows(measured, lambda r: (r.what, r.dtype)):
            rates = [getattr(row, name) / row.seconds / 1e9 for row in line]
            axis.plot(
                [row.tokens for row in line], rates, marker="o", label=", ".join(map(str, key))
            )
        axis.set(xlabel="tokens", ylabel=unit)
        tokens = sorted({row.tokens for row in rows})
        _at(axis, tokens, [f"{n:,}" for n in tokens])
        axis.set_ylim(bottom=0)
    _finish(figure, axes, picture)


def draw_overheads(rows: Sequence[OverheadRow], headline: str, picture: Path) -> None:
    """Draw milliseconds of a layer and of a step in each mode."""
    figure, axes = _figure(1, f"A training step of next to nothing\n{headline}")
    for name, color, move in (("layer", color_of(0), -0.2), ("step", color_of(1), 0.2)):
        at = [number + move for number in range(len(rows))]
        times = [getattr(row, f"{name}_seconds") * 1e3 for row in rows]
        axes[0].barh(at, times, height=0.4, color=color, label=f"a {name}")
    axes[0].set_yticks(range(len(rows)), [f"{row.mode}, {row.ranks} ranks" for row in rows])
    axes[0].set_xlabel("milliseconds")
    _finish(figure, axes, picture)


def _figure(
    panels: int, title: str, *, height: float = 3.2, share: bool = False
) -> tuple[Any, list[Any]]:
    """Return a figure with two panels in a row, which may share scales and ticks."""
    from matplotlib.figure import Figure  # needs no display

    columns = min(panels, 2)
    lines = -(-panels // columns)
    figure = Figure(figsize=(5.5 * columns, height * lines + 1.0), layout="constrained")
    every = figure.subplots(lines, columns, squeeze=False, sharex=share, sharey=share)
    grid = every.flatten().tolist()
    for unused in grid[panels:]:
        unused.remove()
    figure.suptitle(title, fontsize=10)
    return figure, grid[:panels]


def _at(axis: Any, values: Sequence[int], names: Sequence[str]) -> None:
    """Put ticks along x at these values only."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(values, names, minor=False)
    axis.set_xticks([], minor=True)


def _finish(figure: Any, axes: Sequence[Any], picture: Path) -> None:
    """Add a grid to each panel and one legend for all, and save."""
    named: dict[str, Any] = {}
    for axis in axes:
        axis.grid(alpha=0.3)
        lines, names = axis.get_legend_handles_labels()
        named |= dict(zip(names, lines, strict=True))
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(picture, dpi=120)


DRAW: dict[str, Callable[[Sequence[Any], str, Path], None]] = {
    "kernels": draw_kernels,
    "links": draw_links,
    "modes": draw_modes,
    "compute": draw_compute,
    "overheads": draw_overheads,
}
"""The picture of each suite."""


CONVENTION = (
    "FLOP convention: 4 x head dim x heads for each visible (query, key) pair, forward; 2.5 times that, "
    "backward.\nWhat a mask hides is not counted, and recomputation is not counted beyond those 2.5."
)
TABLES: dict[str, Callable[[Sequence[Any]], str]] = {
    "kernels": kernel_tables,
    "links": link_tables,
    "modes": mode_tables,
    "compute": compute_table,
    "overheads": overhead_table,
}
"""The tables of each suite."""
SCHEMA = 1
"""Schema version of ``bench.json``."""
RESTLESS = 0.25
"""A median spread above this suggests a busy machine."""


class BenchReport:
    """The results so far.

    Args:
        machine: the measured machine.
        settings: the settings of the run.
        folder: the folder for the files.
    """

    def __init__(self, machine: MachineInfo, settings: BenchSettings, folder: Path) -> None:
        self._machine, self._settings, self._folder = machine, settings, folder
        self._found: dict[str, Sequence[Any]] = {}
        self._left: dict[Path, None] = {}  # files of this run, in order
        print(f"{machine.headline}\n{_repeats(settings)}\n{CONVENTION}")
        if machine.device_type == "cpu" and machine.devices > machine.cores:
            print(
                f"{machine.devices} processes share {machine.cores} cores: wall times, and all that follows "
                "from them, say\nlittle. CPU-seconds are right."
            )

    def take(self, suite: str, rows: Sequence[Any]) -> None:
        """Print the tables of a suite, write its rows and draw its picture."""
        self._found[suite] = rows
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        print(f"\n## {suite}\n\n{TABLES[suite](rows)}")
        print(_trust(rows), end="", flush=True)
        self._write()
        self._draw(suite, rows)

    def finish(self) -> None:
        """Print the paths of the files."""
        print("\n" + "\n".join(f"  {file}" for file in self._left), flush=True)

    def _write(self) -> None:
        found = {suite: [asdict(row) for row in rows] for suite, rows in self._found.items()}
        about = {"machine": asdict(self._machine), "settings": asdict(self._settings)}
        text = {"schema": SCHEMA, "convention": CONVENTION, **about, **found}
        self._folder.mkdir(parents=True, exist_ok=True)
        bench, hardware = (self._folder / name for name in ("bench.json", "hardware.json"))
        bench.write_text(json.dumps(text, indent=1) + "\n")
        self._left[bench] = None
        if set(self._found) - {"modes"}:
            hardware_of(self._machine, self._found).save(hardware)
            self._left[hardware] = None

    def _draw(self, suite: str, rows: Sequence[Any]) -> None:
        picture = self._folder / f"{suite}.png"
        picture.unlink(missing_ok=True)  # an earlier run may have left one
        try:
            DRAW[suite](rows, self._machine.headline, picture)
        except ImportError as error:
            print(f"\nNo picture of {suite}: {error}. What draws it: pip install matplotlib.")
        if picture.exists():
            self._left[picture] = None


def _trust(rows: Sequence[Any]) -> str:
    """Return a warning where repeats differ so much that other jobs must be running."""
    spreads = [row.spread for row in rows if row.spread is not None]
    if not spreads or statistics.median(spreads) < RESTLESS:
        return ""
    return (
        f"\nHalf of the spreads are above {statistics.median(spreads):.0%}: runs this short, or other jobs "
        "on this machine, make\ntimes uncertain. On CPU, CPU-seconds suffer less.\n"
    )


def _repeats(settings: BenchSettings) -> str:
    return (
        f"Ranks begin together; a figure is of the slowest rank, the least of {settings.repeats} after "
        f"{settings.warm_up} to warm up.\n{_SURE if settings.repeats > 1 else _UNSURE}"
    )


_SURE = "The spread is (most - least) / least."
_UNSURE = "One repeat gives no spread, so no figure that depends on it is shown. Set repeats= to 2 or more."
