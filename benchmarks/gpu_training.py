"""Training on one GPU: every engine and feature against plain Lightning, saved and resumed.

The world is one rank with NCCL (gloo on CPU), so nothing travels between devices. The strategy runs the
code of several ranks (``gpu_one_rank``): the mesh, the engines, precisions, checkpoints, sharded batches,
weighted losses, and its attention with the kernel that ``auto`` chooses. Plain Lightning has the model's own
attention, and of packed rows each document as a padded row.
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
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import Strategy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from benchmarks.gpu_one_rank import ONE_RANK, kernel_calls
from benchmarks.step_overhead import Batch, Job
from lightning_cp.errors import ConfigError
from lightning_cp.strategies.trainer import UlyssesRingStrategy
from lightning_cp.utils.console import quiet_lightning
from lightning_cp.utils.labels import IGNORED_LABEL

Loader = DataLoader[Any]
ENGINES = ("ddp", "fsdp", "zero1")
"""The engines that run on one rank; hsdp needs two, and is refused."""
STEPS, SAVED_AFTER = 6, 3
PACKED = 4
"""Documents of a packed row."""
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
    calls: int = 1
    """Forward passes of attention for a layer in a step; 2 where backward recomputes it."""
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
        Feature("activation offload", {**_RECOMPUTED, "activation_offload": True}, calls=2),
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
    """Of the steps, and of a validation after them."""
    plain: tuple[float, ...]
    """Losses of ``strategy="auto"`` with the model's attention; of packed rows, with padded documents."""
    resumed: tuple[float, ...]
    """Losses from a checkpoint after half of the steps."""
    obstacle: str | None = None
    refusal: str = ""
    """The strategy's refusal, where there has to be one."""
    calls: float = 0.0
    """Forward passes of the package's kernels for a layer in a step."""
    wanted_calls: int = 1
    kernels: str = ""
    """Names of these kernels."""

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
        """True where the run broke, differs by more than rounding, or had another number of calls."""
        if self.obstacle is not None or self.refusal:
            return self.obstacle is not None
        limit = LIMITS[self.precision]
        falls = self.losses[-1] < self.losses[0]
        close = all(each <= limit for each in (self.deviation, self.resumed_deviation))
        return not (falls and close and self.calls == self.wanted_calls)


def _largest_difference(ours: Sequence[float], other: Sequence[float]) -> float:
    pairs = zip(ours, other, strict=True)
    return max(abs(a - b) / abs(b) if a == a else float("inf") for a, b in pairs)


class Module(pl.LightningModule):
    """A Llama that records its losses, and validates with a metric."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.network = job.network()
        self.losses: list[torch.Tensor] = []
        self.mean = MeanMetric()

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """The model's own loss."""
        loss = self.network(**batch).loss
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """The mean loss, by torchmetrics."""
        self.mean.update(self.network(**batch).loss)
        self.log("validated", self.mean)

    def configure_optimizers(self) -> Any:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def training_rows(job: Job, device_type: str) -> list[TrainingRow]:
    """Train with every engine, and with ddp in every precision and on packed rows.

    Packed rows run in float32, too: mistaken documents change a loss by less than bfloat16 rounds.
    """
    half, packed = "bf16-mixed", replace(job, packed=PACKED)
    cells = [(engine, half, job) for engine in ENGINES]
    cells += [("fsdp", "bf16-true", job), ("ddp", "32-true", job)]
    cells += [("ddp", precision, packed) for precision in (half, "32-true")]
    if device_type == "cuda":  # on CPU Lightning turns it into bf16-mixed
        cells += [(engine, "16-mixed", job) for engine in ENGINES]
    rows = [_training_row(*cell, device_type) for cell in cells]
    return [*rows, refused_row(job, device_type)]


