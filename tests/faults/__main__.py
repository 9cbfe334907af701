"""``python -m tests.faults [PART OF A NAME]``: the table of faults, as measured here, in Markdown."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from tests.faults.table import Row, every


def main() -> None:
    """Run the rows and print each as it ends; exit with 1 if one is not as it has to be."""
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    print("| fault | bound, s | measured, s | last line |\n|---|---|---|---|", flush=True)
    good = [_show(row) for row in every() if wanted in row.name]
    raise SystemExit(not all(good))


def _show(row: Row) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        try:
            done = row.prove(Path(folder))
        except AssertionError as error:
            print(
                f"| {row.name} | {row.bound:g} | FAILED after {time.monotonic() - began:.0f} s | |"
            )
            print(error, file=sys.stderr)
            return False
    said = done.last.replace("|", "\\|")
    print(f"| {row.name} | {row.bound:g} | {done.seconds:.1f} | `{said}` |", flush=True)
    return True


if __name__ == "__main__":
    main()
