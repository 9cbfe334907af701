"""Our Triton kernels pass Triton's compiler, without a GPU, and fit the smaller ones."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lightning_cp.kernels.triton.launch import is_installed

SHARED_MEMORY = 99 * 1024
"""Bytes that one program may take on compute capability 8.6 and 8.9; 8.0 and 9.0 have more."""


@pytest.mark.skipif(not is_installed(), reason="needs Triton")
@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "value_dim"),
    [
        (80, "float16", 96, 96),
        (80, "float32", 64, 64),
        (90, "bfloat16", 128, 128),
        (90, "bfloat16", 256, 256),
        (80, "bfloat16", 192, 128),
        (90, "bfloat16", 192, 128),
        (80, "float32", 64, 128),
    ],
)
def test_compiles(capability: int, dtype: str, head_dim: int, value_dim: int) -> None:
    command = [sys.executable, "-m", "tests.helpers.kernels.compile_triton", str(capability), dtype]
    environment = {key: x for key, x in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [*command, str(head_dim), str(value_dim)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    taken = dict(line.split()[:2] for line in done.stdout.splitlines()[:3])
    assert taken.keys() == {"forward", "backward_queries", "backward_keys"}
    assert max(map(int, taken.values())) <= SHARED_MEMORY
