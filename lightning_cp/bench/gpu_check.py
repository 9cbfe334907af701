"""Everything that can only be tested or measured on an NVIDIA GPU, in one command.

    make gpu-check                                  # or: python -m lightning_cp.bench.gpu_check

Run from the repository: the full-size tests of the kernels, then rates of our Triton kernel beside cuDNN's
and PyTorch's FlashAttention, then the ranks of a ring replayed in turn (:mod:`lightning_cp.bench.replay`).
It writes ``report.md``, ``report.json`` and pytest's ``tests.xml`` into a folder, and needs no network. The
exit status is 0 if all tests have passed and everything was measured, 1 if not, and 2 without a GPU.

``--device cpu`` rehearses the measurements, in small, with the kernels that run there.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from lightning_cp.bench import kernel_rates, replay, table
from lightning_cp.bench.case import Case
from lightning_cp.bench.gpu_report import Section, facts_of, write_report
from lightning_cp.kernels.devices import has_nvidia_gpu

TESTS = ("test_on_gpu.py", "test_gpu_matrix.py", "test_triton*.py")
"""In ``tests/kernels``."""
KERNELS = {
    "cuda": ("triton", "aten_cuda_flash", "aten_cuda_cudnn"),
    "cpu": ("reference", "aten_cpu_flash"),
}
FLASH = {"cuda": "aten_cuda_flash", "cpu": "aten_cpu_flash"}
NO_GPU = 2
"""Exit status."""


@dataclass(frozen=True)
class Sizes:
    """What is measured on a device."""

    device_type: str
    kernel_tokens: Sequence[int]
    replay: replay.Size
    replay_kernels: Sequence[str]
    dtype: torch.dtype

    @classmethod
    def of(cls, device_type: str) -> Sizes:
        """Full size on a GPU, small on CPU."""
        if device_type == "cuda":
            size = replay.Size(8192, [8], [8, 16, 32, 64], repeats=10)
            return cls("cuda", [8192, 16384, 32768], size, replay.KERNELS["cuda"], torch.bfloat16)
        small = replay.Size(
            *(32, [2], [2], 1), dense_tokens=64, dtype=torch.float32, device_type="cpu"
        )
        return cls("cpu", [64], small, replay.KERNELS["cpu"], torch.float32)


def main(arguments: Sequence[str] | None = None) -> int:
    """Test, measure and report; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--folder", type=Path, default=Path("outputs") / "gpu-check")
    parser.add_argument("--no-tests", action="store_true", help="only measure")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not has_nvidia_gpu():
        print(_NO_GPU, file=sys.stderr)
        return NO_GPU
    given.folder.mkdir(parents=True, exist_ok=True)
    facts = facts_of(given.device)
    print("\n".join(f"{name}: {value}" for name, value in facts.items()), flush=True)
    sections: list[Section] = []
    if given.device == "cuda" and not given.no_tests:
        sections.append(Section.of("Tests", lambda: run_tests(given.folder / "tests.xml")))
    sections += measured(Sizes.of(given.device))
    write_report(given.folder, facts, sections)
    print(f"\nwritten to {given.folder}/report.md and report.json", flush=True)
    return int(any(section.failure is not None for section in sections))


def measured(sizes: Sizes) -> list[Section]:
    """The figures, a section each."""
    size = sizes.replay
    return [
        Section.of("Kernels: causal, head dim 128", lambda: _kernels(sizes)),
        Section.of(
            "Replay: one causal document around a zigzag ring, 32:8 heads",
            lambda: _rows(replay.DENSE_HEAD, replay.dense_cells, _each(replay.all_dense, sizes)),
        ),
        Section.of(
            f"Replay: packed documents, 64:8 heads, {size.tokens_per_rank} tokens a rank",
            lambda: _rows(replay.PACKED_HEAD, replay.packed_cells, _each(replay.all_packed, sizes)),
        ),
    ]


def _each(make: Callable[[replay.Size, str], list[Any]], sizes: Sizes) -> list[Any]:
    return [row for kernel in sizes.replay_kernels for row in make(sizes.replay, kernel)]


def _rows(
    head: Iterable[str], cells: Callable[[Any], list[object]], rows: list[Any]
) -> tuple[list[Any], str]:
    return rows, "\n".join([table.head(head), *(table.row(cells(row)) for row in rows)])


def _kernels(sizes: Sizes) -> tuple[list[Any], str]:
    case = Case(*(0, 1, 32, 8, 128), dtype=sizes.dtype, device_type=sizes.device_type)
    rows = [
        kernel_rates.kernel_row(name, replace(case, tokens=tokens), sizes.replay.repeats)
        for tokens in sizes.kernel_tokens
        for name in KERNELS[sizes.device_type]
    ]
    lines = kernel_rates.cells(rows, FLASH[sizes.device_type])
    return rows, "\n".join([table.head(kernel_rates.HEAD), *map(table.row, lines)])


def run_tests(results: Path, tests: Sequence[str] = TESTS) -> tuple[list[Any], str]:
    """Run the kernels' tests in a process of their own; how many of each file did what.

    Raises:
        RuntimeError: there are none here, some failed, or all of a file were skipped.
    """
    here = Path("tests") / "kernels"
    files = sorted(str(path) for pattern in tests for path in here.glob(pattern))
    if not files:
        raise RuntimeError(f"there is no {here}: run this from the repository, or with --no-tests")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "slow or not slow",
        f"--junitxml={results}",
    ]
    status = subprocess.run([*command, *files], check=False).returncode  # noqa: S603
    rows = outcomes(results)
    text = "\n".join([table.head(rows[0]), *(table.row(row.values()) for row in rows)])
    if status:
        raise RuntimeError(f"pytest ended with status {status}\n{text}")
    if untested := _untested(rows):
        raise RuntimeError(f"nothing was tested by {', '.join(untested)}\n{text}")
    return rows, text


def _untested(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Files of which every cell was skipped."""
    passed: dict[str, int] = {}
    for row in rows:
        name = row["test"].rpartition(".")[0]
        passed[name] = passed.get(name, 0) + row["passed"]
    return [name for name, count in passed.items() if not count]


def outcomes(results: Path) -> list[dict[str, Any]]:
    """Of each test function in pytest's XML: how many cells passed, failed, or were skipped, and why."""
    found: dict[str, dict[str, Any]] = {}
    for case in ElementTree.parse(results).iter("testcase"):  # noqa: S314 - pytest wrote it just now
        name = f"{case.get('classname', '')}.{case.get('name', '')}".split("[")[0]
        empty = {"test": name, "passed": 0, "failed": 0, "skipped": 0, "why skipped": ""}
        row = found.setdefault(name, empty)
        skipped = case.find("skipped")
        if skipped is not None:
            row["skipped"] += 1
            row["why skipped"] = skipped.get("message", "")
        elif case.find("failure") is not None or case.find("error") is not None:
            row["failed"] += 1
        else:
            row["passed"] += 1
    return list(found.values())


_NO_GPU = (
    "gpu-check needs an NVIDIA GPU that PyTorch can use, and there is none here (torch.cuda.is_available() "
    "is false, or this PyTorch is built for AMD's). Nothing was run. --device cpu rehearses the measurements."
)

if __name__ == "__main__":
    sys.exit(main())
