"""Where no sample is shared, the strategy does what DDP does: one device, or ``context_parallel_size=1``.

The oracle is Lightning's own ``DDPStrategy`` on the same ranks.
"""

from __future__ import annotations

import copy
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.utils.data import DataLoader

from lightning_cp import UlyssesRingStrategy
from lightning_cp.errors import ConfigError
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.strategies.small import Small, close, loader, trainer_of, weights

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*dataloader_iter:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated:DeprecationWarning"),
]


class WithoutSteps(Small):
    """Steps that are switched off, as Lightning's own tests do."""

    validation_step = None  # type: ignore[assignment]
    test_step = None  # type: ignore[assignment]
    predict_step = None  # type: ignore[assignment]


class Iterating(Small):
    """Fetches its batches by itself."""

    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


class Registering(DDPStrategy):
    """Registers hooks on CPU as well; Lightning's does on CUDA only."""

    def _register_ddp_hooks(self) -> None:
        assert self.model is not None
        if self._ddp_comm_hook is not None:
            self.model.register_comm_hook(self._ddp_comm_state, self._ddp_comm_hook)  # type: ignore[operator]


def apart(
    rank: int, world_size: int, plain: bool, kind: type[Small], options: dict[str, Any]
) -> Any:
    """The weights of two epochs on ranks with different samples, and the number of steps."""
    sizes: dict[str, Any] = (
        {} if plain else {"context_parallel_size": 1, "data_parallel_size": world_size}
    )
    strategy = Registering(**options) if plain else UlyssesRingStrategy(**sizes, **options)
    module = kind()
    spreads = world_size > 1  # with one rank Lightning would shuffle
    trainer = trainer_of(
        world_size, {}, strategy=strategy, use_distributed_sampler=spreads, max_epochs=2
    )
    trainer.fit(module, loader(8, rows=1))
    return weights(module), trainer.global_step


@pytest.mark.quick("Iterating-2", "WithoutSteps-2")
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", [WithoutSteps, Iterating])
def test_steps_of_any_kind(kind: type[Small], world_size: int) -> None:
    want = run_ranks(world_size, apart, True, kind, {})
    got = run_ranks(world_size, apart, False, kind, {})
    for (its, steps), (own, own_steps) in zip(want, got, strict=True):
        close(own, its)
        assert own_steps == steps > 0


def stepping_apart(rank: int, world_size: int, plain: bool) -> Any:
    state = PostLocalSGDState(None, torch.distributed.new_subgroups(1)[0], start_localSGD_iter=2)
    options = {"ddp_comm_state": state, "ddp_comm_hook": post_localSGD_hook}
    return apart(rank, world_size, plain, Small, {**options, "model_averaging_period": 3})


@pytest.mark.nightly
def test_local_sgd() -> None:
    want, got = run_ranks(2, stepping_apart, True), run_ranks(2, stepping_apart, False)
    for (its, _), (own, _) in zip(want, got, strict=True):
        close(own, its)
    assert not torch.equal(got[0][0], got[1][0]), "no rank stepped by itself"


def test_a_hook_that_leaves_gradients_on_their_ranks() -> None:
    (one, _), (other, _) = run_ranks(2, apart, False, Small, {"ddp_comm_hook": noop_hook})
    assert not torch.equal(one, other)


class Boring(pl.LightningModule):
    """Without attention, and with batches that are plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = torch.nn.Linear(4, 2).double()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Unused(Boring):
    """Trains a layer that its only step does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Linear(4, 2).double()


def one_step(rank: int, world_size: int, plain: bool) -> torch.Tensor:
    module = Unused()
    strategy = DDPStrategy() if plain else UlyssesRingStrategy()
    trainer = trainer_of(world_size, {}, strategy=strategy, limit_train_batches=1)
    trainer.fit(module, Rows())
    return weights(module)


def test_a_parameter_that_the_only_step_does_not_use() -> None:
    """With one rank there is nothing to be averaged, and DDP complains of the second forward only."""
    (want,), (got,) = run_ranks(1, one_step, True), run_ranks(1, one_step, False)
    assert torch.equal(got, want)
    assert not torch.equal(got, weights(Unused()))


