"""The sections of a GPU check: their measurements and tests, required packages, and durations."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from benchmarks import kernel_rates, replay
from benchmarks.step_overhead import Job
from lightning_cp.bench.methods import AttentionCase
from lightning_cp.utils import console as table

KERNELS = {
    "cuda": ("triton", "aten_cuda_flash", "aten_cuda_cudnn"),
    "cpu": ("reference", "aten_cpu_flash"),
}
FLASH = {"cuda": "aten_cuda_flash", "cpu": "aten_cpu_flash"}
Result = tuple[list[Any], str]
"""Rows, and their table."""


@dataclass(frozen=True)
class CheckSizes:
    """The sizes of the measurements on a device."""

    device_type: str
    kernel_tokens: Sequence[int]
    replay: replay.ReplaySizes
    replay_kernels: Sequence[str]
    dtype: torch.dtype
    job: Job
    """The job of the training runs."""


def sizes_of(device_type: str) -> CheckSizes:
    """Full size on a GPU, small on CPU."""
    if device_type == "cuda":
        size = replay.ReplaySizes(8192, [8], [8, 16, 32, 64], repeats=10)
        job = Job(tokens=4096, hidden=1024, layers=4, heads=16, kv_heads=4)
        kernels = replay.KERNELS["cuda"]
        return CheckSizes("cuda", [8192, 16384, 32768], size, kernels, torch.bfloat16, job)
    small = replay.ReplaySizes(
        *(32, [2], [2], 1), dense_tokens=64, dtype=torch.float32, device_type="cpu"
    )
    return CheckSizes("cpu", [64], small, replay.KERNELS["cpu"], torch.float32, Job(64, hidden=32))


@dataclass(frozen=True)
class Check:
    """One section."""

    name: str
    title: str
    minutes: float
    """The approximate duration on one H200 with 16 cores."""
    run: Callable[[CheckSizes, Path], Result]
    packages: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cuda",)


def _kernels(sizes: CheckSizes, folder: Path) -> Result:
    case = AttentionCase(*(0, 1, 32, 8, 128), dtype=sizes.dtype, device_type=sizes.device_type)
    rows = [
        kernel_rates.kernel_row(name, replace(case, tokens=tokens), sizes.replay.repeats)
        for tokens in sizes.kernel_tokens
        for name in KERNELS[sizes.device_type]
    ]
    lines = kernel_rates.cells(rows, FLASH[sizes.device_type])
    return rows, "\n".join(
        [table.markdown_head(kernel_rates.HEAD), *map(table.markdown_row, lines)]
    )


def _replay_dense(sizes: CheckSizes, folder: Path) -> Result:
    return _rows(replay.DENSE_HEAD, replay.dense_cells, _each(replay.all_dense, sizes))


def _replay_packed(sizes: CheckSizes, folder: Path) -> Result:
    return _rows(replay.PACKED_HEAD, replay.packed_cells, _each(replay.all_packed, sizes))


def _each(make: Callable[[replay.ReplaySizes, str], list[Any]], sizes: CheckSizes) -> list[Any]:
    return [row for kernel in sizes.replay_kernels for row in make(sizes.replay, kernel)]


def _training(sizes: CheckSizes, folder: Path) -> Result:
    from benchmarks import gpu_training

    rows = gpu_training.training_rows(sizes.job, sizes.device_type)
    return _rows(gpu_training.TRAINING_HEAD, gpu_training.training_cells, rows)


def _synchronisations(sizes: CheckSizes, folder: Path) -> Result:
    from benchmarks import gpu_training

    rows = gpu_training.synchronisation_rows(sizes.job)
    cells = [(row.engine, row.place, f"{row.per_step:g}") for row in rows]
    head = gpu_training.SYNCHRONISATION_HEAD
    return rows, "\n".join([table.markdown_head(head), *map(table.markdown_row, cells)])


def _rows(head: Iterable[str], cells: Callable[[Any], list[object]], rows: list[Any]) -> Result:
    return rows, "\n".join(
        [table.markdown_head(head), *(table.markdown_row(cells(row)) for row in rows)]
    )


def tests_in(pattern: str) -> Callable[[CheckSizes, Path], Result]:
    """Return a section that runs the kernel tests in ``tests/unit/kernels`` whose files match a pattern."""

    def run(sizes: CheckSizes, folder: Path) -> Result:
        name = pattern.removesuffix(".py").rstrip("*")
        return run_tests(pattern, folder / f"{name}.xml")

    return run


def run_tests(pattern: str, results: Path) -> Result:
    """Run tests with pytest; count the cells of each test that passed, failed or were skipped.

    Raises:
        RuntimeError: pytest did not start, tests failed, or all tests of a file were skipped.
    """
    files = sorted(str(path) for path in (Path("tests/unit/kernels")).glob(pattern))
    if not files:
        raise RuntimeError(
            f"this folder has no tests/unit/kernels/{pattern}. Run gpu-check from the repository."
        )
    command = [sys.executable, "-m", "pytest", "-q", "-m", "nightly or not nightly", "--tb=short"]
    if find_spec("xdist") is not None:  # compiling is most of the time: many processes at once
        command += ["-n", "8", "--dist", "worksteal"]
    results.unlink(missing_ok=True)
    command += [f"--junitxml={results}", *files]
    done = subprocess.run(  # noqa: S603
        command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    rows = outcomes(results) if results.exists() else []
    if not rows:
        raise RuntimeError(
            f"pytest did not start (status {done.returncode}):\n{done.stdout[-4000:]}"
        )
    text = "\n".join(
        [table.markdown_head(COLUMNS), *(table.markdown_row(row.values()) for row in rows)]
    )
    if done.returncode:
        raise RuntimeError(
            f"pytest ended with status {done.returncode}\n{text}\n{done.stdout[-8000:]}"
        )
    if empty := files_without_a_pass(rows):
        raise RuntimeError(f"every test was skipped in {', '.join(empty)}\n{text}")
    return rows, text


def files_without_a_pass(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Test files in which no cell passed."""
    passed: dict[str, int] = {}
    for row in rows:
        name = row["test"].rpartition(".")[0]
        passed[name] = passed.get(name, 0) + row["passed"]
    return [name for name, count in passed.items() if not count]


