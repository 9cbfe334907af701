"""Training on one GPU: every engine against plain Lightning, saved and resumed; and synchronisations.

The world is one rank with NCCL (gloo on CPU), so nothing travels between devices. It shows that the CUDA path
works: the mesh, the engines, precisions, checkpoints, and the kernels inside a real step.
"""

from __future__ import annotations

import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import Strategy
from torch.utils.data import DataLoader

from benchmarks.step_overhead import Batch, Job
from lightning_cp.strategies.trainer import UlyssesRingStrategy
from lightning_cp.utils.console import quiet_lightning

ENGINES = ("ddp", "fsdp", "zero1")
"""The engines that run on one rank; hsdp needs two."""
STEPS, SAVED_AFTER = 6, 3
LIMITS = {"32-true": 1e-5, "bf16-true": 2e-2, "bf16-mixed": 2e-2, "16-mixed": 5e-3}
"""Largest relative difference of a loss that rounding may make, by precision."""


@dataclass(frozen=True)
class TrainingRow:
    """One run beside plain Lightning's, and its second half from a checkpoint."""

    engine: str
    precision: str
    batch: str
    """``dense`` or ``packed``."""
    losses: tuple[float, ...]
    plain: tuple[float, ...]
    """Losses of ``strategy="auto"`` with the model's attention; for packed rows, of our reference kernel."""
    resumed: tuple[float, ...]
    """Losses from a checkpoint after half of the steps."""
    obstacle: str | None = None

    @property
    def deviation(self) -> float:
        """Largest relative difference to ``plain``."""
        return _largest_difference(self.losses, self.plain)

    @property
    def resumed_deviation(self) -> float:
        """Largest relative difference of the resumed steps."""
        return _largest_difference(self.losses[SAVED_AFTER:], self.resumed)

    @property
    def failed(self) -> bool:
        """True where the run broke, or differs by more than rounding."""
        if self.obstacle is not None:
            return True
        limit = LIMITS[self.precision]
        falls = self.losses[-1] < self.losses[0]
        close = all(each <= limit for each in (self.deviation, self.resumed_deviation))
        return not (falls and close)


def _largest_difference(ours: Sequence[float], other: Sequence[float]) -> float:
    pairs = zip(ours, other, strict=True)
    return max(abs(a - b) / abs(b) if a == a else float("inf") for a, b in pairs)


class _Module(pl.LightningModule):
    """A Llama that records its losses."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.network = job.network()
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """The model's own loss."""
        loss = self.network(**batch).loss
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def training_rows(job: Job, device_type: str) -> list[TrainingRow]:
    """Train with every engine, and with ddp in every precision and on packed rows."""
    half = "bf16-mixed"
    cells = [(engine, half, job) for engine in ENGINES]
    cells += [("fsdp", "bf16-true", job), ("ddp", "32-true", job), ("ddp", half, _packed(job))]
    if device_type == "cuda":  # on CPU Lightning turns it into bf16-mixed
        cells += [(engine, "16-mixed", job) for engine in ENGINES]
    return [_training_row(*cell, device_type) for cell in cells]


def _packed(job: Job) -> Job:
    return replace(job, packed=4)


def _training_row(engine: str, precision: str, job: Job, device_type: str) -> TrainingRow:
    """Run one cell; an error becomes part of the row."""
    row = TrainingRow(engine, precision, "packed" if job.packed else "dense", (), (), ())
    try:
        other = _strategy(engine, "reference") if job.packed else "auto"
        plain = _losses(job, other, precision, device_type)
        with tempfile.TemporaryDirectory() as folder:
            saved = Path(folder) / "half.ckpt"
            whole = _losses(job, _strategy(engine), precision, device_type, save=saved)
            resumed = _losses(job, _strategy(engine), precision, device_type, load=saved)
    except Exception:  # any: the other cells are wanted too
        return replace(row, obstacle=traceback.format_exc(limit=-4))
    return replace(row, losses=whole, plain=plain, resumed=resumed)


def _strategy(engine: str, kernel: str = "auto") -> UlyssesRingStrategy:
    return UlyssesRingStrategy(context_parallel_size=1, data_parallel=engine, kernel=kernel)


