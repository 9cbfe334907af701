"""N ranks against one over 20 steps, in every way to train; saves in the background, resumed elsewhere.

In float64 with the reference kernel, so that losses and weights are those of one process to the last digits;
in narrower numbers with the kernels of long runs.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision as FabricPrecision
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader

from benchmarks.gpus.cells import (
    LIMITS,
    Cell,
    Module,
    Numbers,
    cells,
    one_process,
    samples,
    weights,
)
from benchmarks.gpus.line import Line, Place, WrongResultError, check_error
from lightning_cp.fabric import UlyssesRingStrategy as FabricStrategy
from lightning_cp.strategies.trainer import UlyssesRingStrategy
from lightning_cp.utils.console import quiet_lightning
from tests.helpers.pool.environment import PoolEnvironment

STEPS, SAVED_AFTER = 20, 8


def on_ranks(
    cell: Cell,
    place: Place,
    steps: int = STEPS,
    callbacks: tuple[pl.Callback, ...] = (),
    resume: Path | None = None,
) -> Numbers:
    """Train on all ranks with the Trainer."""
    module, strategy = Module(cell), UlyssesRingStrategy(**cell.settings)
    trainer = pl.Trainer(
        accelerator=place.accelerator,
        devices=place.count,
        strategy=strategy,
        **_precision(cell, place, MixedPrecision),
        max_epochs=1,
        callbacks=list(callbacks),
        gradient_clip_val=1.0,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with _quiet():
        trainer.fit(module, _loader(cell, steps), ckpt_path=resume)
    losses = [float(loss) for loss in module.losses]
    return Numbers(losses, weights(module), _kernels(strategy))


def on_ranks_by_fabric(cell: Cell, place: Place, steps: int = STEPS) -> Numbers:
    """Train on all ranks with Fabric."""
    module, strategy = Module(cell), FabricStrategy(**cell.settings)
    rows, losses = _loader(cell, steps), list[float]()
    torch.set_default_dtype(
        cell.dtype
    )  # of what Fabric's models return; the line's end sets it back
    fabric = Fabric(
        accelerator=place.accelerator,
        devices=place.count,
        strategy=strategy,
        **_precision(cell, place, FabricPrecision),
    )
    fabric.launch()
    plain = module.model
    setup: Any = fabric.setup(plain, module.configure_optimizers())
    module.model, optimizer = setup
    with _quiet():
        for batch in fabric.setup_dataloaders(rows, use_distributed_sampler=False):
            loss = module.loss(strategy.shard_batch(batch))
            fabric.backward(loss)
            losses.append(float(strategy.average(loss).detach()))
            fabric.clip_gradients(module.model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    module.model = plain
    return Numbers(losses, weights(module), _kernels(strategy))


def _precision(cell: Cell, place: Place, mixed: Any) -> dict[str, Any]:
    """The arguments of a Trainer or of Fabric; a CPU gets its ``GradScaler`` by the plugin alone."""
    if not cell.is_scaled:
        return {"precision": cell.precision, "plugins": [PoolEnvironment()]}
    plugin = mixed(cell.precision, place.device_type, cell.scaler(place.device_type))
    return {"plugins": [PoolEnvironment(), plugin]}


def _loader(cell: Cell, steps: int) -> Any:
    """This rank's samples."""
    first = torch.distributed.get_rank() // (cell.cp * cell.tp)
    return DataLoader(samples(cell, steps)[first :: cell.data], batch_size=1)  # type: ignore[arg-type]


