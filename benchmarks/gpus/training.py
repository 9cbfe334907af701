"""N ranks against one over 20 steps, with every engine and mode; saves in the background, resumed elsewhere.

In float64 with the reference kernel, so that losses and weights are those of one process to the last digits.
The one process is a plain loop of PyTorch, which each rank runs for itself.
"""

from __future__ import annotations

import shutil
import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from benchmarks.gpus.line import Line, Place, WrongResultError, check_error
from lightning_cp.optim import Muon
from lightning_cp.strategies.trainer import UlyssesRingStrategy
from lightning_cp.utils.console import quiet_lightning
from tests.helpers.pool.environment import PoolEnvironment
from tests.helpers.strategies.plain_llama import PlainLlama
from tests.helpers.strategies.runs import Run, make_data
from tests.helpers.strategies.small import VOCAB, whole

STEPS, SAVED_AFTER, LENGTH = 20, 8, 61
LIMITS = {torch.float64: 1e-8, torch.bfloat16: 5e-2}
"""Largest relative differences of losses, and of weights, by dtype."""
ENGINES = ("ddp", "fsdp", "hsdp", "zero1")


@dataclass(frozen=True)
class Cell:
    """One run."""

    count: int
    engine: str = "ddp"
    mode: str = "ring"
    data: int = 1
    tp: int = 1
    packed: bool = False
    optimizer: str = "sgd"
    dtype: torch.dtype = torch.float64
    more: tuple[tuple[str, Any], ...] = ()
    """Other settings of the strategy."""

    @property
    def cp(self) -> int:
        """Ranks that share a sample's tokens."""
        return self.count // (self.data * self.tp)

    @property
    def heads(self) -> tuple[int, int]:
        """Query and K/V heads: enough for Ulysses and tensor parallelism over all ranks."""
        return 2 * self.count, self.count

    @property
    def settings(self) -> dict[str, Any]:
        """The strategy's."""
        mode: dict[str, Any] = {"mode": self.mode}
        if self.mode == "hybrid":
            mode = {"ulysses_size": 2, "ring_size": self.cp // 2}
        if self.cp == 1:
            mode = {"context_parallel_size": 1}
        return {
            **mode,
            "labels": "aligned",
            "data_parallel": self.engine,
            "data_parallel_size": self.data,
            "data_parallel_replicate_size": self.data if self.engine == "hsdp" else 1,
            "tensor_parallel_size": self.tp,
            "kernel": "reference" if self.dtype == torch.float64 else "auto",
            "parity_check": "off",
            **dict(self.more),
        }

    def __str__(self) -> str:
        sizes = f"data {self.data} x cp {self.cp}" + (f" x tp {self.tp}" if self.tp > 1 else "")
        batch = "packed" if self.packed else "dense"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.engine} {self.mode}, {sizes}, {batch}, {self.optimizer}, {dtype}"


class Module(pl.LightningModule):
    """Two layers of a Llama; documents by a mask in one process, by the strategy where ranks share them."""

    def __init__(self, cell: Cell, *, is_alone: bool = False) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.cell, self.is_alone = cell, is_alone
        head_dim = 8 if cell.dtype == torch.float64 else 64
        self.model = PlainLlama(VOCAB, *cell.heads, head_dim=head_dim, layers=2).to(cell.dtype)
        self.losses: list[torch.Tensor] = []

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The mean over targets."""
        ids, segments = batch["input_ids"], batch.get("segment_ids")
        positions = batch.get("position_ids")
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
        mask = None
        if segments is not None and self.is_alone:
            mask = (segments[:, :, None] == segments[:, None, :]).tril()
        logits = self.model(ids, positions, mask)
        return F.cross_entropy(logits.flatten(0, 1).to(_wide(logits)), batch["labels"].flatten())

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].detach())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.cell.optimizer == "muon":
            ns_dtype = "float64" if self.cell.dtype == torch.float64 else "bfloat16"
            return Muon(self.named_parameters(), lr=2e-3, ns_dtype=ns_dtype)
        if self.cell.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=1e-3)
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


@dataclass(frozen=True)
class Numbers:
    """A run's losses, and its weights on the CPU."""

    losses: list[float]
    weights: dict[str, torch.Tensor]


