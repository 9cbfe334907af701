"""``python -m tests.nightly.models``: the table of families and modes, on four processes of this machine.

``python -m tests.nightly.models litgpt`` is that of LitGPT's, where it is installed (``make litgpt-table``).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

from tests.helpers.models.litgpt_zoo import LITGPT_FAMILIES
from tests.helpers.models.matrix import BATCHES, FAMILIES, LITGPT_BATCHES, MODES, Cell, cell
from tests.helpers.pool import shut_down


def main(wanted: Sequence[str]) -> None:
    """Print a line for each family, or for those that are named; for those of LitGPT: ``litgpt``."""
    warnings.simplefilter("ignore")
    families, batches, own = FAMILIES, BATCHES, "own eager attention"
    if "litgpt" in wanted:
        families, batches, own = LITGPT_FAMILIES, LITGPT_BATCHES, "own attention"
        wanted = [name for name in wanted if name != "litgpt"]
    print("| family | " + " | ".join(MODES) + f" | {own} | loss |")
    print("|---|" + "---|" * (len(MODES) + 2))
    try:
        for model, shown in families.items():
            if not wanted or model in wanted:
                print(row(shown, [cell(model, mode, batches) for mode in MODES]), flush=True)
    finally:
        shut_down()


def row(shown: str, cells: Sequence[Cell]) -> str:
    """Errors of gradients by mode, then the worst of all to eager attention, and of the loss."""
    parts = [each.reference for each in cells]
    parts += [max(each.eager for each in cells), max(each.loss for each in cells)]
    return f"| {shown} | " + " | ".join(f"{part:.1e}" for part in parts) + " |"


if __name__ == "__main__":
    main(sys.argv[1:])
