"""One rank of ``benchmarks.gpus.command``: a program of its own."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.gpus.command import run_rank

if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4])
