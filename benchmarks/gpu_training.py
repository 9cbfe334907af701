"""Training on one GPU: every engine and feature against plain Lightning, saved and resumed; synchronisations.

The world is one rank with NCCL (gloo on CPU), so nothing travels between devices. It shows that the CUDA path
works: the mesh, the engines, precisions, checkpoints, and the kernels inside a real step.
"""

from __future__ import annotations

import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import Strategy
from torch.utils.data import DataLoader

from benchmarks.step_overhead import Batch, Job
from lightning_cp.errors import ConfigError
from lightning_cp.strategies.trainer import UlyssesRingStrategy
from lightning_cp.utils.console import quiet_lightning

ENGINES = ("ddp", "fsdp", "zero1")
"""The engines that run on one rank; hsdp needs two, and is refused."""
STEPS, SAVED_AFTER = 6, 3
LIMITS = {"32-true": 1e-5, "bf16-true": 2e-2, "bf16-mixed": 2e-2, "16-mixed": 5e-3}
"""Largest relative difference of a loss that rounding may make, by precision."""


@dataclass(frozen=True)
class Feature:
    """Something that a run has besides its engine and precision; plain Lightning's run has none of it."""

    name: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The strategy's."""
    deterministic: bool = False
    """Deterministic algorithms, with which a second run gives the same bits."""
    compiled: bool = False
    around: Callable[[str], AbstractContextManager[None]] = lambda device_type: nullcontext()
    """The state of the process in which it runs, by device type."""


@contextmanager
def _expandable_segments(device_type: str) -> Iterator[None]:
    """A block whose new CUDA memory is in segments that grow."""
    if device_type != "cuda":
        yield
        return
    known: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # from torch 2.12 on
    choose = known or torch.cuda.memory._set_allocator_settings
    choose("expandable_segments:True")
    try:
        yield
    finally:
        choose("expandable_segments:False")


_RECOMPUTED = {"activation_checkpointing": "blocks"}
NO_FEATURE = Feature()
FEATURES = {
    feature.name: feature
    for feature in (
        Feature("compile", compiled=True),
        Feature("deterministic", deterministic=True),
        Feature("expandable segments", around=_expandable_segments),
        Feature("recomputation", {"activation_checkpointing": "keep_attention"}),
        Feature("activation offload", {**_RECOMPUTED, "activation_offload": True}),
        Feature("parameter offload", {"cpu_offload": True}),
        Feature("chunked loss", {"chunked_loss": True}),
    )
}
OF_SHARDS = ("parameter offload",)
"""Features of engines that shard."""


@dataclass(frozen=True)
class TrainingRow:
    """One run beside plain Lightning's, and its second half from a checkpoint."""

    engine: str
    precision: str
    batch: str
    """``dense`` or ``packed``, and the feature."""
    losses: tuple[float, ...]
    plain: tuple[float, ...]
    """Losses of ``strategy="auto"`` with the model's attention; for packed rows, of our reference kernel."""
    resumed: tuple[float, ...]
    """Losses from a checkpoint after half of the steps."""
    obstacle: str | None = None
    refusal: str = ""
    """The strategy's refusal, where there has to be one."""

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
        if self.obstacle is not None or self.refusal:
            return self.obstacle is not None
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
    rows = [_training_row(*cell, device_type) for cell in cells]
    return [*rows, refused_row(job, device_type)]


def _packed(job: Job) -> Job:
    return replace(job, packed=4)


