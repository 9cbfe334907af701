"""Twenty clipped steps under any engine and mesh, by the Trainer or by Fabric, and in one process.

With D data ranks the one process accumulates over their D samples: what each rank shows and steps along are
then the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric

from lightning_cp.fabric import UlyssesRingStrategy as FabricStrategy
from lightning_cp.optim import Muon
from tests.helpers.pool import run_ranks
from tests.helpers.pool.environment import PoolEnvironment
from tests.helpers.strategies.plain_llama import PlainLlama
from tests.helpers.strategies.runs import Recorder, Run, loader, make_data
from tests.helpers.strategies.small import VOCAB, Small, alone, trainer_of, whole


@dataclass(frozen=True)
class Cell:
    """One run: ``cp`` x ``tp`` ranks share each of ``data`` samples; ``engine=None`` is one process."""

    engine: str | None = None
    cp: int = 1
    tp: int = 1
    data: int = 1
    driver: str = "trainer"
    steps: int = 20
    accumulate: int = 1
    clip: float = 1.0
    clip_by: str = "norm"
    optimizer: str = "sgd"
    seq_len: int = 29
    more: tuple[tuple[str, Any], ...] = ()

    @property
    def ranks(self) -> int:
        return self.cp * self.tp * self.data if self.engine else 1

    @property
    def settings(self) -> dict[str, Any]:
        """The strategy's."""
        replicas = {"data_parallel_replicate_size": 2} if self.engine == "hsdp" else {}
        tensor = {"tensor_parallel_size": self.tp} if self.tp > 1 else {}
        return {
            "labels": "aligned",
            "data_parallel": self.engine,
            "data_parallel_size": self.data,
            **replicas,
            **tensor,
            **dict(self.more),
        }

    @property
    def alone(self) -> Cell:
        """What it has to equal."""
        return Cell(
            data=self.data,
            driver=self.driver,
            steps=self.steps,
            accumulate=self.accumulate,
            clip=self.clip,
            clip_by=self.clip_by,
            optimizer=self.optimizer,
            seq_len=self.seq_len,
        )

    def __str__(self) -> str:
        return f"{self.engine} data {self.data} cp {self.cp} tp {self.tp} {self.driver}"


@dataclass
class Outcome:
    """In float64: the losses of this rank's samples, gradient norms before clipping, final weights."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def execute(rank: int, world_size: int, cell: Cell) -> Outcome:
    """Train; runs on every rank."""
    torch.set_default_dtype(torch.float64)
    data = make_data(
        Run(steps=cell.steps * cell.accumulate * cell.data, rows=1, seq_len=cell.seq_len)
    )
    if cell.engine is not None:  # otherwise all samples, one after the other
        data = data[rank // (cell.cp * cell.tp) :: cell.data]
    torch.manual_seed(1234)
    module = make_module(cell)
    train = _by_trainer if cell.driver == "trainer" else _by_fabric
    outcome = train(world_size, cell, module, loader(data, 1))
    outcome.weights = {name: whole(x.detach()).clone() for name, x in module.named_parameters()}
    return outcome


def make_module(cell: Cell) -> pl.LightningModule:
    """The plain Llama in float64."""
    return {"sgd": Logged, "adamw": Adam, "muon": OfMuon}[cell.optimizer]()


class Logged(Small):
    """Two layers of eight heads."""

    def __init__(self) -> None:
        super().__init__()
        self.model = PlainLlama(VOCAB, num_heads=8, num_kv_heads=2, layers=2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss


class Adam(Logged):
    """With two states for each parameter."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.1)