def samples(cell: Cell, steps: int) -> list[dict[str, torch.Tensor]]:
    """Rows of all data ranks; packed ones have several documents."""
    data = make_data(Run(steps=steps * cell.data, rows=1, seq_len=LENGTH, packed=cell.packed))
    counted = [row for row in data if (row["labels"] >= 0).any()]
    return counted[: len(counted) // cell.data * cell.data]


def one_process(cell: Cell, steps: int, device_type: str) -> Numbers:
    """Train on one device: steps over the samples of all data ranks, one after the other.

    As in a process that has no others: Muon would share its work with the world.
    """
    module = Module(cell, is_alone=True).to(device_type)
    optimizer = module.configure_optimizers()
    losses: list[float] = []
    rows = samples(cell, steps)
    with mock.patch.object(torch.distributed, "is_initialized", return_value=False):
        for step in range(len(rows) // cell.data):
            optimizer.zero_grad()
            for row in rows[step * cell.data : (step + 1) * cell.data]:
                loss = module.loss({name: x[None].to(device_type) for name, x in row.items()})
                (loss / cell.data).backward()
                losses.append(float(loss.detach()))
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
    return Numbers(losses, _weights(module))


def _weights(module: pl.LightningModule) -> dict[str, torch.Tensor]:
    found = ((name, whole(x.detach())) for name, x in module.named_parameters())
    return {name: x.cpu().double() for name, x in found}


def on_ranks(
    cell: Cell,
    place: Place,
    steps: int = STEPS,
    callbacks: tuple[pl.Callback, ...] = (),
    resume: Path | None = None,
) -> Numbers:
    """Train on all ranks with the Trainer."""
    module = Module(cell)
    trainer = pl.Trainer(
        accelerator=place.accelerator,
        devices=place.count,
        strategy=UlyssesRingStrategy(**cell.settings),
        plugins=[PoolEnvironment()],
        precision="64-true" if cell.dtype == torch.float64 else "bf16-true",
        max_epochs=1,
        callbacks=list(callbacks),
        gradient_clip_val=1.0,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rank = torch.distributed.get_rank()
    rows = samples(cell, steps)[rank // (cell.cp * cell.tp) :: cell.data]
    with quiet_lightning(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(rows, batch_size=1), ckpt_path=resume)  # type: ignore[arg-type]
    return Numbers([float(loss) for loss in module.losses], _weights(module))


def training_line(cell: Cell, place: Place) -> str:
    """Compare losses and final weights of all ranks with one process."""
    steps = STEPS if not place.rehearses else 8
    want = one_process(cell, steps, place.device_type)
    got = on_ranks(cell, place, steps)
    own = torch.distributed.get_rank() // (cell.cp * cell.tp)
    losses = want.losses[own :: cell.data]
    if max(losses) - min(losses) < 0.01:
        raise WrongResultError("steps with one loss show nothing")
    limit = LIMITS[cell.dtype]
    of_losses = _largest(got.losses, losses)
    check_error("a loss", of_losses, limit)
    of_weights = max(
        float((got.weights[name] - x).abs().max() / x.abs().max())
        for name, x in want.weights.items()
    )
    if cell.dtype == torch.float64:
        check_error("a weight", of_weights, limit)
    return (
        f"{len(losses)} steps, loss {losses[0]:.4f} to {losses[-1]:.4f}, "
        f"off by {of_losses:.1e}, weights by {of_weights:.1e}"
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
    check_error("a loss after the resume", error, LIMITS[before.dtype])
    of_weights = max(float((got.weights[n] - x).abs().max()) for n, x in want.weights.items())
    check_error("a weight after the resume", of_weights, LIMITS[before.dtype])
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        _remove(path)
    return f"{len(rest)} steps after the resume, off by {error:.1e}"


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def cells(count: int) -> list[Cell]:
    """Every engine and mode; packed rows, Muon, tensor parallelism and bfloat16."""
    modes = [
        "ulysses",
        "ring",
        "zigzag_llama3",
        *(["hybrid"] if count >= 4 and count % 2 == 0 else []),
    ]
    found = [Cell(count, engine, mode) for engine in ("ddp", "fsdp", "zero1") for mode in modes]
    if count % 2 == 0:
        shared = ["ring", "ulysses"] if count >= 4 else ["ring"]
        found += [Cell(count, "hsdp", mode, data=2) for mode in shared]
        found += [Cell(count, "zero1", "ring", data=2), Cell(count, "fsdp", "ring", data=2)]
        found += [Cell(count, "fsdp", mode, tp=2) for mode in shared]
    found += [
        Cell(count, engine, mode, packed=True) for engine in ("ddp", "fsdp") for mode in modes[:2]
    ]
    found += [Cell(count, engine, optimizer="muon") for engine in ("ddp", "fsdp", "zero1")]
    return found + [Cell(count, engine, dtype=torch.bfloat16) for engine in ("ddp", "fsdp")]


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