COLUMNS = ("test", "passed", "failed", "skipped", "why skipped")


def outcomes(results: Path) -> list[dict[str, Any]]:
    """Count the cells of each test function in pytest's XML that passed, failed or were skipped, and why."""
    found: dict[str, dict[str, Any]] = {}
    for case in ElementTree.parse(results).iter("testcase"):  # noqa: S314 - pytest wrote it just now
        name = f"{case.get('classname', '')}.{case.get('name', '')}".split("[")[0]
        row = found.setdefault(name, dict(zip(COLUMNS, (name, 0, 0, 0, ""), strict=True)))
        skipped = case.find("skipped")
        if skipped is not None:
            row["skipped"] += 1
            row["why skipped"] = skipped.get("message", "")
        elif case.find("failure") is not None or case.find("error") is not None:
            row["failed"] += 1
        else:
            row["passed"] += 1
    return list(found.values())


_TESTS = ("pytest", "pytest_timeout", "hypothesis", "triton", "lightning", "torchmetrics")
_TRAINING = ("lightning", "torchmetrics", "transformers")
_BOTH = ("cuda", "cpu")

CHECKS = (
    Check("training", "Training on one device", 1.5, _training, _TRAINING, _BOTH),
    Check("synchronisations", "Synchronisations of a step", 0.5, _synchronisations, _TRAINING),
    Check("kernels", "Kernels: causal, head dim 128", 0.5, _kernels, devices=_BOTH),
    Check(
        *("replay-dense", "Replay: one causal document around a zigzag ring of 8, 32:8 heads"),
        *(0.7, _replay_dense, (), _BOTH),
    ),
    Check(
        *("replay-packed", "Replay: packed documents, 64:8 heads, 8192 tokens a rank"),
        *(1.5, _replay_packed, (), _BOTH),
    ),
    Check(
        *("tests-matrix", "Tests: every kernel in every cell"),
        *(3.0, tests_in("test_gpu_matrix.py"), _TESTS),
    ),
    Check(
        *("tests-gpu", "Tests: PyTorch's and flash-attn's kernels"),
        *(3.0, tests_in("test_on_gpu.py"), _TESTS),
    ),
    Check(
        *("tests-triton", "Tests: Triton's kernels"), *(4.0, tests_in("test_triton*.py"), _TESTS)
    ),
)
"""The sections in running order: short ones first, so that an interrupted run has the most."""
