"""Python calls of the package in one training step, and the files on the way to the kernel.

    python -m benchmarks.step_calls

A Llama of one layer trains with the Trainer on two ranks (ring). After eleven steps, everything from one read
of the dataset to the next one is traced on the first rank: calls of functions of ``lightning_cp``, the files
in which they are, how often a call goes from one of these files to another, and the files on the stack when
attention is computed. There is no callback: one with hooks would make ranks compare logged values after them.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from torch.utils.data import DataLoader

import lightning_cp
from benchmarks.step_overhead import Batch, Job, Module, _set_launch_variables
from lightning_cp.bench.processes import on_ranks
from lightning_cp.kernels.per_tile import PerTileKernel
from lightning_cp.strategies.trainer import UlyssesRingStrategy

_ROOT = str(Path(lightning_cp.__file__).parent)
_TRACED = 12
"""The step that is traced, counted from 1: the first eight also compare logged values with losses."""


@dataclass
class Trace:
    """Calls of one step."""

    calls: Counter[str] = field(default_factory=Counter)
    """Calls by file."""
    functions: Counter[str] = field(default_factory=Counter)
    """Calls by file and function; a resume of a generator counts as a call."""
    changes: int = 0
    """Calls of a function in another of these files than the last called one."""
    to_kernel: list[str] = field(default_factory=list)
    """Files on the stack when the forward kernel of attention is called, outermost first."""

    def __str__(self) -> str:
        return "\n".join(
            [
                f"calls: {sum(self.calls.values())}",
                f"files: {len(self.calls)}",
                f"changes of file: {self.changes}",
                f"files on the stack at the kernel: {len(self.to_kernel)}",
                *(f"  {name}" for name in self.to_kernel),
                "most calls:",
                *(f"  {count:5} {name}" for name, count in self.calls.most_common()),
                *(f"  {count:5} {name}" for name, count in self.functions.most_common(40)),
            ]
        )


class TracedRows:
    """Rows of a dataset, of which the reads begin and end the trace."""

    def __init__(self, rows: Sequence[Batch]) -> None:
        self.trace = Trace()
        self._rows = rows
        self._last = ""
        self._kernel = PerTileKernel.forward.__code__

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Batch:
        if index >= _TRACED - 1:
            sys.setprofile(self._note if index == _TRACED - 1 else None)
        return self._rows[index]

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(_ROOT):
            return
        name = _relative(frame)
        self.trace.calls[name] += 1
        self.trace.functions[f"{name} {frame.f_code.co_qualname}"] += 1
        self.trace.changes += name != self._last
        self._last = name
        if frame.f_code is self._kernel and not self.trace.to_kernel:
            self.trace.to_kernel = _files_of(frame)


def _relative(frame: FrameType) -> str:
    return str(Path(frame.f_code.co_filename).relative_to(_ROOT))


def _files_of(frame: FrameType | None) -> list[str]:
    found: list[str] = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(_ROOT):
            found.append(_relative(frame))
        frame = frame.f_back
    return list(dict.fromkeys(reversed(found)))


def trace_step(settings: dict[str, Any]) -> Trace:
    """Train on this rank and return its trace."""
    _set_launch_variables()
    job = Job(tokens=256, layers=1)
    rows = TracedRows(job.rows(_TRACED + 1))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=UlyssesRingStrategy(**settings),
        max_steps=_TRACED + 1,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader: Any = DataLoader(rows, batch_size=1)  # type: ignore[arg-type]
    try:
        trainer.fit(Module(job.network()), loader)
    finally:
        sys.setprofile(None)
    return rows.trace


def main() -> None:
    """Print the trace of the first rank."""
    settings = {"ring_size": 2, "ulysses_size": 1, "parity_check": "off"}
    print(on_ranks(2, trace_step, settings)[0])


if __name__ == "__main__":
    main()