@contextmanager
def _quiet() -> Iterator[None]:
    with quiet_lightning(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _kernels(strategy: Any) -> str:
    """Names of the kernels that computed attention."""
    chosen = (line for line in strategy.explain().splitlines() if not line.startswith(" "))
    return ", ".join(sorted({line.rpartition(": ")[2] for line in chosen}))


def training_line(cell: Cell, place: Place) -> str:
    """Compare losses and final weights of all ranks with one process."""
    steps = STEPS
    if place.rehearses:
        steps, cell = 8, replace(cell, head_dim=16)  # CPUs are slow in float16
    want = one_process(cell, steps, place.device_type)
    train = on_ranks if cell.driver == "trainer" else on_ranks_by_fabric
    got = train(cell, place, steps)
    own = torch.distributed.get_rank() // (cell.cp * cell.tp)
    losses = want.losses[own :: cell.data]
    if max(losses) - min(losses) < 0.01:
        raise WrongResultError("steps with one loss show nothing")
    limit = LIMITS[cell.precision]
    of_losses = _largest(got.losses, losses)
    check_error("a loss", of_losses, limit)
    of_weights = max(
        float((got.weights[name] - x).abs().max() / x.abs().max())
        for name, x in want.weights.items()
    )
    if cell.is_exact:
        check_error("a weight", of_weights, limit)
    elif "reference" in got.kernels:
        raise WrongResultError(f"attention was computed by {got.kernels}")
    return (
        f"{len(losses)} steps, loss {losses[0]:.4f} to {losses[-1]:.4f}, "
        f"off by {of_losses:.1e}, weights by {of_weights:.1e}, {got.kernels}"
    )


def _largest(got: list[float], want: list[float]) -> float:
    """Return the largest relative difference; NaN if one is, infinite for another number of steps."""
    if len(got) != len(want):
        return float("inf")
    a, b = (torch.tensor(each, dtype=torch.float64) for each in (got, want))
    return float(((a - b).abs() / b.abs()).max())


class _Save(pl.Callback):
    """Save once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object, **__: object) -> None:
        if trainer.global_step == SAVED_AFTER:
            trainer.save_checkpoint(self.path)


def save_line(before: Cell, after: Cell, place: Place) -> str:
    """Save in the background while training goes on; resume on another mesh, and compare the other steps."""
    steps = STEPS if not place.rehearses else SAVED_AFTER + 3
    path = place.folder / f"saved-{'sharded' if before.more else 'full'}.ckpt"
    if torch.distributed.get_rank() == 0:
        _remove(path)
    torch.distributed.barrier()
    saving = replace(before, more=(*before.more, ("async_save", True)))
    want = on_ranks(saving, place, steps, (_Save(path),))
    torch.distributed.barrier()
    if not path.exists():
        raise FileNotFoundError(f"the save left no {path.name}")
    got = on_ranks(after, place, steps, resume=path)
    rest = want.losses[SAVED_AFTER:]
    error = _largest(got.losses, rest)
    check_error("a loss after the resume", error, LIMITS[before.precision])
    of_weights = max(float((got.weights[n] - x).abs().max()) for n, x in want.weights.items())
    check_error("a weight after the resume", of_weights, LIMITS[before.precision])
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        _remove(path)
    return f"{len(rest)} steps after the resume, off by {error:.1e}"


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def saves(count: int) -> list[tuple[Cell, Cell]]:
    """Meshes before and after a checkpoint."""
    adam = Cell(count, optimizer="adamw")
    sharded = (("checkpoint", "sharded"),)
    found = [(adam, replace(adam, engine="zero1", mode="ulysses"))]
    fsdp = replace(adam, engine="fsdp")
    if count % 2 == 0:
        found.append((fsdp, replace(fsdp, tp=2)))
        found.append((replace(fsdp, more=sharded), replace(fsdp, tp=2, more=sharded)))
    return found


SHORT = ("ddp ring", "fsdp ulysses")


def lines(count: int) -> list[Line]:
    """Every cell, and every pair of meshes."""
    found = [
        Line(f"train, {cell}", partial(training_line, cell), is_short=_is_short(cell))
        for cell in cells(count)
    ]
    return found + [
        Line(
            f"async save and reshard, {_mesh(before)} to {_mesh(after)}",
            partial(save_line, before, after),
            is_short=index == 1,
        )
        for index, (before, after) in enumerate(saves(count))
    ]


def _is_short(cell: Cell) -> bool:
    plain = replace(Cell(cell.count), engine=cell.engine, mode=cell.mode)
    return cell == plain and f"{cell.engine} {cell.mode}" in SHORT


def _mesh(cell: Cell) -> str:
    form = ", sharded" if cell.more else ""
    return f"{cell.engine} {cell.mode} cp {cell.cp} tp {cell.tp}{form}"
