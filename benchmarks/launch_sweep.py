"""Block sizes of the Triton kernels by time, on the GPU at hand: what a GPU check writes into the table."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import cast

import torch

from lightning_cp.bench.kernels import kernel_passes
from lightning_cp.bench.methods import AttentionCase, Step
from lightning_cp.bench.timers import measure
from lightning_cp.kernels.reference import ReferenceKernel
from lightning_cp.kernels.triton.blocks import (
    TABLE,
    BlockConfig,
    BlockConfigs,
    Blocks,
    Key,
    configs_for,
    load,
    target_of,
)
from lightning_cp.kernels.triton.launch import TritonFA2

CANDIDATES = [
    BlockConfig(own, step, warps, stages)
    for stages in (2, 3, 1)
    for warps in (8, 4)
    for own, step in ((128, 64), (64, 64), (128, 128), (128, 32), (64, 128), (64, 32), (32, 32))
]
"""The likeliest first: a sweep may end before all are timed."""
HEAD_DIMS = (64, 128, 256)
LARGEST_ERROR = 0.03
"""Relative error of results in half precision beyond which a kernel is wrong, and not rounded."""
Measure = Callable[[AttentionCase, BlockConfigs, str], float | None]
"""Seconds of one kernel (``forward``, ``queries`` or ``keys``) with blocks; ``None`` if it does not run."""


def write_table(
    case: AttentionCase,
    file: Path = TABLE,
    head_dims: Sequence[int] = HEAD_DIMS,
    measure_one: Measure | None = None,
    target: int | None = None,
) -> Blocks:
    """Measure head dims on this machine's GPU and write the fastest block sizes into a table.

    Args:
        case: one sequence, whose head dim is replaced; a long one, since its programs are many.
        file: the table, whose other entries stay; a new one begins with those of the package.
        head_dims: those that are measured.
        measure_one: ``None``: :func:`seconds_of`.
        target: of the entries; ``None``: this machine's GPU.
    """
    if target is None:
        target = target_of(torch.cuda.get_device_capability())
    found = swept(case, head_dims, target, measure_one or seconds_of)
    table = load(file if file.exists() else TABLE) | found
    save(table, file)
    return table


@dataclass(frozen=True)
class LaunchRow:
    """The block sizes of one kernel before and after a sweep, and their milliseconds."""

    kernel: str
    head_dim: int
    before: BlockConfig
    before_ms: float | None
    best: BlockConfig
    best_ms: float
    timed: int
    """Candidates that ran."""
    impossible: int
    """Candidates that need more memory than the GPU has."""
    left: int
    """Candidates for which there was no time."""

    @property
    def failed(self) -> bool:
        """True where the table's own block sizes do not run on this GPU."""
        return self.before_ms is None


LAUNCH_HEAD = (
    *("kernel", "head dim", "before", "ms", "fastest", "ms", "gain"),
    *("timed", "do not run", "no time for"),
)


def launch_cells(row: LaunchRow) -> list[object]:
    """Return a line's cells; blocks as own x step, warps, stages."""
    before, best = ("{} x {}, {}w, {}st".format(*blocks) for blocks in (row.before, row.best))
    ms = "does not run" if row.before_ms is None else f"{row.before_ms:.3f}"
    gain = "" if row.before_ms is None else f"{row.before_ms / row.best_ms:.3f}"
    counts = (row.timed, row.impossible, row.left)
    return [row.kernel, row.head_dim, before, ms, best, f"{row.best_ms:.3f}", gain, *counts]


class TimedSweep:
    """A measurement that notes times, and ends: a kernel's first candidate always runs, others in time.

    Args:
        measure_one: the measurement.
        seconds: the time for one kernel; ``None``: no limit.
    """

    def __init__(self, measure_one: Measure, seconds: float | None = None) -> None:
        self._measure, self._seconds = measure_one, seconds
        self._began: dict[tuple[int, str], float] = {}
        self._times: dict[tuple[int, str], dict[BlockConfig, float | None]] = {}
        self._left: dict[tuple[int, str], int] = {}

    def __call__(self, case: AttentionCase, configs: BlockConfigs, kernel: str) -> float | None:
        """Return the seconds of one candidate; ``None`` if it does not run, or there is no time."""
        key = case.head_dim, kernel
        began = self._began.setdefault(key, time.monotonic())
        times = self._times.setdefault(key, {})
        late = self._seconds is not None and time.monotonic() - began > self._seconds
        if late and any(each is not None for each in times.values()):
            self._left[key] = self._left.get(key, 0) + 1
            return None
        found = self._measure(case, configs, kernel)
        times[getattr(configs, kernel)] = found
        return found

    def rows(self) -> list[LaunchRow]:
        """Return a row for each head dim and kernel."""
        found: list[LaunchRow] = []
        for (head_dim, kernel), times in self._times.items():
            ran = {config: 1e3 * took for config, took in times.items() if took is not None}
            before, best = next(iter(times)), min(ran, key=lambda config: ran[config])
            counts = (len(ran), len(times) - len(ran), self._left.get((head_dim, kernel), 0))
            of_best = (best, ran[best])
            found.append(LaunchRow(kernel, head_dim, before, ran.get(before), *of_best, *counts))
        return found


