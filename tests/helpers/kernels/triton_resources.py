"""What our Triton kernels take on GPUs that are not here, compiled in another process, and its bounds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

BOUNDS = Path(__file__).with_name("triton_bounds.json")
"""By target, head dim and kernel: ``[spilled stores, the kind of tensor cores]``, of bfloat16."""
SHARED_MEMORY = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes that one program may take; by Ampere's blocks also GPUs of compute capability 8.6, 8.9 and 12 run."""
PRODUCTS = ("wgmma", "tcgen05", "mma")
"""Instructions of tensor cores."""
TENSOR_MEMORY = 512
"""Columns of Blackwell's tensor memory."""


def compiled(
    capability: int, dtype: str, head_dim: int, value_dim: int, **options: str
) -> dict[str, dict[str, Any]]:
    """What each kernel takes; the options are those of ``compile_triton``.

    Of a kernel with several launches the most that one takes, and the fewest instructions of tensor cores.
    """
    command = [sys.executable, "-m", "tests.helpers.kernels.compile_triton", str(capability), dtype]
    environment = {key: x for key, x in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [*command, str(head_dim), str(value_dim), *(f"{k}={x}" for k, x in options.items())],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    taken: dict[str, dict[str, Any]] = {}
    for row in map(json.loads, done.stdout.splitlines()):
        other = taken.setdefault(row.pop("kernel"), row)
        other |= {x: (min if x in PRODUCTS else max)(row[x], other[x]) for x in row}
    return taken


def check_memory(capability: int, taken: dict[str, dict[str, Any]]) -> None:
    """Every program fits into the memory of a multiprocessor."""
    for name, kernel in taken.items():
        assert kernel["shared"] <= SHARED_MEMORY[capability], (name, kernel)
        assert kernel["tensor_memory"] <= TENSOR_MEMORY, (name, kernel)


def check_bounds(capability: int, head_dim: int, taken: dict[str, dict[str, Any]]) -> None:
    """No more registers are spilled than the file allows, and products use its kind of tensor cores."""
    bounds = json.loads(BOUNDS.read_text())[str(capability)][str(head_dim)]
    for name, kernel in taken.items():
        stores, kind = bounds[name]
        assert kernel["stores"] <= stores, f"{name} spills {kernel['stores']} registers: {kernel}"
        assert kernel[kind] > 0, f"{name} has no {kind}: {kernel}"
        # What the compiler cannot place becomes a few instructions that end the program.
        assert kernel["registers"] > 32, (name, kernel)