def _losses(
    job: Job,
    strategy: str | Strategy,
    precision: str,
    device_type: str,
    save: Path | None = None,
    load: Path | None = None,
) -> tuple[float, ...]:
    """Return the losses of a run's steps, the remaining ones if it starts from ``load``."""
    callbacks: list[pl.Callback] = [] if save is None else [_Save(save)]
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="gpu" if device_type == "cuda" else "cpu",
        devices=1,
        precision=precision,  # type: ignore[arg-type]
        max_epochs=1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(0)
    module = _Module(job)
    with warnings.catch_warnings(), quiet_lightning():
        warnings.simplefilter("ignore")
        trainer.fit(module, _loader(job), ckpt_path=load)
    return tuple(float(loss) for loss in module.losses)


class _Save(pl.Callback):
    """Save once, in the middle."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object, **__: object) -> None:
        if trainer.global_step == SAVED_AFTER:
            trainer.save_checkpoint(self.path)


def training_cells(row: TrainingRow) -> list[object]:
    """Return a line of the table."""
    start = [row.engine, row.precision, row.batch]
    if row.obstacle is not None:
        return [*start, "failed", "", "", row.obstacle.strip().splitlines()[-1][:160]]
    ends = f"{row.losses[0]:.4f} to {row.losses[-1]:.4f}"
    verdict = "differs" if row.failed else "agrees"
    return [*start, ends, f"{row.deviation:.1e}", f"{row.resumed_deviation:.1e}", verdict]


TRAINING_HEAD = (
    *("engine", "precision", "batch", "loss, first to last step"),
    *("off one process", "resumed off whole", "verdict"),
)


@dataclass(frozen=True)
class SynchronisationRow:
    """One place that makes the host wait for the device, in the steps after the first two."""

    engine: str
    place: str
    """The package's file and line, or the caller's where no file of the package is on the stack."""
    per_step: float


SYNCHRONISATION_HEAD = ("engine", "place", "per step")


def synchronisation_rows(job: Job) -> list[SynchronisationRow]:
    """Return the synchronisations of a step of every engine, by ``torch.cuda.set_sync_debug_mode``."""
    rows: list[SynchronisationRow] = []
    for engine in ENGINES:
        with _synchronisations() as places:
            steps = _count_steps(job, engine)
        rows += [
            SynchronisationRow(engine, place, count / steps)
            for place, count in places.most_common()
        ]
        rows.append(SynchronisationRow(engine, "all", sum(places.values()) / steps))
    return rows


WARM_UP = 2


class _DebugMode(pl.Callback):
    """Switch the debug mode on after the first steps, to exclude set-up and the parity check."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object, **__: object) -> None:
        if trainer.global_step == WARM_UP:
            torch.cuda.set_sync_debug_mode("warn")


def _count_steps(job: Job, engine: str) -> int:
    """Run an epoch; return the number of steps in debug mode."""
    trainer = pl.Trainer(
        strategy=_strategy(engine),
        accelerator="gpu",
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
        trainer.fit(_Module(job), _loader(job))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return STEPS - WARM_UP


def _loader(job: Job) -> DataLoader[Batch]:
    """Return a loader of the same row at every step, so that the loss must fall."""
    return DataLoader(job.rows(1) * STEPS, batch_size=1)  # type: ignore[arg-type]


@contextmanager
def _synchronisations() -> Iterator[Counter[str]]:
    """Count synchronisations by the package's innermost frame."""
    places: Counter[str] = Counter()

    def note(message: Warning | str, *_: object, **__: object) -> None:
        if "synchroniz" in str(message).lower():
            places[_place()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", ".*synchroniz.*")
        warnings.showwarning = note  # type: ignore[assignment]
        yield places


def _place() -> str:
    """Return the package's innermost frame outside this file, with the innermost frame of all."""
    frames = [frame for frame in traceback.extract_stack() if frame.filename != __file__]
    frames = [frame for frame in frames if Path(frame.filename).name != "warnings.py"]
    ours = [frame for frame in frames if "lightning_cp" in frame.filename]
    inner = frames[-1] if frames else None
    if not ours:
        return f"{_name(inner)} (no file of ours on the stack)" if inner else "another thread"
    return f"{_name(ours[-1])} by {_name(inner)}" if inner is not ours[-1] else _name(ours[-1])


def _name(frame: Any) -> str:
    path = Path(frame.filename)
    return f"{path.parent.name}/{path.name}:{frame.lineno} {frame.name}"