def swept(case: AttentionCase, head_dims: Sequence[int], target: int, seconds: Measure) -> Blocks:
    """Return the fastest block sizes of each head dim; kernels one after the other, from the table's."""
    kind = "single" if case.dtype == torch.float32 else "half"
    found: Blocks = {}
    for head_dim in head_dims:
        of_dim = AttentionCase(**{**vars(case), "head_dim": head_dim})
        configs = configs_for(case.dtype, head_dim, target)
        for kernel in BlockConfigs._fields:
            before = getattr(configs, kernel)
            candidates = [before, *(one for one in CANDIDATES if one != before)]
            if kernel == "keys" and target == 100 and head_dim > 128:
                candidates += [one._replace(launches=2) for one in CANDIDATES]
            best = fastest(
                candidates,
                lambda one, kernel=kernel, configs=configs, case=of_dim: seconds(
                    case, configs._replace(**{kernel: one}), kernel
                ),
            )
            configs = configs._replace(**{kernel: best})
        found[Key(target, kind, head_dim)] = configs
    return found


def seconds_of(case: AttentionCase, configs: BlockConfigs, kernel: str) -> float | None:
    """Time the pass of a kernel: forward, or backward, in which the other kernel's blocks stay the same.

    Return ``None``, too, with a warning, if its results are not those of the reference kernel.
    """
    try:
        passes = kernel_passes(TritonFA2(configs), case)
        step = passes.forward if kernel == "forward" else passes.backward
        if (error := relative_error(_results(step), _expected(case, kernel))) > LARGEST_ERROR:
            blocks = getattr(configs, kernel)
            warnings.warn(
                f"{kernel} with {blocks} is wrong on this GPU: relative error {error:.2g}. It is left out.",
                stacklevel=2,
            )
            return None
        return min(measure(step, repeats=5, device_type=case.device_type).wall)
    except Exception as error:  # Triton's own type, for too much shared or tensor memory
        if "OutOfResources" in type(error).__name__ or isinstance(error, RuntimeError):
            return None
        raise


@lru_cache(maxsize=1)
def _expected(case: AttentionCase, kernel: str) -> tuple[torch.Tensor, ...]:
    """Return the results of the reference kernel for the same inputs and gradients of ``out``."""
    passes = kernel_passes(ReferenceKernel(1024, 1024), case)
    return _results(passes.forward if kernel == "forward" else passes.backward)


def _results(step: Step) -> tuple[torch.Tensor, ...]:
    return cast("tuple[torch.Tensor, ...]", step())


def relative_error(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Return the largest ``|x - y| / |y|`` of the pairs, by Euclidean norms; infinite for NaN."""
    errors = [
        ((x.double() - y.double()).norm() / y.double().norm()).nan_to_num(torch.inf).item()
        for x, y in zip(found, expected, strict=True)
    ]
    return max(errors)


def save(table: Blocks, file: Path) -> None:
    """Write a table, one kernel per line."""
    nested: dict[str, dict[str, dict[str, dict[str, list[int]]]]] = {}
    for key, configs in sorted(table.items()):
        by_dim = nested.setdefault(str(key.target), {}).setdefault(key.dtype, {})
        by_dim[str(key.head_dim)] = {
            name: list(x) if x.launches > 1 else list(x[:-1])
            for name, x in configs._asdict().items()
        }
    text = json.dumps(nested, indent=1)
    for name in BlockConfigs._fields:  # numbers of one kernel on one line
        head, *rest = text.split(f'"{name}": [')
        text = head + "".join(
            f'"{name}": [' + ", ".join(sizes.split()).replace(",,", ",") + "]" + after
            for sizes, after in (part.split("]", 1) for part in rest)
        )
    file.write_text(text + "\n")
    load.cache_clear()


def fastest(
    configs: Iterable[BlockConfig], seconds: Callable[[BlockConfig], float | None]
) -> BlockConfig:
    """Return the block sizes with the least time.

    Args:
        configs: candidates; the first wins a tie.
        seconds: measures one; ``None`` if it cannot run here (too much shared memory).

    Raises:
        ValueError: none of them runs.
    """
    timed = [(time, config) for config in configs if (time := seconds(config)) is not None]
    if not timed:
        raise ValueError("no candidate runs on this device")
    return min(timed, key=lambda pair: pair[0])[1]