class OfMuon(Logged):
    """Matrices by Muon, all else by AdamW."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Muon(self.named_parameters(), lr=2e-3, ns_dtype="float64", chunk_mib=0.01)


def _by_trainer(world_size: int, cell: Cell, module: Any, batches: Any) -> Outcome:
    recorder = Recorder()
    trainer = trainer_of(
        world_size,
        cell.settings if cell.engine else None,
        callbacks=[recorder],
        gradient_clip_val=cell.clip,
        gradient_clip_algorithm=cell.clip_by,
        accumulate_grad_batches=cell.accumulate * (1 if cell.engine else cell.data),
    )
    trainer.fit(module, batches)
    return Outcome(recorder.result.losses, recorder.result.grad_norms)


def _by_fabric(world_size: int, cell: Cell, module: Any, batches: Any) -> Outcome:
    fabric, window = _fabric(world_size, cell)
    fabric.launch()
    strategy: Any = fabric.strategy
    setup: Any = fabric.setup(module.model, module.configure_optimizers())
    model, optimizer = setup
    outcome, window = Outcome(), cell.accumulate * (1 if cell.engine else cell.data)
    for index, batch in enumerate(batches):
        batch = strategy.shard_batch(batch) if cell.engine else batch
        last = index % window == window - 1
        with fabric.no_backward_sync(model, enabled=not last and cell.engine is not None):
            loss = _loss(model, batch)
            fabric.backward(loss / window)
        shown = strategy.average(loss) if cell.engine else loss
        outcome.losses.append(float(shown.detach()))
        if last:
            outcome.norms.append(_clip(fabric, model, optimizer, cell))
            optimizer.step()
            optimizer.zero_grad()
    return outcome


def _loss(model: Any, batch: Any) -> torch.Tensor:
    ids = batch["input_ids"]
    logits = model(ids, batch.get("position_ids", torch.arange(ids.shape[1])[None]))
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def _clip(fabric: Any, model: Any, optimizer: Any, cell: Cell) -> float:
    grads = [whole(p.grad) for p in model.parameters() if p.grad is not None]
    norm = torch.stack([g.norm() for g in grads]).norm()
    if cell.clip_by == "value":
        fabric.clip_gradients(model, optimizer, clip_val=cell.clip)
        return float(norm)
    said = fabric.clip_gradients(model, optimizer, max_norm=cell.clip)
    assert abs(float(said) - float(norm)) <= 1e-12 * float(norm), "the norm that is clipped by"
    return float(norm)


def _fabric(world_size: int, cell: Cell) -> tuple[Fabric, int]:
    if cell.engine is None:
        alone()
        return Fabric(accelerator="cpu", devices=1), cell.data
    strategy, plugins = FabricStrategy(**cell.settings), [PoolEnvironment()]
    made = Fabric(accelerator="cpu", devices=world_size, strategy=strategy, plugins=plugins)  # type: ignore[arg-type]
    return made, 1


@lru_cache(maxsize=16)
def baseline(cell: Cell) -> Outcome:
    """One process."""
    return run_ranks(1, execute, cell, timeout=120)[0]


@dataclass(frozen=True)
class Errors:
    """The worst relative ones of a cell, over steps and ranks."""

    loss: float
    norm: float
    weight: float

    @property
    def worst(self) -> float:
        """NaN if any is."""
        return float(torch.tensor([self.loss, self.norm, self.weight]).max())


def errors(cell: Cell, timeout: float = 240) -> Errors:
    """Run a cell and compare every rank with one process."""
    want = baseline(cell.alone)
    outcomes = run_ranks(cell.ranks, execute, cell, timeout=timeout)
    found: list[tuple[float, float, float]] = []
    for rank, outcome in enumerate(outcomes):
        samples = want.losses[rank // (cell.cp * cell.tp) :: cell.data]
        weights = [
            float((outcome.weights[n] - w).abs().max() / w.abs().max())
            for n, w in want.weights.items()
        ]
        assert outcome.weights.keys() == want.weights.keys()
        found.append(
            (
                _relative(outcome.losses, samples),
                _relative(outcome.norms, want.norms),
                float(torch.tensor(weights).max()),
            )
        )
    loss, norm, weight = torch.tensor(found, dtype=torch.float64).max(0).values.tolist()
    return Errors(loss, norm, weight)


def _relative(got: list[float], want: list[float]) -> float:
    assert len(got) == len(want)
    assert len(want)
    a, b = torch.tensor(got, dtype=torch.float64), torch.tensor(want, dtype=torch.float64)
    return float(((a - b).abs() / b.abs()).max())
