"""Stages after and without training, in the Trainer: resume, standalone stages, inference mode, the tuner."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops import utilities
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from tests.helpers.pool import run_ranks
from tests.helpers.strategies.runs import HFModule, Run, make_data
from tests.helpers.strategies.small import (
    HYBRID,
    RING,
    Batch,
    Settings,
    Small,
    Staged,
    close,
    loader,
    trainer_of,
    weights,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists:UserWarning"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended:UserWarning"),
]
Case = Callable[[int, int, Settings | None], Any]


class Data(pl.LightningDataModule):
    """Loaders of all stages."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2

    def train_dataloader(self) -> Any:
        return loader(8, self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return loader(4)

    test_dataloader = predict_dataloader = val_dataloader


def losses_of(results: Any) -> list[float]:
    return [value for logged in results for value in logged.values()]


def resumed(rank: int, world_size: int, settings: Settings | None) -> Any:
    """Stopped in the middle of an epoch, and trained on by another Trainer, with its sanity check."""
    found: list[Any] = []
    for steps, resume in ((6, None), (14, "kept/half.ckpt")):
        pl.seed_everything(3, verbose=False)
        module = Staged()
        trainer = trainer_of(
            world_size, settings, max_steps=steps, num_sanity_val_steps=1, max_epochs=5
        )
        # What is resumed is compared with one process that was never stopped.
        trainer.fit(module, datamodule=Data(), ckpt_path=resume if settings else None)
        trainer.save_checkpoint("kept/half.ckpt")
        found += [weights(module), trainer.global_step, trainer.current_epoch]
    return found


def standalone(rank: int, world_size: int, settings: Settings | None) -> Any:
    """The best and the last checkpoint, in stages that are called on their own."""
    module = Staged()
    keep = ModelCheckpoint("kept", monitor="val_loss", save_last=True)
    options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [keep]}
    trainer = trainer_of(world_size, settings, max_epochs=3, **options)
    trainer.fit(module, datamodule=Data())
    found = losses_of(trainer.validate(module, datamodule=Data(), ckpt_path="best", verbose=False))
    found += losses_of(trainer.test(module, datamodule=Data(), ckpt_path="last", verbose=False))
    predicted: Any = trainer.predict(module, datamodule=Data(), ckpt_path="best")
    alone: Any = trainer_of(world_size, settings).predict(Staged(), datamodule=Data())
    return [torch.tensor(found), *predicted, *alone]


class Tuned(Small):
    """Has a rate and a size that can be looked for."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.01

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def tuned(rank: int, world_size: int, settings: Settings | None) -> Any:
    """The learning rate that is suggested, and the weights afterwards: they must be as before."""
    module = Tuned()
    before = weights(module)
    tuner = Tuner(trainer_of(world_size, settings, max_epochs=-1))
    found: Any = tuner.lr_find(module, loader(16), num_training=12, early_stop_threshold=None)
    close(weights(module), before)
    return [torch.tensor(found.results["loss"]), torch.tensor(found.results["lr"]), module.lr]


class Mixed(Small):
    """In float32, to be run under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.float()
        torch.set_default_dtype(torch.float32)


CASES: dict[str, Case] = {"resumed": resumed, "standalone": standalone, "tuned": tuned}


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("settings", [RING, HYBRID], ids=["ring", "hybrid"])
def test_a_stage_is_as_in_one_process(case: str, settings: Settings) -> None:
    want = alone(case)
    for got in run_ranks(4 if settings is HYBRID else 2, CASES[case], settings):
        close(got, want)


@lru_cache(maxsize=8)
def alone(case: str) -> Any:
    return run_ranks(1, CASES[case], None)[0]


# -- random numbers of ranks that have drawn differently before ----------------------------------------


class Draws(Small):
    """Draws in its steps."""

    drawn = 0.0

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.drawn = float(torch.rand(()))
        return super().training_step(batch, batch_idx)


def drawn_after(rank: int, world_size: int, ahead: bool) -> float:
    pl.seed_everything(5, verbose=False)
    module = Draws()
    torch.rand(rank if ahead else 1)
    trainer_of(world_size, RING).fit(module, loader(2))
    return module.drawn


def test_ranks_that_drew_differently_are_set_to_the_seed() -> None:
    first, second = run_ranks(2, drawn_after, True)
    assert first == second
    alike = run_ranks(2, drawn_after, False)
    assert alike == [alike[0]] * 2
    assert alike[0] != first, "where ranks were alike they go on from where they were"


# -- inference mode: Lightning leaves it out on gloo, and CUDA users always have it --------------------


class Inferring(Staged):
    """Notes in which steps inference mode was on."""

    def __init__(self) -> None:
        super().__init__()
        self.modes: list[bool] = []

    def logits(self, batch: Batch) -> torch.Tensor:
        self.modes.append(torch.is_inference_mode_enabled())
        return super().logits(batch)


def inferred(rank: int, world_size: int, settings: Settings | None, hf: bool) -> Any:
    """All evaluating stages in inference mode, before training and between two of them."""
    utilities._distributed_is_initialized = lambda: False  # type: ignore[attr-defined]
    try:
        if hf:
            run = Run(model="hf", steps=2, dtype="float64")
            torch.set_default_dtype(torch.float64)
            torch.manual_seed(1)
            settings = settings and {**settings, "labels": "auto"}
            module: Any = InferringHF(run)
            data: Any = DataLoader(make_data(run), 2)  # type: ignore[arg-type]
        else:
            module, data = Inferring(), loader(4)
        trainer = trainer_of(world_size, settings, num_sanity_val_steps=1)
        found = losses_of(trainer.validate(module, data, verbose=False))
        trainer.fit(module, data, data)
        found += losses_of(trainer.validate(module, data, verbose=False))
        predicted: Any = trainer.predict(module, data)
        trainer.fit(module, data, data)
        assert {False, True} == set(module.modes), "it was never on, or never off"
        return [torch.tensor(found), *[x.clone() for x in predicted], weights(module)]
    finally:
        utilities._distributed_is_initialized = utilities_own


class InferringHF(HFModule):
    """The same around a Hugging Face model."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.modes: list[bool] = []

    def inputs(self, batch: Batch) -> Batch:
        self.modes.append(torch.is_inference_mode_enabled())
        return super().inputs(batch)


SHARDED: list[tuple[Settings, int]] = [
    ({**RING, "data_parallel": engine}, 2) for engine in ("fsdp", "zero1")
]
utilities_own = utilities._distributed_is_initialized  # type: ignore[attr-defined]


@pytest.mark.nightly
@pytest.mark.parametrize("hf", [False, True], ids=["plain", "hugging face"])
def test_inference_mode(hf: bool) -> None:
    (want,) = run_ranks(1, inferred, None, hf)
    for settings, size in ((RING, 2), (HYBRID, 4), *SHARDED):
        for got in run_ranks(size, inferred, settings, hf):
            torch.testing.assert_close(
                got, want, rtol=1e-6 if hf else 1e-10, atol=1e-7 if hf else 1e-12
            )
