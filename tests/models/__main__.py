"""``python -m tests.models``: the table of families and modes, on four processes of this machine."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

from tests.models.matrix import FAMILIES, MODES, Cell, cell
from tests.pool import shut_down


def main(wanted: Sequence[str]) -> None:
    """Print a line for each family, or for those that are named."""
    warnings.simplefilter("ignore")
    print("| family | " + " | ".join(MODES) + " | own eager attention | loss |")
    print("|---|" + "---|" * (len(MODES) + 2))
    try:
        for model, shown in FAMILIES.items():
            if not wanted or model in wanted:
                print(row(shown, [cell(model, mode) for mode in MODES]), flush=True)
    finally:
        shut_down()


def row(shown: str, cells: Sequence[Cell]) -> str:
    """Errors of gradients by mode, then the worst of all to eager attention, and of the loss."""
    parts = [each.reference for each in cells]
    parts += [max(each.eager for each in cells), max(each.loss for each in cells)]
    return f"| {shown} | " + " | ".join(f"{part:.1e}" for part in parts) + " |"


if __name__ == "__main__":
    main(sys.argv[1:])
