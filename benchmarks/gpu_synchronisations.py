"""Places that make the host wait for one GPU in a training step, by ``torch.cuda.set_sync_debug_mode``.

The steps are those of ``gpu_training``: one rank with the code of several. On CPU nothing waits, so that a
rehearsal shows that the section runs.
"""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch

import lightning_cp
from benchmarks.gpu_one_rank import kernel_calls
from benchmarks.gpu_training import ENGINES, STEPS, Module, one_rank_strategy, one_row
from benchmarks.step_overhead import Job

WAITS_OF_STEP = {"consistency/step_vote.py": 1}
"""Waits of the package in a step without logging and clipping, by file: the vote before the optimizer."""
OURS, PYTORCH = Path(lightning_cp.__file__).parent, Path(torch.__file__).parent
WARM_UP = 2
"""Steps that are not counted: they set up and compile."""


@dataclass(frozen=True)
class SynchronisationRow:
    """Waits of the host in one step, on average of the steps after the first two."""

    engine: str
    place: str
    """A file and line; ``the package`` for all of its own, ``all`` for those of libraries, too."""
    per_step: float
    limit: float | None = None
    kernels: int | None = None
    """Forward passes of the package's kernels in the run, beside a limit."""

    @property
    def failed(self) -> bool:
        """True where the package waits more often than its limit, or computed no attention."""
        return self.limit is not None and (self.per_step > self.limit or not self.kernels)


SYNCHRONISATION_HEAD = ("engine", "place", "per step", "at most", "our kernels, passes")


def synchronisation_cells(row: SynchronisationRow) -> list[object]:
    """Return a line of the table."""
    limits = ["" if each is None else f"{each:g}" for each in (row.limit, row.kernels)]
    return [row.engine, row.place, f"{row.per_step:g}", *limits]


def synchronisation_rows(job: Job, device_type: str) -> list[SynchronisationRow]:
    """Return the synchronisations of a step of every engine: each place, the package's, and all."""
    rows: list[SynchronisationRow] = []
    for engine in ENGINES:
        with synchronisations() as places, kernel_calls() as calls:
            steps = _count_steps(job, engine, device_type)
        for place, count in places.most_common():
            rows.append(SynchronisationRow(engine, place.shown, count / steps))
        own = sum(count for place, count in places.items() if place.is_ours) / steps
        limit = sum(WAITS_OF_STEP.values())
        rows.append(SynchronisationRow(engine, "the package", own, limit, calls.total()))
        rows.append(SynchronisationRow(engine, "all", places.total() / steps))
    return rows


class _DebugMode(pl.Callback):
    """Switch the debug mode on after the first steps."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object, **__: object) -> None:
        if trainer.global_step == WARM_UP:
            _set_debug_mode("warn", trainer.strategy.root_device.type)


def _set_debug_mode(mode: str, device_type: str) -> None:
    if device_type == "cuda":
        torch.cuda.set_sync_debug_mode(mode)


def _count_steps(job: Job, engine: str, device_type: str) -> int:
    """Run an epoch; return the number of steps in debug mode."""
    trainer = pl.Trainer(
        strategy=one_rank_strategy(engine),
        accelerator="gpu" if device_type == "cuda" else "cpu",
        devices=1,
        precision="bf16-mixed",
        max_epochs=1,
        callbacks=[_DebugMode()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(Module(job), one_row(job))
    finally:
        _set_debug_mode("default", device_type)
    return STEPS - WARM_UP


class Place(NamedTuple):
    """The cause of a wait."""

    shown: str
    """The package's innermost frame, and the innermost of all."""
    is_ours: bool
    """The package made the call into PyTorch, and not a library or a module that it calls."""


@contextmanager
def synchronisations() -> Iterator[Counter[Place]]:
    """Count PyTorch's warnings of synchronisations within the block, by their place."""
    places: Counter[Place] = Counter()

    def note(message: Warning | str, *_: object, **__: object) -> None:
        if "synchroniz" in str(message).lower():
            places[_place()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", ".*synchroniz.*")
        warnings.showwarning = note  # type: ignore[assignment]
        yield places


def _place() -> Place:
    """Return the place of the warning that is being shown."""
    frames = [frame for frame in traceback.extract_stack() if frame.filename != __file__]
    frames = [frame for frame in frames if Path(frame.filename).name != "warnings.py"]
    callers = [frame for frame in frames if PYTORCH not in Path(frame.filename).parents]
    ours = [frame for frame in callers if OURS in Path(frame.filename).parents]
    if not frames:
        return Place("another thread", is_ours=False)
    inner = _name(frames[-1])
    if not ours:
        return Place(f"{inner} (no file of the package on the stack)", is_ours=False)
    shown = inner if ours[-1] is frames[-1] else f"{_name(ours[-1])} by {inner}"
    return Place(shown, ours[-1] is callers[-1])


def _name(frame: Any) -> str:
    path = Path(frame.filename)
    return f"{path.parent.name}/{path.name}:{frame.lineno} {frame.name}"
