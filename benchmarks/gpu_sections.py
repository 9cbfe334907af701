"""The sections of a GPU check: their measurements and tests, required packages, and durations."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import torch

from benchmarks import kernel_rates, launch_sweep, replay
from benchmarks.markdown import markdown_head
from benchmarks.step_overhead import Job
from lightning_cp.bench.kernels import KernelRow, request_of
from lightning_cp.bench.methods import AttentionCase
from lightning_cp.bench.model_step import ModelSizes
from lightning_cp.bench.processes import on_ranks
from lightning_cp.kernels.select import kernels
from lightning_cp.kernels.triton.blocks import target_of
from lightning_cp.utils import console as table

KERNELS = {
    "cuda": ("triton", "aten_cuda_flash", "aten_cuda_cudnn", "flash_attn_2", "flash_attn_3"),
    "cpu": ("reference", "aten_cpu_flash"),
}
FLASH = {"cuda": "aten_cuda_flash", "cpu": "aten_cpu_flash"}


class Result(NamedTuple):
    """Rows, their table, and the figure that the section is about."""

    rows: list[Any]
    table: str
    headline: str = ""


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
    model: ModelSizes
    """Of the step whose memory is measured."""
    model_tokens: int
    launch: AttentionCase
    launch_seconds: float | None
    """The time for the candidates of one kernel at one head dim; ``None``: all are timed."""
    long: Any = field(default=None)
    """Sizes of the long step; ``None``: Qwen3-8B at a million tokens."""


LAUNCH_SECONDS = 28.0
TINY_MODEL = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "tie_word_embeddings": False,
    "use_cache": False,
}


def sizes_of(device_type: str, *, full: bool = False) -> CheckSizes:
    """Full size on a GPU, small on CPU; ``full``: longer sequences, and every candidate of a sweep."""
    if device_type == "cuda":
        size = replay.ReplaySizes(8192, [8], [8, 16, 32, 64], repeats=10)
        job = Job(tokens=4096, hidden=1024, layers=4, heads=16, kv_heads=4)
        return CheckSizes(
            *("cuda", [8192, 16384, 32768, *([65536, 131072] if full else [])]),
            *(size, replay.KERNELS["cuda"], torch.bfloat16, job),
            *(ModelSizes(1024, 16, 4, 4096, 8, 32768), 16384),
            AttentionCase(8192, 1, 32, 8, 128, dtype=torch.bfloat16, device_type="cuda"),
            None if full else LAUNCH_SECONDS,
        )
    from benchmarks.long_step import LongSizes

    small = replay.ReplaySizes(
        *(32, [2], [2], 1), dense_tokens=64, dtype=torch.float32, device_type="cpu"
    )
    long = LongSizes(
        *(TINY_MODEL, 256, 2),
        chunk_tokens=32,
        kernel="aten_cpu_flash",
        dtype=torch.float32,
        device_type="cpu",
    )
    return CheckSizes(
        *("cpu", [64], small, replay.KERNELS["cpu"], torch.float32, Job(64, hidden=32)),
        *(ModelSizes(64, 4, 2, 192, 2, 64), 256),
        *(AttentionCase(32, 1, 2, 1, 32), 0.0, long),
    )


@dataclass(frozen=True)
class Check:
    """One section."""

    name: str
    title: str
    minutes: float
    """The estimated duration on one H200 with 16 cores; the most, where the section has a limit."""
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
    text = "\n".join([markdown_head(kernel_rates.HEAD), *map(table.markdown_row, lines)])
    return Result(rows, text, kernel_headline(rows))


def kernel_headline(rows: Sequence[KernelRow]) -> str:
    """Return the rates at the greatest length, and the kernels that are missing with the reason."""
    longest = max(row.tokens for row in rows)
    last = [row for row in rows if row.tokens == longest]
    rates = [f"{row.kernel} {row.both_tflops:.4g}" for row in last if row.both_tflops is not None]
    missing = [f"{row.kernel} ({row.obstacle})" for row in last if row.obstacle is not None]
    return f"TFLOP/s of both passes at {longest} tokens: {', '.join(rates)}{_missing(missing)}"


def _replay_dense(sizes: CheckSizes, folder: Path) -> Result:
    names, missing = _replayed(sizes, sizes.replay.dense(1))
    rows = [row for name in names for row in replay.all_dense(sizes.replay, name)]
    best = max(rows, key=lambda row: row.efficiency("both") if row.calls == "ours" else 0.0)
    found = f"efficiency {best.efficiency('both'):.3f} with {best.kernel} on {best.ranks} ranks"
    return _rows(replay.DENSE_HEAD, replay.dense_cells, rows, found + missing)


def _replay_packed(sizes: CheckSizes, folder: Path) -> Result:
    names, missing = _replayed(sizes, sizes.replay.packed(1))
    rows = [row for name in names for row in replay.all_packed(sizes.replay, name)]
    best = max(rows, key=lambda row: row.share("forward") if row.calls == "ours" else 0.0)
    shares = ", ".join(f"{best.share(each):.3f} {each}" for each in ("forward", "backward"))
    found = f"of the dense rate {shares} with {best.kernel} on {best.ranks} ranks"
    return _rows(replay.PACKED_HEAD, replay.packed_cells, rows, found + missing)


def _replayed(sizes: CheckSizes, case: AttentionCase) -> tuple[list[str], str]:
    """Return the kernels that can compute a case, and the end of a headline about the others."""
    missing = replay.refusals(sizes.replay_kernels, case)
    names = [name for name in sizes.replay_kernels if name not in missing]
    return names, _missing(f"{name} ({reason})" for name, reason in missing.items())


def _missing(kernels: Iterable[str]) -> str:
    """Return the end of a headline: the kernels that are missing."""
    listed = ", ".join(kernels)
    return f"; missing: {listed}" if listed else ""


def _training(sizes: CheckSizes, folder: Path) -> Result:
    from benchmarks import gpu_training

    rows = gpu_training.training_rows(sizes.job, sizes.device_type)
    head, cells = gpu_training.TRAINING_HEAD, gpu_training.training_cells
    return _rows(head, cells, rows, _training_headline(rows))


def _features(sizes: CheckSizes, folder: Path) -> Result:
    from benchmarks import gpu_training

    rows = gpu_training.feature_rows(sizes.job, sizes.device_type)
    head, cells = gpu_training.TRAINING_HEAD, gpu_training.training_cells
    return _rows(head, cells, rows, _training_headline(rows))


def _training_headline(rows: Sequence[Any]) -> str:
    """Return the headline of training runs."""
    used = sorted({row.kernels for row in rows if row.kernels})
    return f"{len(rows)} runs agree with plain Lightning; attention by {', '.join(used)}"


def _versions(sizes: CheckSizes, folder: Path) -> Result:
    """What is installed, and what each kernel says of this device."""
    packages = [(name, _installed(name), "") for name in PACKAGES]
    case = AttentionCase(64, 1, 4, 2, 64, dtype=sizes.dtype, device_type=sizes.device_type)
    able = [
        (f"kernel {name}", "no" if why else "yes", why or "")
        for name, kernel in kernels().items()
        for why in [kernel.capabilities.refusal(request_of(case))]
    ]
    rows = [*packages, *_libraries(sizes.device_type), *able]
    missing = [name for name, found, _ in packages if found == "not installed"]
    found = f"not installed: {', '.join(missing) or 'nothing'}"
    return _rows(("name", "version", "why not"), list, rows, found)


PACKAGES = (
    *("torch", "triton", "lightning", "transformers", "numpy"),
    *("flash-attn", "flash-attn-3", "ring-flash-attn"),
)


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _libraries(device_type: str) -> list[tuple[str, str, str]]:
    """Return what PyTorch says of the libraries that it was built with, and of the device."""
    if device_type != "cuda":
        return []
    from torch.cuda import nccl

    facts: dict[str, Callable[[], object]] = {
        "CUDA": lambda: torch.version.cuda,
        "cuDNN": torch.backends.cudnn.version,
        "NCCL": lambda: ".".join(map(str, nccl.version())),
        "compute capability": torch.cuda.get_device_capability,
        "GPUs": torch.cuda.device_count,
        "memory, GiB": lambda: round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1),
    }
    rows: list[tuple[str, str, str]] = []
    for name, ask in facts.items():
        try:
            rows.append((name, str(ask()), ""))
        except Exception as error:  # any: the other facts are wanted too
            rows.append((name, "unknown", f"{type(error).__name__}: {error}"))
    return rows


def _losses(sizes: CheckSizes, folder: Path) -> Result:
    from benchmarks import gpu_losses

    (rows,) = on_ranks(1, gpu_losses.loss_rows, sizes.device_type, device_type=sizes.device_type)
    return _rows(gpu_losses.LOSS_HEAD, gpu_losses.loss_cells, rows, f"{len(rows)} agree")


def _memory(sizes: CheckSizes, folder: Path) -> Result:
    from benchmarks import gpu_memory

    arguments = (sizes.model, sizes.model_tokens, sizes.device_type)
    (rows,) = on_ranks(1, gpu_memory.memory_rows, *arguments, device_type=sizes.device_type)
    ratios = [row.ratio for row in rows]
    found = f"predicted / measured from {min(ratios):.3f} to {max(ratios):.3f}"
    return _rows(gpu_memory.MEMORY_HEAD, gpu_memory.memory_cells, rows, found)


def _long(sizes: CheckSizes, folder: Path) -> Result:
    from benchmarks import long_step

    long = sizes.long
    if long is None:
        device = torch.cuda.get_device_name()
        long = long_step.LongSizes(machine=long_step.machine_of_device(device))
    rows = long_step.long_rows(long)
    found = "; ".join(
        f"{row.source} {row.seconds:.4g} s, {row.bytes / long_step.GIB:.4g} GiB" for row in rows[:3]
    )
    return _rows(long_step.LONG_HEAD, long_step.long_cells, rows, found)


LAUNCH_TABLE = "blocks.json"
"""The launch table that sweeps write, one head dim after the other; it replaces ``blocks.TABLE``."""


def _launch(head_dim: int, sizes: CheckSizes, folder: Path) -> Result:
    """Sweep one head dim, and write its block sizes into the table of the folder."""
    target = None
    if sizes.device_type == "cpu":  # in the interpreter, with Ampere's entries
        head_dim, target = sizes.launch.head_dim, target_of((8, 0))
    sweep = launch_sweep.TimedSweep(launch_sweep.seconds_of, sizes.launch_seconds)
    launch_sweep.write_table(sizes.launch, folder / LAUNCH_TABLE, (head_dim,), sweep, target)
    rows = sweep.rows()
    gains = [f"{row.kernel} {row.before_ms / row.best_ms:.2f}x" for row in rows if row.before_ms]
    found = f"{', '.join(gains)}; table in {folder / LAUNCH_TABLE}, for {launch_sweep.TABLE.name}"
    return _rows(launch_sweep.LAUNCH_HEAD, launch_sweep.launch_cells, rows, found)


def _synchronisations(sizes: CheckSizes, folder: Path) -> Result:
    from benchmarks import gpu_synchronisations as waits

    rows = waits.synchronisation_rows(sizes.job, sizes.device_type)
    counts = ", ".join(f"{row.engine} {row.per_step:g}" for row in rows if row.limit is not None)
    return _rows(
        *(waits.SYNCHRONISATION_HEAD, waits.synchronisation_cells, rows),
        f"waits of the package in a step: {counts}",
    )


def _rows(
    head: Iterable[str], cells: Callable[[Any], list[Any]], rows: list[Any], headline: str = ""
) -> Result:
    lines = (table.markdown_row(cells(row)) for row in rows)
    return Result(rows, "\n".join([markdown_head(head), *lines]), headline)


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
    text = "\n".join([markdown_head(COLUMNS), *(table.markdown_row(row.values()) for row in rows)])
    if done.returncode:
        raise RuntimeError(
            f"pytest ended with status {done.returncode}\n{text}\n{done.stdout[-8000:]}"
        )
    if empty := files_without_a_pass(rows):
        raise RuntimeError(f"every test was skipped in {', '.join(empty)}\n{text}")
    passed = sum(row["passed"] for row in rows)
    skipped = sum(row["skipped"] for row in rows)
    return Result(rows, text, f"{passed} cells passed, {skipped} skipped")


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
    Check("versions", "Versions, and the kernels that can run", 0.1, _versions, devices=_BOTH),
    Check("training", "Training on one device", 2.0, _training, _TRAINING, _BOTH),
    Check("losses", "Exchanges of losses in a world of one", 0.3, _losses, devices=_BOTH),
    Check(
        *("features", "Training: compile, deterministic, segments, offload"),
        *(1.9, _features, _TRAINING, _BOTH),
    ),
    Check(
        *("synchronisations", "Synchronisations of a step"),
        *(0.5, _synchronisations, _TRAINING, _BOTH),
    ),
    Check("memory", "Peak memory beside the planner's", 0.7, _memory, ("transformers",), _BOTH),
    Check("kernels", "Kernels: causal, head dim 128", 0.7, _kernels, devices=_BOTH),
    Check(
        *("replay-dense", "Replay: one causal document around a zigzag ring of 8, 32:8 heads"),
        *(1.0, _replay_dense, (), _BOTH),
    ),
    Check(
        *("replay-packed", "Replay: packed documents, 64:8 heads, 8192 tokens a rank"),
        *(1.7, _replay_packed, (), _BOTH),
    ),
    Check(
        *("long-step", "One rank of Qwen3-8B, 1M tokens on 8 ranks, scaled from two layers"),
        *(1.7, _long, ("transformers",), _BOTH),
    ),
    *(
        Check(
            *(f"launch-{head_dim}", f"Launch table: block sizes of head dim {head_dim}"),
            *(minutes, partial(_launch, head_dim), ("triton",), _BOTH),
        )
        for head_dim, minutes in ((64, 1.6), (128, 1.7), (256, 1.9))
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
