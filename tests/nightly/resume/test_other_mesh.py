"""Saved on one mesh, resumed on another: the same numbers go on, and every sample comes once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_cp.checkpoint import whole
from lightning_cp.errors import CheckpointError
from lightning_cp.optim import Muon
from tests.helpers.pool import run_ranks
from tests.helpers.resume.runs import SaveAt
from tests.helpers.strategies.small import LENGTH, RING, ULYSSES, VOCAB, Batch, Small, trainer_of

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*")

STOP, STEPS = 4, 14


class Fixed(Dataset[Batch]):
    """Rows that are what they are, with their number."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        self.ids = torch.randint(0, VOCAB, (2 * STEPS, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Batch:
        ids = self.ids[index]
        return {"input_ids": ids, "labels": ids.roll(-1), "number": torch.tensor([index])}


class Counting(Small):
    """Notes what it begins with, and its losses and samples."""

    def __init__(self, rows: int, shuffle: bool, optimizer: str) -> None:
        super().__init__()
        self.rows, self.shuffle, self.optimizer = rows, shuffle, optimizer
        self.losses: list[float] = []
        self.seen: list[list[int]] = []
        self.start_pass: list[torch.Tensor] = []

    def train_dataloader(self) -> Any:
        strategy: Any = self.trainer.strategy
        size, rank = strategy.data_parallel_size, strategy.data_rank
        data = Fixed()
        if self.rows == 2 and size == 1 and self.shuffle:
            return DataLoader(data, self.rows, shuffle=True)
        sampler = DistributedSampler(data, size, rank, shuffle=self.shuffle, seed=3)
        return DataLoader(data, self.rows, sampler=sampler)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.seen.append(batch["number"].flatten().tolist())
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        total = strategy.reduce(outputs["loss"].detach().clone(), reduce_op="mean")
        self.losses.append(float(total))

    def configure_optimizers(self) -> Any:
        if self.optimizer == "muon":
            return Muon(self.named_parameters(), lr=0.01, ns_dtype="float64")
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Begins(pl.Callback):
    """Everything that was loaded, whole, when training begins; or at the save."""

    def __init__(self, after: int | None) -> None:
        self.after = after
        self.found: dict[str, torch.Tensor] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if self.after is None:
            self.found = everything(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.after:
            self.found = everything(trainer, pl_module)


def everything(trainer: pl.Trainer, module: Any) -> dict[str, torch.Tensor]:
    """Weights and moments of the optimizer, by name, in float64 on the CPU."""
    found: dict[str, torch.Tensor] = {}
    (optimizer,) = trainer.optimizers
    for name, parameter in module.named_parameters():
        found[name] = _whole(parameter.detach())
        state = optimizer.state[parameter]
        for key in KEPT & state.keys():
            found[f"{name}.{key}"] = _whole(state[key])
    return found


def _whole(x: torch.Tensor) -> torch.Tensor:
    found = whole(x)
    assert found is not None
    return found.clone()


KEPT = {"exp_avg", "exp_avg_sq", "momentum_buffer"}
"""Of an optimizer's state, what has its parameter's shape."""


@dataclass
class Told:
    """Of one rank."""

    losses: list[float] = field(default_factory=list)
    seen: list[list[int]] = field(default_factory=list)
    found: dict[str, torch.Tensor] = field(default_factory=dict)


def run(
    rank: int,
    world: int,
    settings: dict[str, Any],
    path: Path,
    *,
    resumes: bool,
    rows: int = 2,
    shuffle: bool = True,
    optimizer: str = "adamw",
) -> Told:
    """Saved on the way, or begun from what was saved."""
    module = Counting(rows, shuffle, optimizer)
    begins = Begins(None if resumes else STOP)
    callbacks: list[Any] = (
        [begins] if resumes else [begins, SaveAt("on_train_batch_end", STOP, path)]
    )
    trainer = trainer_of(world, settings, callbacks=callbacks, max_steps=STEPS)
    torch.manual_seed(99 if resumes else 5)
    trainer.fit(module, ckpt_path=path if resumes else None)
    return Told(module.losses, module.seen, begins.found)


def move(
    before: tuple[int, dict[str, Any]],
    after: tuple[int, dict[str, Any]],
    path: Path,
    **options: Any,
) -> None:
    """Run on one mesh to its end, go on from its checkpoint on the other, and compare."""
    rows = options.pop("rows", (2, 2))
    whole_run = run_ranks(*_of(before), path, resumes=False, rows=rows[0], **options)
    rest = run_ranks(*_of(after), path, resumes=True, rows=rows[1], **options)
    want, got = whole_run[0], rest[0]
    assert len(got.losses) == STEPS - STOP == 10
    torch.testing.assert_close(got.losses, want.losses[STOP:], rtol=1e-10, atol=0)
    assert got.found.keys() == want.found.keys()
    for name, value in want.found.items():
        assert torch.equal(got.found[name], value), name
    last = _samples(rest, 0)
    assert [sorted(step) for step in last] == [
        sorted(step) for step in _samples(whole_run, 0)[STOP:]
    ]
    used = sorted(number for step in _samples(whole_run, 0)[:STOP] + last for number in step)
    assert used == list(range(2 * STEPS)), "every sample once"


def _of(mesh: tuple[int, dict[str, Any]]) -> tuple[int, Any, dict[str, Any]]:
    world, settings = mesh
    return world, run, settings


def _samples(ranks: list[Told], since: int) -> list[list[int]]:
    """Of every step, over all data ranks; ranks that share samples count once."""
    steps = zip(*(told.seen[since:] for told in ranks), strict=True)
    return [
        [number for seen in {tuple(seen) for seen in step} for number in seen] for step in steps
    ]


RING_4 = (4, {"ring_size": 4, "ulysses_size": 1})
ULYSSES_4 = (4, {"ring_size": 1, "ulysses_size": 4})
RING_2, ULYSSES_2 = (2, RING), (2, ULYSSES)
FSDP_4 = (4, {**RING, "data_parallel": "fsdp", "data_parallel_size": 2})
FSDP_2 = (2, {**RING, "data_parallel": "fsdp"})
DATA_4 = (4, {**RING, "data_parallel_size": 2})
TP = (4, {**RING, "data_parallel": "fsdp", "tensor_parallel_size": 2})
ZERO1 = (2, {**RING, "data_parallel": "zero1"})
HALF = {"rows": (1, 2), "shuffle": False}
CELLS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "cp 4 to 2": (RING_4, RING_2, {}),
    "cp 2 to 4": (RING_2, RING_4, {}),
    "ring to ulysses": (RING_4, ULYSSES_4, {}),
    "cp 2 to one process": (RING_2, (1, {}), {}),
    "data 2 to 1": (DATA_4, RING_2, HALF),
    "data 1 to 2": (RING_2, DATA_4, {"rows": (2, 1), "shuffle": False}),
    "fsdp 4 to 2": (FSDP_4, FSDP_2, HALF),
    "fsdp 4 to 2, in shards": (
        (4, {**FSDP_4[1], "checkpoint": "sharded"}),
        (2, {**FSDP_2[1], "checkpoint": "sharded"}),
        HALF,
    ),
    "tp 1 to 2": (FSDP_2, TP, {}),
    "ddp to fsdp": (RING_2, FSDP_2, {}),
    "fsdp to ddp": (FSDP_2, RING_2, {}),
    "zero1 to ddp": (ZERO1, RING_2, {}),
}
QUICK = ("cp 4 to 2", "fsdp 4 to 2")


