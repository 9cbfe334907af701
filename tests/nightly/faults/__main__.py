"""``python -m tests.nightly.faults [PART OF A NAME]``: the table of faults, as measured here, in Markdown."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from tests.nightly.faults.references import REFERENCES, Reference
from tests.nightly.faults.table import Row, every

LONGEST = 170
"""Characters of a message that are shown."""


def main() -> None:
    """Run the rows and print each as it ends; exit with 1 if one is not as it has to be."""
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    print("| fault | bound | measured | last line |\n|---|---|---|---|", flush=True)
    good = [_show(row) for row in (*every(), *REFERENCES) if wanted in row.name]
    raise SystemExit(not all(good))


def _show(row: Row | Reference) -> bool:
    bound = row.bound if isinstance(row, Reference) else f"{row.bound:g} s"
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        try:
            done = row.prove(Path(folder))
        except AssertionError as error:
            print(f"| {row.name} | {bound} | FAILED after {time.monotonic() - began:.0f} s | |")
            print(error, file=sys.stderr)
            return False
    said = done.last.replace("|", "\\|")
    said = f"{said[:LONGEST]} ..." if len(said) > LONGEST else said
    if isinstance(row, Reference):
        print(f"| {row.name} | {bound} | {said} | |", flush=True)
    else:
        print(f"| {row.name} | {bound} | {done.seconds:.1f} s | `{said}` |", flush=True)
    return True


if __name__ == "__main__":
    main()
