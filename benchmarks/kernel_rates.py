"""Speed of kernels on one causal document, in one process, as ratios to a reference kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_cp.bench.kernels import KernelRow, request_of, row_of, with_times
from lightning_cp.bench.methods import AttentionCase
from lightning_cp.bench.timers import measure
from lightning_cp.kernels.select import kernels
from lightning_cp.utils.console import percent

HEAD = ("kernel", "tokens", "fwd, TFLOP/s", "bwd, TFLOP/s", "spread", "fwd / flash", "bwd / flash")


def kernel_row(name: str, case: AttentionCase, repeats: int) -> KernelRow:
    """Measure one kernel; an obstacle or an error becomes part of the row."""
    kernel = kernels()[name]
    row = row_of(kernel, "causal", case, kernel.capabilities.refusal(request_of(case)))
    if row.obstacle is not None:
        return row
    try:
        return with_times(
            *(row, kernel, case),
            lambda step: [measure(step, repeats=repeats, device_type=case.device_type)],
        )
    except Exception as failed:  # any: the other rows are wanted too
        return replace(row, obstacle=f"{type(failed).__name__}: {failed}", failed=True)


def cells(rows: Sequence[KernelRow], flash: str) -> list[list[object]]:
    """Return the lines of a table, with ratios to the kernel called ``flash`` at the same length."""
    known = {row.tokens: rates(row) for row in rows if row.kernel == flash and not row.obstacle}
    lines: list[list[object]] = []
    for row in rows:
        if row.obstacle is not None:
            lines.append([row.kernel, row.tokens, row.obstacle, "", "", "", ""])
            continue
        own, other = rates(row), known.get(row.tokens)
        ratios = [a / b for a, b in zip(own, other, strict=True)] if other else []
        shown = (*(f"{rate:.1f}" for rate in own), percent(row.spread))
        lines.append([row.kernel, row.tokens, *shown, *(f"{ratio:.3f}" for ratio in ratios)])
    return lines


def rates(row: KernelRow) -> tuple[float, float]:
    """Return the rates of forward and backward of a row without an obstacle."""
    assert row.forward_tflops is not None
    assert row.backward_tflops is not None
    return row.forward_tflops, row.backward_tflops