@pytest.mark.parametrize("name", QUICK)
def test_another_mesh_goes_on(name: str, tmp_path: Path) -> None:
    before, after, options = CELLS[name]
    move(before, after, tmp_path / "saved.ckpt", **options)


@pytest.mark.parametrize("name", CELLS)
def test_muon_goes_on(name: str, tmp_path: Path) -> None:
    """Its momentum is sharded as parameters are, and is the same to the last bit on the other mesh."""
    before, after, options = CELLS[name]
    move(before, after, tmp_path / "saved.ckpt", optimizer="muon", **options)


@pytest.mark.parametrize("name", sorted(set(CELLS) - set(QUICK)))
def test_other_meshes_go_on(name: str, tmp_path: Path) -> None:
    before, after, options = CELLS[name]
    move(before, after, tmp_path / "saved.ckpt", **options)


def test_another_batch_size_on_the_same_mesh_is_refused(tmp_path: Path) -> None:
    run_ranks(*_of(RING_2), tmp_path / "saved.ckpt", resumes=False, rows=2)
    for message in run_ranks(2, refused, RING, tmp_path / "saved.ckpt", rows=1):
        assert "a batch_size of 2, and now it is 1" in message


def refused(rank: int, world: int, settings: dict[str, Any], path: Path, **options: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        run(rank, world, settings, path, resumes=True, **options)
    return str(error.value)


@pytest.mark.parametrize(
    ("rows", "shuffle", "said"),
    [((1, 1), False, "a step used 2 x 1 samples"), ((1, 2), True, "only where both read through")],
)
def test_samples_that_would_come_twice_or_not_are_refused(
    rows: tuple[int, int], shuffle: bool, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "saved.ckpt"
    run_ranks(*_of(DATA_4), path, resumes=False, rows=rows[0], shuffle=shuffle)
    for message in run_ranks(2, refused, RING, path, rows=rows[1], shuffle=shuffle):
        assert said in message
        assert "end of an epoch" in message