def _training_row(
    engine: str, precision: str, job: Job, device_type: str, feature: Feature = NO_FEATURE
) -> TrainingRow:
    """Run one cell; an error becomes part of the row."""
    batch = ", ".join(filter(None, ("packed" if job.packed else "dense", feature.name)))
    row = TrainingRow(engine, precision, batch, (), (), (), wanted_calls=feature.calls)
    try:
        plain = _run(_plain_rows(job), job, "auto", precision, device_type).losses
        with tempfile.TemporaryDirectory() as folder:
            saved = Path(folder) / "half.ckpt"
            run = partial(
                *(_run, one_row(job), job),
                precision=precision,
                device_type=device_type,
                feature=feature,
            )
            whole = run(strategy=one_rank_strategy(engine, feature.settings), save=saved)
            resumed = run(strategy=one_rank_strategy(engine, feature.settings), load=saved)
            again = whole
            if feature.deterministic:
                again = run(strategy=one_rank_strategy(engine, feature.settings))
    except Exception:  # any: the other cells are wanted too
        return replace(row, obstacle=traceback.format_exc(limit=-4))
    finally:
        torch.use_deterministic_algorithms(mode=False)  # the Trainer leaves it on
    if again.losses != whole.losses:
        said = f"two deterministic runs differ: {whole.losses} and {again.losses}"
        return replace(row, obstacle=said)
    return replace(
        row,
        losses=whole.losses,
        plain=plain,
        resumed=resumed.losses,
        calls=whole.calls.total() / (job.layers * STEPS),
        kernels=", ".join(whole.calls),
    )


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
        _run(one_row(job), job, one_rank_strategy("hsdp"), "bf16-mixed", device_type)
    except ConfigError as error:
        said = f"{error}".partition("\n")[0]
        wrong = None if "hsdp" in said else f"another refusal: {said}"
        return TrainingRow("hsdp", "bf16-mixed", "dense", (), (), (), wrong, refusal=said)
    return TrainingRow("hsdp", "bf16-mixed", "dense", (), (), (), "hsdp ran on one rank")


def one_rank_strategy(
    engine: str, settings: Mapping[str, Any] = MappingProxyType({})
) -> UlyssesRingStrategy:
    """Return the strategy of one rank that runs the code of several."""
    return UlyssesRingStrategy(
        context_parallel_size=1, data_parallel=engine, **ONE_RANK, **settings
    )


class _Run(NamedTuple):
    losses: tuple[float, ...]
    """Of the steps, and of a validation after them."""
    calls: Counter[str]
    """Of the package's kernels."""


def _run(
    rows: Loader,
    job: Job,
    strategy: str | Strategy,
    precision: str,
    device_type: str,
    save: Path | None = None,
    load: Path | None = None,
    feature: Feature = NO_FEATURE,
) -> _Run:
    """Train on all rows, or on the remaining ones if the run starts from ``load``."""
    callbacks: list[pl.Callback] = [] if save is None else [_Save(save)]
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="gpu" if device_type == "cuda" else "cpu",
        devices=1,
        precision=precision,  # type: ignore[arg-type]
        deterministic=feature.deterministic or None,
        max_epochs=1,
        limit_val_batches=1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(0)
    module = Module(job)
    if feature.compiled:
        for block in module.network.model.layers:
            block.compile(backend="inductor" if device_type == "cuda" else "eager")
    quiet = warnings.catch_warnings(action="ignore")
    with quiet, quiet_lightning(), feature.around(device_type):
        with kernel_calls() as calls:
            trainer.fit(module, rows, ckpt_path=load)
        trainer.validate(module, rows)
    losses = [*module.losses, trainer.callback_metrics["validated"]]
    return _Run(tuple(map(float, losses)), calls)


def one_row(job: Job) -> Loader:
    """Return a loader of the same row at every step, so that the loss must fall."""
    return DataLoader(job.rows(1) * STEPS, batch_size=1)  # type: ignore[arg-type]


def _plain_rows(job: Job) -> Loader:
    """Return the same batches for a model without the package: packed documents as padded rows."""
    if not job.packed:
        return one_row(job)
    return DataLoader([padded_documents(job)] * STEPS, batch_size=None)  # type: ignore[arg-type]


def padded_documents(job: Job) -> Batch:
    """Return the documents of the job's first row as rows, padded on the right to the longest."""
    (row,) = job.rows(1)
    starts = (row["position_ids"] == 0).nonzero().flatten().tolist()
    lengths = [end - start for start, end in pairwise([*starts, job.tokens])]
    padded = {
        name: pad_sequence(list(row[name].split(lengths)), batch_first=True, padding_value=filler)
        for name, filler in (("input_ids", 0), ("labels", IGNORED_LABEL))
    }
    columns = torch.arange(max(lengths))[None]
    return {**padded, "attention_mask": (columns < torch.tensor(lengths)[:, None]).long()}


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
        return [*start, "failed", *[""] * 3, row.obstacle.strip().splitlines()[-1][:160]]
    if row.refusal:
        return [*start, "refused by name, as it has to be", *[""] * 3, "agrees"]
    ends = f"{row.losses[0]:.4f} to {row.losses[-1]:.4f}"
    verdict = "differs" if row.failed else "agrees"
    calls = f"{row.calls:g} of {row.wanted_calls}, {row.kernels}"
    return [*start, ends, f"{row.deviation:.1e}", f"{row.resumed_deviation:.1e}", calls, verdict]


TRAINING_HEAD = (
    *("engine", "precision", "batch", "loss, first step to validation"),
    *("off plain Lightning", "resumed off whole", "our kernels, passes of a layer", "verdict"),
)
