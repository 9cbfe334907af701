"""All that several GPUs have to show: ``torchrun --nproc-per-node 8 -m lightning_cp.bench.gpus``.

The checks and their harness are ``benchmarks.gpus`` of a checkout of this project; the wheel has neither.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec


def main() -> int:
    """Check, report, and return the exit status: 0 if every line passed, 1 if not, 2 if nothing can run."""
    if find_spec("benchmarks") is None or find_spec("benchmarks.gpus") is None:
        print(
            "lightning_cp.bench.gpus runs in a checkout of the project, whose tests it uses, and "
            "benchmarks/gpus is not in Python's path. Start it in the root of the checkout.",
            file=sys.stderr,
        )
        return 2
    return int(import_module("benchmarks.gpus.command").main())


if __name__ == "__main__":
    sys.exit(main())
