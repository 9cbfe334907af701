"""Training runs of the lines: settings, model and data, and the same run in one process.

The one process is a plain loop of PyTorch, which each rank runs for itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
import torch.nn.functional as F

from benchmarks.gpus.line import WrongResultError
from lightning_cp.optim import Muon, QKClip
from tests.helpers.optim.qk_models import clipped_by_hand, maxima_by_hand
from tests.helpers.strategies.plain_llama import Block, PlainLlama
from tests.helpers.strategies.runs import Run, make_data
from tests.helpers.strategies.small import VOCAB, whole

LENGTH = 61
LIMITS = {"64-true": 1e-8, "bf16-true": 2e-2, "16-mixed": 5e-3}
"""Largest relative differences of losses, by precision; in float64 also of weights."""
DTYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-mixed": torch.float32}
"""Of parameters, by precision."""
TAU, ALPHA = 20.0, 0.5
"""Settings of QK-clip; scores begin above."""


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
    precision: str = "64-true"
    driver: str = "trainer"
    """Or ``fabric``."""
    head_dim: int = 64
    """Of runs that are not exact."""
    more: tuple[tuple[str, Any], ...] = ()
    """Other settings of the strategy."""

    @property
    def cp(self) -> int:
        """Ranks that share a sample's tokens."""
        return self.count // (self.data * self.tp)

    @property
    def is_exact(self) -> bool:
        """True in float64, with the reference kernel; others have the kernel that ``auto`` chooses."""
        return self.precision == "64-true"

    @property
    def is_scaled(self) -> bool:
        """True if a ``GradScaler`` scales the losses."""
        return self.precision == "16-mixed"

    @property
    def clips_scores(self) -> bool:
        """True with Muon and QK-clip."""
        return self.optimizer == "muonclip"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of parameters."""
        return DTYPES[self.precision]

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
            "kernel": "reference" if self.is_exact else "auto",
            "parity_check": "off",
            **dict(self.more),
        }

    def scaler(self, device_type: str) -> torch.amp.GradScaler:
        """A scaler that does nothing, except in float16."""
        return torch.amp.GradScaler(
            device_type, init_scale=2.0**10, growth_interval=100, enabled=self.is_scaled
        )

    def __str__(self) -> str:
        sizes = f"data {self.data} x cp {self.cp}" + (f" x tp {self.tp}" if self.tp > 1 else "")
        batch = "packed" if self.packed else "dense"
        numbers = self.precision if self.is_scaled else str(self.dtype).removeprefix("torch.")
        words = [f"{self.engine} {self.mode}", sizes, batch, self.optimizer, numbers]
        words += [name for name, value in self.more if value is True]
        words += ["Fabric"] if self.driver == "fabric" else []
        return ", ".join(words)


class Module(pl.LightningModule):
    """Two layers of a Llama; documents by a mask in one process, by the strategy where ranks share them."""

    def __init__(self, cell: Cell, *, is_alone: bool = False) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.cell, self.is_alone = cell, is_alone
        head_dim = 8 if cell.is_exact else cell.head_dim
        self.model = PlainLlama(VOCAB, *cell.heads, head_dim=head_dim, layers=2).to(cell.dtype)
        if cell.clips_scores:
            _enlarge_scores(self.model)
        if not cell.is_exact:
            _enlarge_outputs(self.model)
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
        if self.cell.optimizer in ("muon", "muonclip"):
            clip = None
            if self.cell.clips_scores and not self.is_alone:
                clip = QKClip(tau=TAU, alpha=ALPHA, query="q", key="k")
            ns_dtype = "float64" if self.cell.is_exact else "bfloat16"
            return Muon(self.named_parameters(), lr=2e-3, ns_dtype=ns_dtype, qk_clip=clip)
        if self.cell.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=1e-3)
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


@torch.no_grad()
def _enlarge_scores(model: PlainLlama) -> None:
    """Scale queries and keys, each head by another number, so that some heads' scores pass ``TAU``."""
    for block in _blocks(model):
        factors = torch.linspace(2.0, 9.0, block.num_heads).repeat_interleave(block.head_dim)
        block.q.weight.mul_(factors[:, None])
        block.k.weight.mul_(3.0)


@torch.no_grad()
def _enlarge_outputs(model: PlainLlama) -> None:
    """Scale what attention adds, so that a message that is lost changes losses by more than rounding."""
    for block in _blocks(model):
        block.v.weight.mul_(3.0)
        block.o.weight.mul_(3.0)


