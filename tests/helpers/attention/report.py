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

    def __str__(self) -> str:
        worst = "   ".join(
            f"{str(dtype).removeprefix('torch.')} {self.worst[dtype]:.1e} ({self.share[dtype]:.2f})"
            for dtype in self.worst
        )
        return f"{self.cells:>5}   {worst}"


lines: dict[tuple[str, str], Line] = defaultdict(Line)
"""By grid and kernel."""

rows: dict[str, Line] = defaultdict(Line)
"""The same cells, by row of the matrix."""

ratios: dict[tuple[str, str], dict[str, float]] = {}
"""(grid, kernel) -> result -> its largest error as a multiple of that on one rank."""


def table() -> list[str]:
    """The lines as text."""
    head = f"{'grid':<42} {'kernel':<10} {'cells':>5}   worst error (share of its limit)"
    found = [f"{grid:<42} {kernel:<10} {line}" for (grid, kernel), line in lines.items()]
    by_row = [f"{'row ' + row:<53} {line}" for row, line in sorted(rows.items())]
    return [head, *found, *by_row, f"{sum(line.cells for line in lines.values())} cells"]


def ratio_table() -> list[str]:
    """The ratios as text."""
    return [
        f"{grid:<42} {kernel:<10} " + "   ".join(f"{name} {x:.3f}" for name, x in of.items())
        for (grid, kernel), of in ratios.items()
    ]