def _training_row(
    engine: str, precision: str, job: Job, device_type: str, feature: Feature = NO_FEATURE
) -> TrainingRow:
    """Run one cell; an error becomes part of the row."""
    batch = ", ".join(filter(None, ("packed" if job.packed else "dense", feature.name)))
    row = TrainingRow(engine, precision, batch, (), (), ())
    try:
        other = _strategy(engine, "reference") if job.packed else "auto"
        plain = _losses(job, other, precision, device_type)
        with tempfile.TemporaryDirectory() as folder:
            saved = Path(folder) / "half.ckpt"
            run = partial(
                _losses, job, precision=precision, device_type=device_type, feature=feature
            )
            whole = run(strategy=_strategy(engine, feature=feature), save=saved)
            resumed = run(strategy=_strategy(engine, feature=feature), load=saved)
            again = whole
            if feature.deterministic:
                again = run(strategy=_strategy(engine, feature=feature))
    except Exception:  # any: the other cells are wanted too
        return replace(row, obstacle=traceback.format_exc(limit=-4))
    finally:
        torch.use_deterministic_algorithms(mode=False)  # the Trainer leaves it on
    if again != whole:
        return replace(row, obstacle=f"two deterministic runs differ: {whole} and {again}")
    return replace(row, losses=whole, plain=plain, resumed=resumed)


def feature_rows(job: Job, device_type: str) -> list[TrainingRow]:
    """Train with every feature, on the engines that have it."""
    rows = [
        _training_row(engine, "bf16-mixed", job, device_type, feature)
        for feature in FEATURES.values()
        for engine in (("fsdp",) if feature.name in OF_SHARDS else ("ddp", "fsdp"))
    ]
    torch._dynamo.reset()
    return rows


def refused_row(job: Job, device_type: str) -> TrainingRow:
    """The row of ``hsdp``, which one rank cannot run: it is right if the strategy says so by name."""
    try:
        _losses(job, _strategy("hsdp"), "bf16-mixed", device_type)
    except ConfigError as error:
        said = f"{error}".partition("\n")[0]
        wrong = None if "hsdp" in said else f"another refusal: {said}"
        return TrainingRow("hsdp", "bf16-mixed", "dense", (), (), (), wrong, refusal=said)
    return TrainingRow("hsdp", "bf16-mixed", "dense", (), (), (), "hsdp ran on one rank")


def _strategy(
    engine: str, kernel: str = "auto", feature: Feature = NO_FEATURE
) -> UlyssesRingStrategy:
    return UlyssesRingStrategy(
        context_parallel_size=1, data_parallel=engine, kernel=kernel, **feature.settings
    )


def _losses(
    job: Job,
    strategy: str | Strategy,
    precision: str,
    device_type: str,
    save: Path | None = None,
    load: Path | None = None,
    feature: Feature = NO_FEATURE,
) -> tuple[float, ...]:
    """Return the losses of a run's steps, the remaining ones if it starts from ``load``."""
    callbacks: list[pl.Callback] = [] if save is None else [_Save(save)]
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="gpu" if device_type == "cuda" else "cpu",
        devices=1,
        precision=precision,  # type: ignore[arg-type]
        deterministic=feature.deterministic or None,
        max_epochs=1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(0)
    module = _Module(job)
    if feature.compiled:
        for block in module.network.model.layers:
            block.compile(backend="inductor" if device_type == "cuda" else "eager")
    with warnings.catch_warnings(), quiet_lightning(), feature.around(device_type):
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
    if row.refusal:
        return [*start, "refused by name, as it has to be", "", "", "agrees"]
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


def synchronisation_rows(job: Job, device_type: str) -> list[SynchronisationRow]:
    """Return the synchronisations of a step of every engine, by ``torch.cuda.set_sync_debug_mode``.

    On CPU there are none: it is a rehearsal.
    """
    rows: list[SynchronisationRow] = []
    for engine in ENGINES:
        with _synchronisations() as places:
            steps = _count_steps(job, engine, device_type)
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
            _set_debug_mode("warn", trainer.strategy.root_device.type)


def _set_debug_mode(mode: str, device_type: str) -> None:
    if device_type == "cuda":
        torch.cuda.set_sync_debug_mode(mode)


def _count_steps(job: Job, engine: str, device_type: str) -> int:
    """Run an epoch; return the number of steps in debug mode."""
    trainer = pl.Trainer(
        strategy=_strategy(engine),
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
        trainer.fit(_Module(job), _loader(job))
    finally:
        _set_debug_mode("default", device_type)
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