def _blocks(model: PlainLlama) -> list[Block]:
    return [block for block in model.blocks if isinstance(block, Block)]


@dataclass(frozen=True)
class Numbers:
    """A run's losses, and its weights on the CPU."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    kernels: str = ""
    """Kernels that computed attention."""


def samples(cell: Cell, steps: int) -> list[dict[str, torch.Tensor]]:
    """Rows of all data ranks; packed ones have several documents."""
    data = make_data(Run(steps=steps * cell.data, rows=1, seq_len=LENGTH, packed=cell.packed))
    counted = [row for row in data if (row["labels"] >= 0).any()]
    return counted[: len(counted) // cell.data * cell.data]


def one_process(cell: Cell, steps: int, device_type: str) -> Numbers:
    """Train on one device: steps over the samples of all data ranks, one after the other.

    As in a process that has no others: Muon would share its work with the world.

    Raises:
        WrongResultError: a run with QK-clip has no score to clip.
    """
    module = Module(cell, is_alone=True).to(device_type)
    optimizer, scaler = module.configure_optimizers(), cell.scaler(device_type)
    rows = [
        {name: x[None].to(device_type) for name, x in row.items()} for row in samples(cell, steps)
    ]
    losses: list[float] = []
    clipped = 0
    with mock.patch.object(torch.distributed, "is_initialized", return_value=False):
        for step in range(len(rows) // cell.data):
            some = rows[step * cell.data : (step + 1) * cell.data]
            maxima = maxima_by_hand(module.model, some[0]) if cell.clips_scores else {}
            optimizer.zero_grad()
            for row in some:
                with torch.autocast(device_type, torch.float16, enabled=cell.is_scaled):
                    loss = module.loss(row)
                scaler.scale(loss / cell.data).backward()
                losses.append(float(loss.detach()))
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            if maxima:
                stepped = module.model.state_dict()
                module.model.load_state_dict(clipped_by_hand(stepped, maxima, TAU, ALPHA))
            clipped += sum(float(x.max()) > TAU for x in maxima.values())
    if cell.clips_scores and not clipped:
        raise WrongResultError("no score passes tau, so a run with QK-clip shows nothing")
    return Numbers(losses, weights(module))


def weights(module: pl.LightningModule) -> dict[str, torch.Tensor]:
    """All parameters in float64 on the CPU; every rank has to ask where they are spread."""
    found = ((name, whole(x.detach())) for name, x in module.named_parameters())
    return {name: x.cpu().double() for name, x in found}


def cells(count: int) -> list[Cell]:
    """Every engine and mode; packed rows, Muon, tensor parallelism, precisions, offload and Fabric."""
    modes, engines, halves = _modes(count), ("ddp", "fsdp", "zero1"), count % 2 == 0
    found = [Cell(count, engine, mode) for engine in engines for mode in modes]
    if halves:
        shared = _modes(count // 2)
        found += [Cell(count, "hsdp", mode, data=2) for mode in shared]
        found += [Cell(count, "zero1", "ring", data=2), Cell(count, "fsdp", "ring", data=2)]
        found += [Cell(count, "fsdp", mode, tp=2) for mode in shared]
    found += [
        Cell(count, engine, mode, packed=True) for engine in ("ddp", "fsdp") for mode in modes[:2]
    ]
    for optimizer in ("muon", "muonclip"):
        found += [Cell(count, engine, optimizer=optimizer) for engine in engines]
    found += [Cell(count, "fsdp", optimizer="muonclip", tp=2)] if halves else []
    found += [Cell(count, engine, mode, driver="fabric") for engine in engines for mode in modes]
    found += [Cell(count, "ddp", mode, precision="bf16-true") for mode in modes]
    found += [Cell(count, "fsdp", precision="bf16-true")]
    found += [Cell(count, engine, precision="16-mixed") for engine in engines]
    activations = (("activation_checkpointing", "blocks"), ("activation_offload", True))
    found += [Cell(count, engine, more=activations) for engine in ("ddp", "fsdp")]
    return [*found, Cell(count, "fsdp", more=(("cpu_offload", True),))]


def _modes(ranks: int) -> list[str]:
    """Modes of ranks that share a sample."""
    if ranks == 1:
        return ["ring"]
    hybrid = ["hybrid"] if ranks >= 4 and ranks % 2 == 0 else []
    return ["ulysses", "ring", "zigzag_llama3", *hybrid]
