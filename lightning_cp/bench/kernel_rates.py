"""How fast kernels are on one causal document; forward and backward apart, as they are called here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_cp.bench.case import BACKWARD_FLOPS, Case
from lightning_cp.bench.replay_rank import replay
from lightning_cp.bench.ways import Ours
from lightning_cp.kernels.api import Request, kernels

HEAD = ("kernel", "tokens", "fwd, TFLOP/s", "bwd, TFLOP/s", "spread", "fwd / flash", "bwd / flash")


@dataclass(frozen=True)
class KernelRow:
    """A kernel at one length, or why there is no figure."""

    kernel: str
    tokens: int
    forward: float = 0.0
    """10^12 operations a second; visible pairs only."""
    backward: float = 0.0
    spread: float = 0.0
    """(most - least) / least time of the repeats, of the pass where it is larger."""
    obstacle: str | None = None
    failed: bool = False
    """It should have been measured."""


def kernel_row(name: str, case: Case, repeats: int) -> KernelRow:
    """Measure one kernel; what it cannot do, or raises, is told in the row."""
    masks = frozenset({"causal" if case.causal else "full"})
    refusal = kernels()[name].capabilities.refusal(
        Request(case.device_type, case.dtype, case.head_dim, masks)
    )
    if refusal is not None:
        return KernelRow(name, case.tokens, obstacle=refusal)
    try:
        return _measured(name, case, repeats)
    except Exception as failed:  # any: the other rows are wanted too
        told = f"{type(failed).__name__}: {failed}"
        return KernelRow(name, case.tokens, obstacle=told, failed=True)


def _measured(name: str, case: Case, repeats: int) -> KernelRow:
    found = replay(Ours(1, 1, kernel=name), case, 0, repeats)
    rate = case.flops / 1e12
    rates = (rate / found.forward, BACKWARD_FLOPS * rate / found.backward)
    return KernelRow(name, case.tokens, *rates, found.spread)


def cells(rows: Sequence[KernelRow], flash: str) -> list[list[object]]:
    """Lines of a table; ratios to the kernel called ``flash`` at the same length."""
    known = {row.tokens: row for row in rows if row.kernel == flash and row.obstacle is None}
    lines: list[list[object]] = []
    for row in rows:
        if row.obstacle is not None:
            lines.append([row.kernel, row.tokens, row.obstacle, "", "", "", ""])
            continue
        other = known.get(row.tokens)
        ratios = (row.forward / other.forward, row.backward / other.backward) if other else ()
        rates = (f"{row.forward:.1f}", f"{row.backward:.1f}", f"{row.spread:.0%}")
        lines.append([row.kernel, row.tokens, *rates, *(f"{ratio:.3f}" for ratio in ratios)])
    return lines
