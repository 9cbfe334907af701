"""What the equivalence cells showed: one line per mode, grid and kernel."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch


@dataclass
class Line:
    """The cells of one row of the table, and the worst of them.

    Args:
        cells: how many there are.
        worst: largest error per dtype.
        share: largest error per dtype, as a share of its limit.
    """

    cells: int = 0
    worst: dict[torch.dtype, float] = field(default_factory=lambda: defaultdict(float))
    share: dict[torch.dtype, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, dtype: torch.dtype, errors: dict[str, float], limits: dict[str, float]) -> None:
        """One more cell."""
        self.cells += 1
        self.worst[dtype] = max(self.worst[dtype], *errors.values())
        shares = (errors[name] / limits[name] for name in errors)
        self.share[dtype] = max(self.share[dtype], *shares)


lines: dict[tuple[str, str], Line] = defaultdict(Line)
"""By grid and kernel."""


def table() -> list[str]:
    """The lines as text."""
    rows = [f"{'grid':<22} {'kernel':<10} {'cells':>5}   worst error (share of its limit)"]
    for (grid, kernel), line in lines.items():
        worst = "   ".join(
            f"{str(dtype).removeprefix('torch.')} {line.worst[dtype]:.1e} ({line.share[dtype]:.2f})"
            for dtype in line.worst
        )
        rows.append(f"{grid:<22} {kernel:<10} {line.cells:>5}   {worst}")
    return [*rows, f"{sum(line.cells for line in lines.values())} cells"]