class Looking(Boring):
    """Tells of its callbacks and loaders, and may fail."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.fails, self.seen = fails, None

    def configure_callbacks(self) -> list[pl.Callback]:
        return [Lines()]

    def on_train_batch_start(self, batch: torch.Tensor, batch_idx: int) -> None:
        loader: Any = self.trainer.train_dataloader
        self.seen = isinstance(loader, Rows), isinstance(loader, list)
        if self.fails:
            raise KeyError("of the user")


class Lines(pl.Callback):
    """A callback of the module."""


class Saving(Boring):
    """Keeps what its hook is shown of a checkpoint."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.shown = checkpoint


def save(rank: int, world_size: int, plain: bool, folder: Path) -> list[str]:
    module, kind = Saving(), DDPStrategy if plain else UlyssesRingStrategy
    trainer = trainer_of(world_size, {}, strategy=kind(), max_steps=1)
    trainer.fit(module, Rows())
    trainer.save_checkpoint(folder / "a.ckpt")
    return sorted(module.shown)


def test_hooks_are_shown_a_checkpoint_that_stays_as_it_was(tmp_path: Path) -> None:
    (want,), (got,) = (run_ranks(1, save, plain, tmp_path) for plain in (True, False))
    assert got == want


def set_up(rank: int, world_size: int, plain: bool) -> int:
    kind = DDPStrategy if plain else UlyssesRingStrategy
    trainer = trainer_of(world_size, {}, strategy=kind(), max_steps=1)
    trainer.strategy.setup_environment()
    return torch.distributed.get_world_size()


@pytest.mark.parametrize("ranks", [1, 2])
def test_processes_connect_without_a_module(ranks: int) -> None:
    assert run_ranks(ranks, set_up, False) == run_ranks(ranks, set_up, True) == [ranks] * ranks


class Rows:
    """A loader that is no ``DataLoader``."""

    def __iter__(self) -> Any:
        return iter(torch.arange(8.0).double().view(2, 4))


def look(rank: int, world_size: int, strategy: Any) -> list[Any]:
    found: list[Any] = []
    for fails in (False, True):
        module = Looking(fails)
        trainer = trainer_of(world_size, {}, strategy=copy.deepcopy(strategy), max_steps=1)
        with pytest.raises(KeyError) if fails else nullcontext():
            trainer.fit(module, Rows())
        found += [module.seen, [type(each).__name__ for each in trainer.callbacks]]  # type: ignore[attr-defined]
    return found


def test_callbacks_are_the_users_and_loaders_are_of_their_kind() -> None:
    """After a run, also one that failed, there is no callback that was not there before."""
    (want,), (got,) = run_ranks(1, look, DDPStrategy()), run_ranks(1, look, UlyssesRingStrategy())
    assert got == want
    assert want[0] == (True, False)
    assert want[1][-1] == "Lines"


def load_unattached(rank: int, world_size: int, folder: Path, plain: bool) -> list[Any]:
    path, keys = folder / f"{plain}.ckpt", []
    kind = DDPStrategy if plain else UlyssesRingStrategy
    trainer = trainer_of(world_size, {}, strategy=kind(), max_steps=1)
    trainer.fit(Boring(), Rows())
    trainer.save_checkpoint(path)
    for module in (None, Boring()):
        other = trainer_of(world_size, {}, strategy=kind())
        if module is not None:
            other.strategy.connect(module)
        found = other.strategy.load_checkpoint(path, weights_only=False)
        keys.append((sorted(found["state_dict"]), len(found["optimizer_states"])))
        if module is not None:
            other.strategy.load_model_state_dict(found)
            keys.append(float(module.layer.weight.detach().sum()))
    with pytest.raises(FileNotFoundError, match="Checkpoint file not found"):
        other.fit(Boring(), Rows(), ckpt_path=folder / "none.ckpt")
    return keys


