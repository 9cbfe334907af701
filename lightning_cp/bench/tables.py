"""The tables of each suite, in Markdown that is readable on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from lightning_cp.bench.compute import ComputeRow
from lightning_cp.bench.kernels import KernelRow
from lightning_cp.bench.links import LinkRow
from lightning_cp.bench.modes import ModeRow
from lightning_cp.bench.overheads import OverheadRow
from lightning_cp.bench.timers import largest_spread
from lightning_cp.utils.console import markdown_table, percent

Row = TypeVar("Row")


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