def test_a_checkpoint_is_read_before_there_is_a_run(tmp_path: Path) -> None:
    """As code that looks into it does: without a module, and with one that no Trainer has."""
    (want,), (got,) = (run_ranks(1, load_unattached, tmp_path, plain) for plain in (True, False))
    assert got == want
    assert want[0][1] == 1


def boring(rank: int, world_size: int, strategy: Any) -> torch.Tensor:
    module, trainer = (
        Boring(),
        trainer_of(world_size, {}, strategy=strategy, use_distributed_sampler=True),
    )
    rows = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    trainer.fit(module, DataLoader(list(rows), batch_size=2))  # type: ignore[arg-type]
    return weights(module)


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_a_model_without_attention_trains_as_the_error_says(world_size: int) -> None:
    match = f"context_parallel_size=1 and data_parallel_size={world_size}"
    expect_on_every_rank(world_size, boring, UlyssesRingStrategy(), error=ConfigError, match=match)
    sizes: dict[str, Any] = {"context_parallel_size": 1, "data_parallel_size": world_size}
    got = run_ranks(world_size, boring, UlyssesRingStrategy(**sizes))
    for own, its in zip(got, run_ranks(world_size, boring, DDPStrategy()), strict=True):
        close(own, its)


class Spiking(Boring):
    """Its loss is NaN once."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if batch_idx == 2 and self.global_rank == 0 else loss


def spiking(rank: int, world_size: int, folder: Path, finite_only: bool) -> int:
    """Steps until Lightning's callback ends the run, or until its end."""
    strategy = UlyssesRingStrategy(context_parallel_size=1, data_parallel_size=world_size)
    detection = SpikeDetection(warmup=1, exclude_batches_path=folder, finite_only=finite_only)
    trainer = trainer_of(world_size, {}, strategy=strategy, callbacks=[detection])
    with pytest.raises(TrainingSpikeException) if finite_only else nullcontext():
        trainer.fit(Spiking(), DataLoader(list(torch.ones(6, 4).double())))  # type: ignore[arg-type]
    return trainer.global_step


def test_spike_detection_has_its_turn(tmp_path: Path) -> None:
    assert run_ranks(2, spiking, tmp_path, True) == [3, 3]
    assert "2" in (tmp_path / "skip_batches.json").read_text()
    assert run_ranks(2, spiking, tmp_path, False) == [6, 6]


class Terminated(Boring):
    """Rank 1 is sent SIGTERM in the first micro-batch of a window."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == 3 and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.trainer.received_sigterm)


def terminated(rank: int, world_size: int, folder: Path) -> tuple[list[bool], bool]:
    strategy = UlyssesRingStrategy(context_parallel_size=1, data_parallel_size=world_size)
    module = Terminated()
    trainer = trainer_of(
        world_size, {}, strategy=strategy, accumulate_grad_batches=3, default_root_dir=folder
    )
    with pytest.raises(SIGTERMException):
        trainer.fit(module, DataLoader(list(torch.ones(12, 4).double())))  # type: ignore[arg-type]
    return module.seen, trainer.received_sigterm


def test_a_trainer_knows_of_sigterm_and_ends_the_window_first(tmp_path: Path) -> None:
    (one, one_knows), (other, other_knows) = run_ranks(2, terminated, tmp_path)
    assert one == [False] * 5  # the run ends in the hook after the sixth
    assert other == [False] * 3 + [True] * 2
    assert one_knows
    assert other_knows


def loaders(rank: int, world_size: int) -> tuple[bool, type, int]:
    strategy = UlyssesRingStrategy(context_parallel_size=1, data_parallel_size=world_size)
    trainer, given = trainer_of(world_size, {}, strategy=strategy), loader(4)
    trainer.fit(Small(), given)
    its: Any = trainer.train_dataloader
    return isinstance(its, DataLoader), type(copy.deepcopy(its)), len(its.dataset)


def test_a_trainer_has_the_users_loader() -> None:
    assert run_ranks(1, loaders) == [(True, DataLoader, 4)]
